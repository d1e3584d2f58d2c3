"""Lets one thread compile while every other stands still.

A step is what a thread does between two boundaries. A thread that must compile becomes exclusive:
it waits until every other thread in a step wants to compile too, and then has the process to
itself until its own step ends. New steps wait while anyone compiles or wants to.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import get_ident

from compilecache.errors import LockTimeout


@dataclass(slots=True)
class Step:
    """A thread between two boundaries."""

    device: str | None
    """Where it works, for compilations that torch starts on threads of its own."""
    depth: int = 1
    """Steps may be nested; only the outermost has boundaries."""


@dataclass(slots=True)
class Gate:
    """Steps on one side, compilations on the other."""

    timeout: float = 600.0
    """Seconds to wait for the others; above what the slowest compilation takes."""
    stopping: Callable[[], None] = lambda: None
    """Raises when the waiting should end, because a sibling failed."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _changed: threading.Condition = field(init=False)
    _steps: dict[int, Step] = field(default_factory=dict)
    _wanting: dict[int, str] = field(default_factory=dict)
    _owner: int | None = None
    _owner_name: str = ""
    _until_boundary: bool = False

    def __post_init__(self) -> None:
        self._changed = threading.Condition(self._lock)

    @contextmanager
    def step(self, device: str | None = None) -> Iterator[None]:
        """One step of this thread. Raises LockTimeout when a compilation elsewhere does not end."""
        self.enter(device)
        try:
            yield
        finally:
            self.leave()

    def enter(self, device: str | None = None) -> None:
        """Begins a step."""
        me = get_ident()
        with self._lock:
            current = self._steps.get(me)
            if current is not None:
                current.depth += 1
                return
            if self._wanting or self._owner is not None:
                self._wait(lambda: self._may_step(me), "begin a step", self._compilers)
            self._steps[me] = Step(device)

    def leave(self) -> None:
        """Ends a step; whoever compiled in it lets the others go on."""
        me = get_ident()
        with self._lock:
            current = self._steps[me]
            current.depth -= 1
            if current.depth:
                return
            del self._steps[me]
            if self._owner == me and self._until_boundary:
                self._owner = None
                self._changed.notify_all()
            elif self._wanting:
                self._changed.notify_all()

    @contextmanager
    def exclusive(self, blocked: Sequence[int] = ()) -> Iterator[None]:
        """Nobody else is in a step, or compiles. In a step it stays so until that step ends.

        ``blocked``: threads that wait for this one, a thread of torch's own, in the middle of their
        steps; the first is the one whose step counts. Raises LockTimeout naming who did not come
        to a boundary.
        """
        me = blocked[0] if blocked else get_ident()
        with self._lock:
            held = self._owner is not None and self._owner in (me, *blocked)
            if not held:
                self._acquire(me, blocked)
        try:
            yield
        finally:
            with self._lock:
                if not held and not self._until_boundary:
                    self._owner = None
                    self._changed.notify_all()

    def stepping(self) -> bool:
        """Whether this thread is in a step. Takes no lock: only this thread changes the answer."""
        return get_ident() in self._steps

    def stepping_on(self, device: str) -> list[int]:
        """The threads that are in a step on a device, or on no known one; who compiles comes first."""
        with self._lock:
            found = [i for i, step in self._steps.items() if step.device in (device, None)]
            return sorted(found, key=lambda ident: ident != self._owner)

    def _acquire(self, me: int, blocked: Sequence[int]) -> None:
        waiting = {me, *blocked} - self._wanting.keys()
        self._wanting |= dict.fromkeys(waiting, threading.current_thread().name)
        self._changed.notify_all()
        try:
            self._wait(lambda: self._alone(me), "compile", lambda: self._others(me))
        finally:
            name = threading.current_thread().name
            for ident in waiting:
                del self._wanting[ident]
            self._changed.notify_all()
        self._owner, self._owner_name = me, name
        self._until_boundary = me in self._steps

    def _may_step(self, me: int) -> bool:
        return self._owner == me or (self._owner is None and not self._wanting)

    def _alone(self, me: int) -> bool:
        return self._owner is None and not self._others(me)

    def _others(self, me: int) -> list[str]:
        """Threads in a step that neither are this one nor wait to compile."""
        busy = [_name(i) for i in self._steps if i != me and i not in self._wanting]
        return busy if self._owner in (None, me) else [*busy, f"{self._owner_name} (compiling)"]

    def _compilers(self) -> list[str]:
        owner = [f"{self._owner_name} (compiling)"] if self._owner is not None else []
        return [*owner, *(f"{name} (waiting to compile)" for name in self._wanting.values())]

    def _wait(
        self, done: Callable[[], bool], purpose: str, blockers: Callable[[], list[str]]
    ) -> None:
        deadline = time.monotonic() + self.timeout
        while not done():
            self.stopping()
            left = deadline - time.monotonic()
            if left <= 0:
                raise _late(purpose, blockers(), self.timeout)
            self._changed.wait(min(left, 0.2))


def _name(ident: int) -> str:
    found = [thread.name for thread in threading.enumerate() if thread.ident == ident]
    return found[0] if found else f"thread {ident}, which has ended"


def _late(purpose: str, blockers: list[str], timeout: float) -> LockTimeout:
    named = ", ".join(blockers)
    return LockTimeout(
        f"thread {threading.current_thread().name} waited {timeout:.0f} s to {purpose}; "
        f"not at a step boundary: {named}",
        next_step="Keep what waits for other threads out of warm.step(), or raise gate_timeout",
        holder=named,
    )
