"""One request to a Python process of its own, and its answer, as JSON in files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, JsonValue, ValidationError

from compilecache import errors
from compilecache.errors import CompileCacheError, CompileFailed

Answer = TypeVar("Answer", bound=BaseModel)


class Failure(BaseModel):
    """An error of the process, to be raised by whoever started it."""

    kind: str
    """Name of a class of ``compilecache.errors``."""
    problem: str
    next_step: str
    fields: dict[str, JsonValue] = {}

    @classmethod
    def of(cls, error: CompileCacheError) -> Failure:
        """The same error, to be sent."""
        fields = {k: v for k, v in vars(error).items() if k not in ("problem", "next_step")}
        return cls(
            kind=type(error).__name__,
            problem=error.problem,
            next_step=error.next_step,
            fields=json.loads(json.dumps(fields)),
        )

    def error(self) -> CompileCacheError:
        """The error again."""
        kind = getattr(errors, self.kind, CompileCacheError)
        fields = {name: _tuples(value) for name, value in self.fields.items()}
        made: CompileCacheError = kind(self.problem, next_step=self.next_step, **fields)
        return made


def _tuples(value: JsonValue) -> object:
    """Errors hold tuples where JSON has lists."""
    if isinstance(value, list):
        return tuple(map(_tuples, value))
    if isinstance(value, dict):
        return {name: _tuples(item) for name, item in value.items()}
    return value


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
