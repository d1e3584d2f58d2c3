"""As many transfers at a time as help: more while they wait, no more than the processor keeps up with."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

TICK = 0.02
"""Seconds between two looks at how busy the transfers are."""
BUSY = 0.5
"""Transfers that compute less than this part of the time wait for others: more of them help."""

S = TypeVar("S")
T = TypeVar("T")


def in_streams(items: Sequence[S], act: Callable[[S], T], start: int, most: int) -> list[T]:
    """``act`` on every item, results in order: ``start`` at a time, up to ``most`` while they wait.

    Where many streams fill one processor they only take turns at it; from a store that is far away
    eight bring eight times as much. After an exception nothing more is begun, and it is raised.
    """
    streams = _Streams(items, act)
    if not hasattr(time, "pthread_getcpuclockid"):
        start = most  # nobody can tell how busy a thread is
    try:
        streams.add(min(start, len(items)))
        while not streams.ended.wait(TICK):
            if streams.busy() < BUSY:
                streams.add(min(streams.count, most - streams.count, streams.waiting))
    finally:
        streams.close()
    return streams.results()


class _Streams(Generic[S, T]):
    """Threads that take items from one line. They live until ``close``, so that they can be looked at."""

    def __init__(self, items: Sequence[S], act: Callable[[S], T]) -> None:
        self._items = items
        self._act = act
        self._next = 0
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._seen: dict[int, float] = {}
        self._looked = time.monotonic()
        self._found: dict[int, T] = {}
        self._failed: BaseException | None = None
        self._leave = threading.Event()
        self.ended = threading.Event()
        if not items:
            self.ended.set()

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._threads)

    @property
    def waiting(self) -> int:
        """Items that nobody has taken."""
        return len(self._items) - self._next

    def add(self, count: int) -> None:
        """Starts so many more."""
        for _ in range(count):
            thread = threading.Thread(target=self._run, daemon=True, name="compilecache-stream")
            self._threads.append(thread)
            thread.start()

    def busy(self) -> float:
        """The part of the time since the last look that they have computed, from 0 to 1."""
        now, computed = time.monotonic(), 0.0
        for number in [thread.ident for thread in self._threads]:
            if number is not None:
                clock = time.pthread_getcpuclockid(number)
                total = time.clock_gettime(clock)
                computed += total - self._seen.get(number, 0.0)
                self._seen[number] = total
        passed, self._looked = now - self._looked, now
        return computed / (passed * max(1, self.count))

    def close(self) -> None:
        """Begins nothing more, and waits for what was begun."""
        with self._lock:
            self._next = len(self._items)
        self._leave.set()
        for thread in self._threads:
            thread.join()

    def results(self) -> list[T]:
        """Of all items. Raises the first exception."""
        if self._failed is not None:
            raise self._failed
        return [self._found[place] for place in range(len(self._items))]

    def _run(self) -> None:
        while (place := self._take()) is not None:
            try:
                found = self._act(self._items[place])
            except BaseException as error:  # raised where the results are asked for
                self._end(error)
                break
            with self._lock:
                self._found[place] = found
                done = len(self._found) == len(self._items)
            if done:
                self.ended.set()
        self._leave.wait()

    def _take(self) -> int | None:
        with self._lock:
            if self._next >= len(self._items):
                return None
            self._next += 1
            return self._next - 1

    def _end(self, error: BaseException) -> None:
        with self._lock:
            self._failed = self._failed or error
            self._next = len(self._items)
        self.ended.set()
