"""Whether Python keeps the bytecode of torch; where it may not, every process makes it anew."""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from compilecache.doctor.finding import Finding

MODULES = ("__init__.py", "_dynamo/__init__.py", "_inductor/codecache.py")
"""Of torch; a start imports some two thousand."""
WHY = (
    "Every process then compiles torch's Python sources before its first step: twelve seconds, seen on a "
    "host with H200s."
)


def check_bytecode(given: Mapping[str, str], torch: Path | None = None) -> Iterator[Finding]:
    """``torch``: its folder; by default the installed one, which is not imported."""
    folder = torch or _installed()
    if folder is None:
        return
    sources = [folder / name for name in MODULES if (folder / name).is_file()]
    missing = [source for source in sources if not _bytecode(source).is_file()]
    if not missing:
        yield Finding("torch's bytecode is kept")
        return
    reason = _reason(given, missing[0])
    if reason:
        compile_all = f"{shlex.quote(sys.executable)} -m compileall -q {shlex.quote(str(folder))}"
        what = f"torch's bytecode is not there and is not kept: {reason}"
        yield Finding(what, WHY, f"{compile_all}  # when the image is built", "warning")


def _installed() -> Path | None:
    spec = importlib.util.find_spec("torch")
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def _bytecode(source: Path) -> Path:
    return Path(importlib.util.cache_from_source(str(source)))


def _reason(given: Mapping[str, str], source: Path) -> str:
    """What keeps Python from writing it; "" where nothing does."""
    if given.get("PYTHONDONTWRITEBYTECODE"):
        return "PYTHONDONTWRITEBYTECODE is set"
    folder = _bytecode(source).parent
    there = next(path for path in (folder, *folder.parents) if path.exists())
    return "" if os.access(there, os.W_OK) else f"'{there}' cannot be written"
