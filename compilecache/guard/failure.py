"""The first failure of a run's threads: everybody else hears of it and stops."""

from __future__ import annotations

import threading

from compilecache.errors import WorkerFailed


class Failure:
    """Shared by all threads of one run; holds the first error that any of them raised."""

    def __init__(self) -> None:
        self.stopping = threading.Event()
        """Set once a thread has failed, or the run was told to stop."""
        self.error: BaseException | None = None
        self._worker = ""
        self._lock = threading.Lock()

    def record(self, worker: str, error: BaseException) -> None:
        """Keeps the first error. What a thread raises because it was told to stop is no failure."""
        with self._lock:
            if self.error is None and not isinstance(error, WorkerFailed):
                self.error, self._worker = error, worker
        self.stopping.set()

    def check(self) -> None:
        """Raises WorkerFailed, caused by the first error, once the run is stopping."""
        if self.stopping.is_set():
            raise self.as_error()

    def settle(self) -> None:
        """All threads have ended: raises as ``check`` does, and forgets, so that work can go on."""
        try:
            self.check()
        finally:
            self.error = None
            self.stopping.clear()

    def as_error(self) -> WorkerFailed:
        """The first error as every other thread and the parent see it."""
        if self.error is None:
            return WorkerFailed(
                "the run was stopped", next_step="See the error of whoever stopped it", worker=""
            )
        first = (str(self.error).strip().splitlines() or [""])[0]
        failed = WorkerFailed(
            f"{self._worker} failed: {type(self.error).__name__}: {first}".rstrip(". "),
            next_step="Its own error is the cause of this one",
            worker=self._worker,
        )
        failed.__cause__ = self.error
        return failed
