"""One request to a Python process of its own, and its answer, as JSON in files."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from compilecache.errors import CompileFailed

Answer = TypeVar("Answer", bound=BaseModel)


def environment_of(root: Path) -> dict[str, str]:
    """This process's own, with that cache root, and modules found where they are found here."""
    return {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(root),
        "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
    }


def ask(
    module: str,
    request: BaseModel,
    kind: type[Answer],
    environment: Mapping[str, str],
    *,
    who: str,
    next_step: str,
    timeout: float | None = None,
    patience: float = 0.0,
) -> Answer:
    """What ``python -m MODULE REQUEST ANSWER`` writes. Its output goes to standard error.

    ``timeout``: seconds until it is ended; ``patience``: seconds to end in, when this process is
    interrupted. Raises CompileFailed naming ``who`` when it ends without an answer.
    """
    with tempfile.TemporaryDirectory(prefix="compilecache-") as folder:
        asked, told = Path(folder, "request.json"), Path(folder, "result.json")
        asked.write_text(request.model_dump_json(), encoding="utf-8")
        command = [sys.executable, "-m", module, str(asked), str(told)]
        ended = _run(command, environment, timeout, patience)
        try:
            return kind.model_validate_json(told.read_bytes())
        except (OSError, ValidationError) as error:
            raise CompileFailed(
                f"the {who} {ended} before it could report",
                next_step=f"See what it printed above, {next_step}",
                target=who,
            ) from error


def _run(
    command: list[str], environment: Mapping[str, str], timeout: float | None, patience: float
) -> str:
    """How it ended, in words."""
    with subprocess.Popen(command, env=environment, stdout=sys.stderr.fileno()) as child:
        try:
            code = child.wait(timeout)
        except subprocess.TimeoutExpired:
            return f"was ended after {timeout:.0f} s"
        except BaseException:
            with suppress(subprocess.TimeoutExpired):
                child.terminate()
                child.wait(patience)
            raise
        finally:
            child.kill()
    return f"ended with {code}"
