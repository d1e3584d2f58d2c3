"""Work beside other work, and work that the garbage collector would only slow down."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

TURN = 2e-4
"""Seconds that a thread may keep the interpreter to itself meanwhile: 5 ms is Python's own, and what
opens, writes and closes many small files would wait that long after each."""

_lock = threading.Lock()
_running = 0
_usual = 0.0


class Beside:
    """Runs a function in a thread while this one waits for disks and networks."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function
        _begin()
        self._thread = threading.Thread(target=self._run, name="compilecache imports", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Waits for its end. Any number of times."""
        self._thread.join()

    def _run(self) -> None:
        try:
            self._function()
        finally:
            _end()


def _begin() -> None:
    """Short turns from now on; the usual ones come back when the last such thread has ended."""
    global _running, _usual
    with _lock:
        if not _running:
            _usual = sys.getswitchinterval()
            sys.setswitchinterval(min(TURN, _usual))
        _running += 1


def _end() -> None:
    global _running
    with _lock:
        _running -= 1
        if not _running:
            sys.setswitchinterval(_usual)


@contextmanager
def without_collecting() -> Iterator[None]:
    """No garbage is collected: loading makes many objects, and every one of them is kept."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
