"""A stored object as a stream, its reads tried again at their place when they fail."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self, TypeVar

from compilecache.budget import Budget
from compilecache.storage import Storage

T = TypeVar("T")


class AbsentError(Exception):
    """The object is not in the storage, or not any more."""


class Reader:
    """Reads one object from the front. Raises AbsentError, also when it goes while it is read."""

    def __init__(self, storage: Storage, name: str, budget: Budget) -> None:
        self._what = f"reading '{name}'"
        self._budget = budget
        self._blob = self._call(lambda: storage.open(name))
        self._block_bytes = storage.block_bytes
        self._block = b""
        self._used = 0
        self._next = 0

    @property
    def size(self) -> int:
        """Bytes of the whole object."""
        return self._blob.size

    def read(self, size: int, /) -> bytes:
        """At most ``size`` bytes, none at the end. Raises AbsentError, StoreUnavailable."""
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
        block = self._call(lambda: read_at(start, count)) if count else b""
        self._block, self._used, self._next = block, 0, start + len(block)

    def _call(self, act: Callable[[], T]) -> T:
        try:
            return self._budget.call(self._what, act)
        except FileNotFoundError:
            raise AbsentError from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._blob.close()
