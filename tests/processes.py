"""Real processes for tests: forked from one that has imported torch, killed and waited for by id."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

TESTS = Path(__file__).parent
ROOT = TESTS.parent
DEADLINE = 240.0

T = TypeVar("T")

SETTINGS = {
    "PYTHONPATH": os.pathsep.join(
        map(
            str,
            (
                ROOT,
                TESTS,
                *(TESTS / name for name in ("main", "guard", "programs", "service", "faults")),
            ),
        )
    ),
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "2",
    # One process, so that a kill ends all of it; and no libraries just to ask the CPU what it can.
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "TORCHINDUCTOR_VEC_ISA_OK": "1",
}
"""Environment of every process, unless a test says otherwise."""


def environment(**changes: str | None) -> dict[str, str]:
    """The environment of a test's process; None removes a variable."""
    base = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TORCHINDUCTOR_", "COMPILECACHE_", "AWS_"))
    }
    merged = {**base, **SETTINGS, **changes}
    return {name: value for name, value in merged.items() if value is not None}


@dataclass(frozen=True)
class Ended:
    """A process that has ended."""

    code: int
    """Exit code, negative for a signal."""
    out: str
    """What it wrote to standard output."""
    err: str
    """What it wrote to standard error."""

    @property
    def json(self) -> dict[str, object]:
        """Standard output as the JSON that a command printed."""
        return json.loads(self.out)  # type: ignore[no-any-return]


class Running:
    """A process that was started."""

    def __init__(self, pid: int, folder: Path, poll: Callable[[int], int | None]) -> None:
        self.pid = pid
        self._folder = folder
        self._poll = poll
        self._code: int | None = None

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        if self._code is None:
            self._code = self._poll(self.pid)
        return self._code is None

    @property
    def out(self) -> str:
        """What it has written to standard output so far."""
        path = self._folder / "stdout"
        return path.read_text() if path.exists() else ""

    @property
    def err(self) -> str:
        """What it has written to standard error so far."""
        return self._written("stderr")

    def _written(self, name: str) -> str:
        path = self._folder / name
        return path.read_text() if path.exists() else ""

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Sends a signal to this process alone."""
        if self.running:
            os.kill(self.pid, number)

    def kill_all(self) -> None:
        """SIGKILL for the process and those it started, as a container's end does it."""
        if self.running:
            os.killpg(self.pid, signal.SIGKILL)

    def wait(self, timeout: float = DEADLINE) -> Ended:
        """Waits for the end; a process that does not come to one is killed and fails the test."""
        deadline = time.monotonic() + timeout
        while self.running:
            if time.monotonic() > deadline:
                self.kill_all()
                raise AssertionError(f"still running after {timeout:.0f} s: {self.err[-4000:]}")
            time.sleep(0.01)
        assert self._code is not None
        return Ended(self._code, self._written("stdout"), self.err)

    def result(self) -> object:
        """What its function returned; fails the test with its output when it did not return."""
        ended = self.wait()
        assert ended.code == 0, f"ended with {ended.code}\n{ended.err[-6000:]}"
        with (self._folder / "result").open("rb") as file:
            return pickle.load(file)


class Template:
    """Starts processes; made once for a run of the tests."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, str(TESTS / "template.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
            cwd=folder,
        )
        assert self._ask(None) == "ready\n"

    def close(self) -> None:
        """Ends the template; processes it started live on."""
        self._process.communicate(timeout=30)

    def _ask(self, order: Mapping[str, object] | None) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            if order is not None:
                self._process.stdin.write(json.dumps(order) + "\n")
                self._process.stdin.flush()
            return self._process.stdout.readline()

    def _poll(self, pid: int) -> int | None:
        return json.loads(self._ask({"act": "poll", "pid": pid}))  # type: ignore[no-any-return]

    def start(
        self,
        function: Callable[..., object],
        *arguments: object,
        env: Mapping[str, str | None] | None = None,
        cwd: Path | None = None,
        **keywords: object,
    ) -> Running:
        """Calls a module's function in a fresh process."""
        folder = self._folder / str(next(self._numbers))
        folder.mkdir()
        with (folder / "arguments").open("wb") as file:
            pickle.dump((arguments, keywords), file)
        order = {
            "act": "start",
            "function": f"{function.__module__}:{function.__qualname__}",
            "environment": environment(**(env or {})),
            "folder": str(cwd or folder),
            **{name: str(folder / name) for name in ("arguments", "result", "stdout", "stderr")},
        }
        return Running(json.loads(self._ask(order)), folder, self._poll)

    def call(self, function: Callable[..., T], *arguments: object, **keywords: object) -> T:
        """The result of a module's function, called in a fresh process."""
        return self.start(function, *arguments, **keywords).result()  # type: ignore[arg-type, return-value]

    def command(self, *words: object, **keywords: object) -> Ended:
        """``compilecache …`` in a fresh process."""
        return self.begin(*words, **keywords).wait()

    def warmup(self, *words: object) -> Ended:
        """``warmup …`` in a fresh process."""
        return self.start(warmup, [str(word) for word in words]).wait()

    def begin(self, *words: object, **keywords: object) -> Running:
        """``compilecache …``, started."""
        return self.start(command, [str(word) for word in words], **keywords)  # type: ignore[arg-type]


def warmup(words: list[str]) -> None:
    """The other command line."""
    sys.argv = ["warmup", *words]
    from warmup.cli import main

    main()


def command(words: list[str]) -> None:
    """The command line, as the console script runs it."""
    sys.argv = ["compilecache", *words]
    from compilecache.cli import main

    main()
