"""A stored object as a stream, its reads tried again at their place when they fail."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from compilecache.budget import Budget
from compilecache.storage import Storage


class Reader:
    """Reads one object from the front. Raises FileNotFoundError when it is absent."""

    def __init__(self, storage: Storage, name: str, budget: Budget) -> None:
        self._what = f"reading '{name}'"
        self._budget = budget
        self._blob = budget.call(self._what, lambda: storage.open(name))
        self._block_bytes = storage.block_bytes
        self._block = b""
        self._used = 0
        self._next = 0

    @property
    def size(self) -> int:
        """Bytes of the whole object."""
        return self._blob.size

    def read(self, size: int, /) -> bytes:
        """At most ``size`` bytes, none at the end. Raises StoreUnavailable."""
        if self._used == len(self._block):
            self._fetch()
        if not self._used and size >= len(self._block):
            self._used = len(self._block)
            return self._block
        piece = self._block[self._used : self._used + size]
        self._used += len(piece)
        return piece

    def _fetch(self) -> None:
        start, count = self._next, min(self._block_bytes, self._blob.size - self._next)
        read_at = self._blob.read_at
        block = self._budget.call(self._what, lambda: read_at(start, count)) if count else b""
        self._block, self._used, self._next = block, 0, start + len(block)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._blob.close()
