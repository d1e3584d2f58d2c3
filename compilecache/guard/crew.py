"""The threads of a run: one that fails stops the others, and the parent hears of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Self, TypeVarTuple

from compilecache.errors import PlanError, WorkerFailed
from compilecache.guard.failure import Failure

Arguments = TypeVarTuple("Arguments")

GLANCE = 0.05
"""Seconds between two looks at whether a thread has ended."""


class Crew:
    """Starts threads and joins them; ``warm.crew()`` makes one whose workers are prepared.

    Leaving the block waits for every thread. The first error of any of them is raised there as
    WorkerFailed with the error as its cause, and sets ``stopping`` for the others.
    """

    def __init__(
        self,
        failure: Failure | None = None,
        worker: Callable[[str], AbstractContextManager[None]] | None = None,
        *,
        patience: float = 10.0,
    ) -> None:
        self._failure = failure or Failure()
        self._worker = worker
        self._patience = patience
        self._threads: list[threading.Thread] = []

    @property
    def stopping(self) -> threading.Event:
        """Set once a thread has failed: whoever waits for a queue or a barrier looks here."""
        return self._failure.stopping

    def check(self) -> None:
        """Raises WorkerFailed once a thread of the run has failed."""
        self._failure.check()

    def start(
        self,
        function: Callable[[*Arguments], object],
        *args: *Arguments,
        name: str | None = None,
        device: str | None = None,
    ) -> threading.Thread:
        """Calls the function in a thread of its own; with ``device`` inside ``warm.worker(device)``."""
        label = name or f"{getattr(function, '__name__', 'thread')}-{len(self._threads)}"
        around: AbstractContextManager[None] = nullcontext()
        if device is not None:
            if self._worker is None:
                raise PlanError(
                    "this crew has no warm devices",
                    next_step="Make it with warm.crew(), or leave device out",
                    field="device",
                )
            around = self._worker(device)

        def run() -> None:
            try:
                with around:
                    function(*args)
            except BaseException as error:
                self._failure.record(label, error)

        thread = threading.Thread(target=run, name=label, daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    def wait(self) -> None:
        """Returns when all threads have ended. Raises WorkerFailed when one failed.

        After a failure the others get ``patience`` seconds to stop; who does not is named.
        """
        deadline: float | None = None
        while running := [thread for thread in self._threads if thread.is_alive()]:
            if deadline is None and self.stopping.is_set():
                deadline = time.monotonic() + self._patience
            if deadline is not None and time.monotonic() > deadline:
                self._give_up([thread.name for thread in running])
            running[0].join(GLANCE)
        self._failure.settle()

    def _give_up(self, running: list[str]) -> None:
        cause = self._failure.as_error()
        raise WorkerFailed(
            f"{cause.problem}; still running after {self._patience:.0f} s: {', '.join(running)}",
            next_step="Let every wait for a queue or another thread look at crew.stopping",
            worker=cause.worker or running[0],
        ) from self._failure.error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self._wait_or_stop()
            return
        failed = self._stop()
        if failed is not None and isinstance(error, Exception):
            raise failed from failed.__cause__

    def _wait_or_stop(self) -> None:
        """Waits; when the waiting itself is interrupted, the threads are told to stop."""
        try:
            self.wait()
        except WorkerFailed:
            raise
        except BaseException:
            self._stop()
            raise

    def _stop(self) -> WorkerFailed | None:
        """Tells the threads to stop and waits for them; the error if one of them failed."""
        self.stopping.set()
        try:
            self.wait()
        except WorkerFailed as failed:
            return failed if failed.__cause__ is not None else None
        return None
