"""How far a transfer has come, counted from several threads and told a few times a second."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

TELL_SECONDS = 0.1

Listener = Callable[[str, int, int], None]
"""Hears "restoring" or "publishing", how many bytes are done, and of how many."""


class Transfer:
    """Counts the bytes of one transfer; with nobody to tell it only counts."""

    def __init__(self, phase: str, total: int, listener: Listener | None) -> None:
        self._phase = phase
        self._total = total
        self._listener = listener
        self._lock = threading.Lock()
        self._told = time.monotonic()
        self.done = 0
        """Bytes so far."""

    def add(self, count: int) -> None:
        """So many bytes more."""
        with self._lock:
            self.done += count
            now = time.monotonic()
            late = now - self._told >= TELL_SECONDS
            if self._listener is None or not (late or self.done >= self._total):
                return
            self._told = now
            self._listener(self._phase, min(self.done, self._total), self._total)
