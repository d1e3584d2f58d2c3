"""What a store asks of its storage: every call within one budget, several at a time where that helps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from compilecache.budget import Budget
from compilecache.storage import Storage

OBJECT_BYTES = 64 << 20
"""No record or fingerprint is larger; what is larger is not read."""

S = TypeVar("S")
T = TypeVar("T")


class Calls:
    """One storage. Raises StoreUnavailable when it does not answer, refuses, or costs too much."""

    def __init__(self, storage: Storage, budget: Budget) -> None:
        self.storage = storage
        self.budget = budget

    def call(self, what: str, act: Callable[[], T]) -> T:
        """The result of ``act``, tried again as long as the budget lasts."""
        return self.budget.call(what, act)

    def read(self, name: str, limit: int = OBJECT_BYTES) -> bytes | None:
        """At most ``limit`` bytes of an object; None when it is absent."""
        try:
            return self.call(f"reading '{name}'", lambda: self.storage.read(name, limit))
        except FileNotFoundError:
            return None

    def size(self, what: str, name: str) -> int | None:
        """Bytes of an object; None when it is absent."""
        return self.call(what, lambda: self.storage.size(name))

    def create(self, what: str, name: str, data: bytes) -> None:
        """Writes a small object unless it is there. What counts is what can be read back."""
        self.call(what, lambda: self.storage.create(name, data))

    def walk(self, folder: str) -> list[str]:
        """Names, relative to the folder, of everything below it."""
        return list(self.call("listing records", lambda: self.storage.walk(folder)))

    def glance(self, folder: str, most: int) -> list[str] | None:
        """The same from one request, where that tells all and they are no more than ``most``."""
        return self.call("listing records", lambda: self.storage.glance(folder, most))

    def each(self, items: Sequence[S], act: Callable[[S], T]) -> list[T]:
        """``act`` on every item, in order."""
        if self.storage.workers == 1 or len(items) < 2:
            return [act(item) for item in items]
        with ThreadPoolExecutor(self.storage.workers) as pool:
            return list(pool.map(act, items))
