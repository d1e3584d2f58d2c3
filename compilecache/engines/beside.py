"""Work beside other work, and work that the garbage collector would only slow down."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from compilecache.turns import short_turns


class Beside:
    """Runs a function in a thread while this one waits for disks and networks."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function
        self._turns = short_turns()
        self._turns.__enter__()
        self._thread = threading.Thread(target=self._run, name="compilecache imports", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Waits for its end. Any number of times."""
        self._thread.join()

    def _run(self) -> None:
        try:
            self._function()
        finally:
            self._turns.__exit__(None, None, None)


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
