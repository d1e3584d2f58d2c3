"""Events on their way to whoever listens: the newest in memory, as bytes, made once for all listeners."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence

from starlette.concurrency import run_in_threadpool

from warmup.service.jobs import ENDED, Event

KEPT = 2048
"""Events in memory; older ones are read from the database."""
GATHER_SECONDS = 0.03
"""Events that come within that time go out together."""
HEARTBEAT_SECONDS = 15.0
BATCH = 500
RESET = b"event: reset\ndata: {}\n\n"
"""Some events are forgotten: read the jobs anew."""

Older = Callable[[int, str | None, int], list[Event] | None]
"""Events after one, of one job or of all, at most so many; None when some are forgotten."""


class Feed:
    """Where the queue's events go, and listeners wait for them."""

    def __init__(self) -> None:
        self._events: deque[tuple[int, str, bytes]] = deque(maxlen=KEPT)
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news = asyncio.Event()
        self._woken = False
        self.closed = False
        self.listeners = 0
        self.last = 0
        """The newest event's id."""

    def open(self, loop: asyncio.AbstractEventLoop, last: int) -> None:
        """Called in the loop in which listeners wait; ``last``: the newest event of earlier runs."""
        self._loop, self.last = loop, max(last, self.last)

    def tell(self, events: Sequence[Event]) -> None:
        """From any thread; in the order of their ids."""
        if not events:
            return
        with self._lock:
            self._events.extend((event.id, event.job, event.as_sse()) for event in events)
            self.last = events[-1].id
            wake, self._woken = not self._woken, True
        if wake and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.call_later, GATHER_SECONDS, self._wake)

    def close(self) -> None:
        """Every listener is let go."""
        self.closed = True
        self._wake()

    def _wake(self) -> None:
        with self._lock:
            self._woken = False
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _since(self, after: int, job_id: str | None) -> tuple[int, list[bytes]] | None:
        """The id of the newest, and those after one; None when memory does not go back so far."""
        with self._lock:
            if after >= self.last:
                return after, []
            oldest = self._events[0][0] if self._events else self.last + 1
            if after + 1 < oldest:
                return None
            found: list[bytes] = []
            for number, job, data in reversed(self._events):
                if number <= after:
                    break
                if job_id is None or job == job_id:
                    found.append(data)
            return self.last, found[::-1]

    async def listen(
        self, after: int, older: Older, *, job_id: str | None = None, until_end: bool = False
    ) -> AsyncIterator[bytes]:
        """Everything after one event, as it comes, and a heartbeat when nothing does.

        ``until_end``: until the job has ended.
        """
        self.listeners += 1
        try:
            yield b": open\nretry: 2000\n\n"
            if after > self.last:  # of another queue: the state was removed meanwhile
                after = self.last
                yield RESET
            while not self.closed:
                news = self._news
                after, parts = await self._batch(after, older, job_id)
                if parts:
                    yield b"".join(parts)
                if until_end and len(parts) < BATCH and _has_ended(parts):
                    return
                if not parts and after >= self.last:
                    try:
                        await asyncio.wait_for(news.wait(), HEARTBEAT_SECONDS)
                    except TimeoutError:
                        yield b": heartbeat\n\n"
        finally:
            self.listeners -= 1

    async def _batch(self, after: int, older: Older, job_id: str | None) -> tuple[int, list[bytes]]:
        found = self._since(after, job_id)
        if found is not None:
            return found
        last = self.last
        read = await run_in_threadpool(older, after, job_id, BATCH)
        if read is None:
            return last, [RESET]
        if len(read) < BATCH:
            return max(last, read[-1].id if read else 0), [event.as_sse() for event in read]
        return read[-1].id, [event.as_sse() for event in read]


_ENDS = tuple(f'"state":"{state}"'.encode() for state in ENDED)


def _has_ended(parts: Sequence[bytes]) -> bool:
    """Whether the newest of these that is about a job says that it has ended."""
    newest = next((part for part in reversed(parts) if b"\nevent: job\n" in part[:60]), b"")
    return any(mark in newest for mark in _ENDS)
