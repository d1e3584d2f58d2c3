"""Whether a store answers, takes what is sent, creates only what is absent, and tells the same time."""

from __future__ import annotations

import errno
import math
import time
import uuid
from collections.abc import Callable, Iterator
from typing import TypeVar

from compilecache.budget import Budget
from compilecache.doctor.finding import Finding
from compilecache.errors import StoreUnavailable
from compilecache.storage import Storage

FOLDER = "probes"
"""Of the store, beside what is published; nothing reads it."""
FIRST, SECOND = b"first", b"second"
SLOW_SECONDS = 2.0
"""For one listing."""
SKEW_SECONDS = 30.0
"""Between the store's clock and ours; object stores tell whole seconds."""
BUDGET_SECONDS = 15.0
"""What a sick store may cost."""

T = TypeVar("T")


def check_store(storage: Storage, budget_seconds: float = BUDGET_SECONDS) -> Iterator[Finding]:
    """Writes one small object twice below ``probes/``, reads it back and deletes it."""
    visit = _Visit(storage, budget_seconds)
    try:
        yield visit.reach()
    except StoreUnavailable as error:
        why = "Nothing can be restored or published: every start compiles."
        yield Finding(error.problem, why, error.next_step, "error")
        return
    try:
        yield from visit.write()
    except StoreUnavailable as error:
        yield _not_written(error)
    finally:
        found = visit.tidy()
    yield from found


class _Visit:
    """One probe object in one store."""

    def __init__(self, storage: Storage, budget_seconds: float) -> None:
        self._storage = storage
        self._budget = Budget(storage.url, budget_seconds)
        self._name = f"{FOLDER}/{uuid.uuid4().hex}"
        self._sent = False

    def reach(self) -> Finding:
        """One listing, with its time. Raises StoreUnavailable."""
        began = time.monotonic()
        self._call("listing", lambda: self._storage.folders("v1"))
        seconds = time.monotonic() - began
        if seconds > SLOW_SECONDS:
            return Finding(
                f"store '{self._storage.url}' took {seconds:.1f} s to answer",
                "Every lookup costs as much: many targets make a slow start.",
                f"time compilecache ls --store {self._storage.url}",
                "warning",
            )
        return Finding(f"store '{self._storage.url}' answers in {seconds:.2f} s")

    def write(self) -> Iterator[Finding]:
        """Creates the probe, and once more. Raises StoreUnavailable."""
        before = time.time()
        self._call("a probe", lambda: self._storage.create(self._name, FIRST))
        after = time.time()
        self._sent = True
        first = self._call("reading the probe", lambda: self._storage.read(self._name, 100))
        if first != FIRST:
            yield Finding(
                f"store '{self._storage.url}' gives back other bytes than were sent",
                "Nothing that is restored from it passes its digest.",
                "Look for a proxy or a full disk behind the address, or name another one with --store",
                "error",
            )
            return
        yield from self._clock(before, after)
        self._call("the probe again", lambda: self._storage.create(self._name, SECOND))
        second = self._call("reading the probe", lambda: self._storage.read(self._name, 100))
        yield _create_only(self._storage.url, second == FIRST)

    def _clock(self, before: float, after: float) -> Iterator[Finding]:
        folder, _, own = self._name.rpartition("/")
        found = self._call("the probe's time", lambda: self._storage.survey(folder)).get(own)
        if found is None or not math.isfinite(found.modified):  # it does not say
            return
        written = found.modified
        skew = max(before - 1 - written, written - after - 1, 0.0)
        if skew > SKEW_SECONDS:
            side = "behind" if written > after else "ahead of"
            yield Finding(
                f"the clock here is {skew:.0f} s {side} the store's",
                "Ages of what is published are misjudged; S3 refuses requests from 15 minutes on.",
                "sudo chronyc makestep",
                "warning",
            )
        else:
            yield Finding("the store's clock and this one agree")

    def tidy(self) -> list[Finding]:
        """Deletes the probe. It may stay: who warms needs no right to delete."""
        if not self._sent:
            return []
        try:
            self._call("deleting the probe", lambda: self._storage.delete(self._name))
        except StoreUnavailable as error:
            why = "It is a few bytes that nothing reads; 'compilecache gc' takes it once it is old."
            return [Finding(f"the probe '{self._name}' stays: {error.problem}", why, level="note")]
        return []

    def _call(self, what: str, act: Callable[[], T]) -> T:
        try:
            return self._budget.call(what, act)
        except FileNotFoundError as error:
            raise StoreUnavailable(
                f"store '{self._storage.url}', {what}: it is not there after it was written",
                next_step="Check that the address is a store and not some other server",
            ) from error


def _not_written(error: StoreUnavailable) -> Finding:
    cause = error.__cause__
    refused = isinstance(cause, PermissionError) or (
        isinstance(cause, OSError) and cause.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
    )
    why = "Nothing can be published."
    if refused:
        why += " Right for a trainer, which only restores; not for the job that warms."
    return Finding(error.problem, why, error.next_step, "note" if refused else "warning")


def _create_only(url: str, holds: bool) -> Finding:
    if holds:
        return Finding("the store creates a name only once")
    return Finding(
        f"store '{url}' overwrites what is there although asked to create only",
        "What is published is read back and compared, so it stays right; but two jobs that publish "
        "at once may both compile. Versioning in the bucket keeps what was overwritten.",
        "Turn on conditional writes (If-None-Match) in the store, or use one that has them",
        "note",
    )
