"""Patience with a store: retries with jitter inside one total budget of lost seconds.

What counts is time lost to failures and to the waits between them, never the time of transfers that
work. Once it is used up every further call fails at once, so a sick store costs its budget once and
not once per entry (sccache#2820).
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Iterable
from time import monotonic
from typing import TypeVar

import stamina

from compilecache.errors import StoreUnavailable

ATTEMPTS = 6
_PERMANENT = {
    errno.EACCES: "permission denied",
    errno.EPERM: "operation not permitted",
    errno.EROFS: "it is read-only",
    errno.ENOSPC: "it is full",
    errno.EDQUOT: "the quota is used up",
    errno.EINVAL: "",
    errno.EISDIR: "",
    errno.ELOOP: "",
    errno.ENAMETOOLONG: "",
    errno.ENOSYS: "",
    errno.ENOTDIR: "",
}

_log = logging.getLogger(__name__)
# stamina logs retries without saying of what; ours says it.
logging.getLogger("stamina").addHandler(logging.NullHandler())

T = TypeVar("T")


class RefusedError(OSError):
    """An answer that trying again would not change; ``str(error)`` says why, ``next_step`` what to do."""

    def __init__(self, reason: str, next_step: str) -> None:
        super().__init__(reason)
        self.next_step = next_step


class Budget:
    """The seconds one store may cost in failures; shared by all threads that use the store."""

    def __init__(self, url: str, seconds: float) -> None:
        self.url = url
        self.seconds = seconds
        self._lost = 0.0
        self._lock = threading.Lock()

    @property
    def left(self) -> float:
        """Seconds that may still be lost."""
        return max(0.0, self.seconds - self._lost)

    def call(self, what: str, act: Callable[[], T]) -> T:
        """The result of ``act``, tried again while its failure may pass.

        FileNotFoundError and FileExistsError are answers and go through. Raises StoreUnavailable.
        """
        if self.left <= 0:
            raise self._spent(what)
        started = monotonic()
        try:
            try:
                return act()  # most calls need nothing of what follows
            except OSError as error:
                first = error
            return self._tried_again(what, act, started, first)
        except (FileNotFoundError, FileExistsError, StoreUnavailable):
            raise
        except OSError as error:
            raise self._unavailable(what, error) from error

    def _tried_again(self, what: str, act: Callable[[], T], started: float, first: OSError) -> T:
        """The result of ``act``, whose first try has failed; or the last error."""
        if not _may_pass(first):
            raise first
        started = self._lose_since(started)
        if self.left <= 0:
            raise first
        failed = [first]  # it counts as the first of the attempts
        try:
            for attempt in self._attempts(what):
                with attempt:
                    started = self._lose_since(started)
                    if failed:
                        raise failed.pop()
                    return act()
        except OSError as error:
            if _may_pass(error):
                self._lose_since(started)
            raise
        raise AssertionError("a retry loop ends with a result or an error")

    def _attempts(self, what: str) -> Iterable[stamina.Attempt]:
        def again(error: Exception) -> bool:
            retry = isinstance(error, OSError) and _may_pass(error) and self.left > 0
            if retry:
                _log.debug("store '%s', %s: %s; trying again", self.url, what, error)
            return retry

        return stamina.retry_context(
            on=again, attempts=ATTEMPTS, timeout=self.left, wait_max=5.0, wait_jitter=0.5
        )

    def _lose_since(self, started: float) -> float:
        now = monotonic()
        if now - started > 0.001:
            with self._lock:
                self._lost += now - started
        return now

    def _spent(self, what: str) -> StoreUnavailable:
        return StoreUnavailable(
            f"store '{self.url}' has cost its {self.seconds:g} s of failures; not tried: {what}",
            next_step="Check that the store is up, or go on without it",
        )

    def _unavailable(self, what: str, error: OSError) -> StoreUnavailable:
        reason = reason_of(error)
        step = "Check that the store is up and the address is right, or go on without it"
        if isinstance(error, RefusedError):
            step = error.next_step
        elif isinstance(error, PermissionError) or error.errno in (errno.EROFS, errno.EACCES):
            step = "Get the rights to it, or name another store"
        elif error.errno in (errno.ENOSPC, errno.EDQUOT):
            step = "Free space there, or name another store"
        return StoreUnavailable(f"store '{self.url}', {what}: {reason}", next_step=step)


def reason_of(error: OSError) -> str:
    """What went wrong, in words and in one line."""
    said = _PERMANENT.get(error.errno or 0, "")
    text = " ".join(str(error.strerror or error).split())
    if isinstance(error, PermissionError) and error.errno is None:
        said = "permission denied"
    if isinstance(error, TimeoutError) and not text:
        said = "no answer in time"
    return (
        f"{said} ({text})"
        if said and text and text.lower() != said
        else said or text or repr(error)
    )


def _may_pass(error: OSError) -> bool:
    if isinstance(error, (RefusedError, StoreUnavailable, FileNotFoundError, FileExistsError)):
        return False
    return not isinstance(error, PermissionError) and error.errno not in _PERMANENT
