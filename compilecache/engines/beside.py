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


class Beside:
    """Runs a function in a thread while this one waits for disks and networks."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._turn: float | None = sys.getswitchinterval()
        sys.setswitchinterval(min(TURN, self._turn))
        self._thread = threading.Thread(target=function, name="compilecache imports", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Waits for its end. Any number of times."""
        self._thread.join()
        if self._turn is not None:
            sys.setswitchinterval(self._turn)
            self._turn = None


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
