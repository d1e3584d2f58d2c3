"""How a collector and publishers keep out of each other's way, with nothing but objects.

A collector puts a mark below ``sweeps/`` of a fingerprint, *then* looks at the records, then deletes.
A publisher writes its record, *then* looks for marks, waits until they are gone, and sees whether its
packs are still there. So one of the two always knows of the other.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Protocol, TypeVar

from compilecache.budget import RefusedError
from compilecache.errors import StoreUnavailable
from compilecache.storage import Storage

FOLDER = "sweeps"
RENEWED = "renewed"
SWEEP_SECONDS = 60.0
"""A collector deletes nothing later than this after it began to put its mark: it puts a new one."""
WAIT_SECONDS = 150.0
"""So long a publisher waits for a mark: the seconds of a sweep, and those of its last call."""
FORGOTTEN_SECONDS = 3600.0
"""A mark that is older belongs to a collector that died; only its own clock could say otherwise."""
POLL_SECONDS = 0.2

T = TypeVar("T")


class Call(Protocol):
    """Tries something on a storage, with a store's patience."""

    def __call__(self, what: str, act: Callable[[], T], /) -> T:
        """The result. Raises StoreUnavailable."""


def wait_for_sweeps(storage: Storage, call: Call, folder: str) -> None:
    """Returns when no sweep of this fingerprint can go on that began before this call."""
    pending = marks(storage, call, folder)
    deadline = time.monotonic() + WAIT_SECONDS
    while pending and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        pending &= marks(storage, call, folder)


def marks(storage: Storage, call: Call, folder: str) -> set[str]:
    """Names of the marks of collectors that may be at work."""
    found = call("listing sweeps", lambda: storage.survey(f"{folder}/{FOLDER}"))
    oldest = time.time() - FORGOTTEN_SECONDS
    return {name for name, stored in found.items() if stored.modified > oldest}


def renew(storage: Storage, call: Call, folder: str) -> None:
    """Makes a fingerprint young again: something that it has was about to be published.

    Who may not write has made nothing that could be lost.
    """
    hour = datetime.now(UTC).strftime("%Y-%m-%dT%H")
    with suppress(StoreUnavailable):
        call("renewing", lambda: storage.create(f"{folder}/{RENEWED}/{hour}", b"\n"))


class SweepExpired(Exception):
    """The mark has served its time; put another one and look again."""


class Sweep:
    """One mark of one collector, and the deletions made under it; a context manager."""

    def __init__(self, storage: Storage, call: Call, folder: str) -> None:
        self._storage, self._call, self._folder = storage, call, folder
        self._name = f"{folder}/{FOLDER}/{secrets.token_hex(8)}"
        self._until = 0.0
        self.now = time.time()
        """The time by the storage's clock."""

    def __enter__(self) -> Sweep:
        self._until = time.monotonic() + SWEEP_SECONDS
        self._call("marking a sweep", lambda: self._storage.create(self._name, b"\n"))
        folder, _, own = self._name.rpartition("/")
        found = self._call("reading the mark", lambda: self._storage.survey(folder))
        stored = found.get(own)
        if stored is None:
            raise StoreUnavailable(
                f"store '{self._storage.url}' does not list an object that was just written",
                next_step="Collect from a store that lists what it holds; nothing was deleted",
            )
        self.now = stored.modified
        for name, other in found.items():
            if other.modified < self.now - 24 * FORGOTTEN_SECONDS:
                self.delete(f"{FOLDER}/{name}")
        return self

    def delete(self, name: str) -> None:
        """Removes an object of the fingerprint. Raises SweepExpired, StoreUnavailable."""
        self._refuse_late()

        def act() -> None:
            if time.monotonic() > self._until:  # also when it is tried again
                raise RefusedError("the sweep took too long", "Run the same command again")
            self._storage.delete(f"{self._folder}/{name}")

        self._call(f"deleting '{name}'", act)

    def _refuse_late(self) -> None:
        if time.monotonic() > self._until:
            raise SweepExpired

    def __exit__(self, *_: object) -> None:
        with suppress(StoreUnavailable):
            self._call("ending a sweep", lambda: self._storage.delete(self._name))
