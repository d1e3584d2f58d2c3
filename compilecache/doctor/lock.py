"""Whether the lock of a cache root keeps a second process out, and comes back when one is killed."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from compilecache.cachedir import CacheDir
from compilecache.doctor.finding import Finding
from compilecache.doctor.root import ELSEWHERE
from compilecache.errors import CompileCacheError, LockTimeout
from compilecache.rootfolder import OWN

SECOND = (sys.executable, "-P", "-m", "compilecache.doctor.second")
DEADLINE = 30.0
"""Seconds for each answer of the second process."""
BACK_SECONDS = 5.0
"""In which the kernel must have given back the lock of a killed process."""
WHY = (
    "One process at a time fills a cache root; without a lock two of them spoil each other's files."
)


def check_lock(cache: CacheDir, second: Sequence[str] = SECOND) -> Iterator[Finding]:
    """Tried with a lock of its own below the root, so that nobody who works there is disturbed."""
    yield _holder(cache)
    with tempfile.TemporaryDirectory(dir=cache.root / OWN, prefix="doctor-") as folder:
        probe = CacheDir(folder)
        probe.create()
        try:
            yield from _try(probe, second)
        except (CompileCacheError, OSError, NotImplementedError) as error:
            told = error.problem if isinstance(error, CompileCacheError) else str(error)
            yield Finding(
                f"the lock of the cache root cannot be tried: {told}", WHY, ELSEWHERE, "error"
            )


def _holder(cache: CacheDir) -> Finding:
    try:
        with cache.lock("doctor: looking", timeout=0.0):
            return Finding("nobody holds the lock of the cache root")
    except LockTimeout as error:
        return Finding(
            f"the cache root is being filled by {error.holder}",
            "Whoever needs it waits until that is done.",
            "Wait, or end that process if it hangs; the lock then comes back by itself",
            "note",
        )


def _try(probe: CacheDir, second: Sequence[str]) -> Iterator[Finding]:
    with _started([*second, str(probe.root)]) as process:
        with probe.lock("doctor: the first process"):
            refused = _answer(process)
        yield _judged(refused == "refused", "a second process", "is kept out", "is let in")
        _send(process)
        held = _answer(process) == "held"
        yield _judged(held, "a lock that is given back", "can be taken", "cannot be taken")
        if held:
            kept = not _can_take(probe, 0.0)
            yield _judged(kept, "this process", "is kept out", "is let in")
            process.kill()
            process.wait()
            text = "the lock of a killed process"
            yield _judged(_can_take(probe, BACK_SECONDS), text, "comes back", "does not come back")


def _judged(fine: bool, who: str, good: str, bad: str) -> Finding:
    text = f"{who} {good if fine else bad}"
    return Finding(text) if fine else Finding(f"lock: {text}", WHY, ELSEWHERE, "error")


def _can_take(probe: CacheDir, seconds: float) -> bool:
    try:
        with probe.lock("doctor: again", timeout=seconds):
            return True
    except LockTimeout:
        return False


@contextmanager
def _started(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    inherited = [path for path in sys.path if path]
    package = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([package, *inherited])}
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _answer(process: subprocess.Popen[str]) -> str:
    """The next line of the second process; a process that says nothing is an OSError."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], DEADLINE)
    line = process.stdout.readline().strip() if ready else ""
    if not line:
        raise OSError(f"the second process said nothing within {DEADLINE:.0f} s")
    return line


def _send(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
