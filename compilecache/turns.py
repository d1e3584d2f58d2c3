"""Short turns of the interpreter, while threads wait for each other more than they compute."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

TURN = 1e-3
"""Seconds that a thread may keep the interpreter to itself meanwhile: 5 ms is Python's own, and what
opens, writes and closes many small files would wait that long after each."""

_lock = threading.Lock()
_running = 0
_usual = 0.0


@contextmanager
def short_turns() -> Iterator[None]:
    """For all threads; the usual ones come back with the end of the last such block."""
    global _running, _usual
    with _lock:
        if not _running:
            _usual = sys.getswitchinterval()
            sys.setswitchinterval(min(TURN, _usual))
        _running += 1
    try:
        yield
    finally:
        with _lock:
            _running -= 1
            if not _running:
                sys.setswitchinterval(_usual)
