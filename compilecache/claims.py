"""Who compiles which target: a chain of create-only objects in the store for each target.

``<fingerprint>/claims/<key>/<generation>.json``: every entry is written once, each generation by exactly
one process. A claim, a heart-beat, the end of a claim and the overtaking of a dead one are all the next
entry of the chain, so of two that want it one wins. Names are known in advance: nothing is ever listed.
Clocks of machines are never compared: who waits counts seconds of its own since it last saw news.
"""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Literal
from weakref import WeakKeyDictionary

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from compilecache.artifact import utc_now
from compilecache.errors import StoreUnavailable
from compilecache.store import ArtifactStore

BEAT_SECONDS = 10.0
LEASE_SECONDS = 45.0
"""Without news a claim is taken for dead: above four beats, and above one request that hangs."""
MOST_FAILURES = 2
"""After so many holders who made nothing of a target, each compiles it for itself."""
JOIN_SECONDS = 5.0

_EXCLUSIVE: WeakKeyDictionary[ArtifactStore, bool] = WeakKeyDictionary()
"""What the probe of each store said."""

Word = Annotated[str, Field(max_length=200, pattern=r"^[ -~]*$")]
State = Literal["held", "published", "failed", "free"]


class Claim(BaseModel):
    """One entry of a chain."""

    model_config = ConfigDict(frozen=True)

    holder: Word
    """Names one warm-up of one process, and no other."""
    host: Word = ""
    """Where it runs."""
    pid: int = 0
    """Its process, meaningful on ``host`` only."""
    place: Word = ""
    """Names the lock of the cache root that it holds; empty where that cannot be told."""
    since: Word = ""
    """When it claimed, UTC by its own clock, for people only."""
    beat: Annotated[int, Field(ge=0)] = 0
    """0 for the claim itself; each heart-beat counts up."""
    state: State = "held"
    """held: it compiles. published: the artifact is there. failed: none came of it. free: given back."""
    failures: Annotated[int, Field(ge=0)] = 0
    """How many holders have failed so far."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}" if self.host else "a process that has no name"

    def dump(self) -> bytes:
        """As it is stored."""
        return self.model_dump_json().encode() + b"\n"


UNREADABLE = Claim(holder="")
"""Stands for an entry that is there and cannot be read: the lease covers it like any other."""


@dataclass(frozen=True, slots=True)
class Sight:
    """What a process knows of one chain, in seconds of its own clock."""

    generation: int
    """The last entry that it saw."""
    claim: Claim
    """That entry."""
    news: float
    """When it first saw that entry."""
    since: float
    """When it first saw this holder."""


class Claims:
    """The chains of one fingerprint in one store, as one warm-up sees them.

    Every method that asks the store raises StoreUnavailable.
    """

    def __init__(
        self,
        store: ArtifactStore,
        fingerprint: str,
        *,
        place: str = "",
        lease: float = LEASE_SECONDS,
        every: float = BEAT_SECONDS,
        patience: float = 3600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._fingerprint = fingerprint
        self._lease = lease
        self._every = every
        self._patience = patience
        self._clock = clock
        self._seen: dict[str, Sight] = {}
        self.me = Claim(
            holder=uuid.uuid4().hex,
            host="".join(c if " " <= c <= "~" else "?" for c in socket.gethostname()[:200]),
            pid=os.getpid(),
            place=place,
        )

    def exclusive(self) -> bool:
        """Whether the store refuses to write what is there; asked once a process and store."""
        known = _EXCLUSIVE.get(self._store)
        if known is None:
            name, data = "claims/probe.json", self.me.holder.encode()
            known = not all(self._store.create(self._fingerprint, name, data) for _ in range(2))
            _EXCLUSIVE[self._store] = known
        return known

    def share(self, count: int) -> int:
        """A number below ``count`` that differs from process to process."""
        return int(hashlib.sha256(self.me.holder.encode()).hexdigest(), 16) % count

    # -- claiming -----------------------------------------------------------------------------

    def take(self, key: str, *, again: bool = False) -> Held | None:
        """A claim on the target; None while another has it, or when it has been published.

        ``again``: also then, because what was published is of no use.
        """
        mine = self.me.model_copy(update={"since": utc_now()})
        if key not in self._seen and self._append(key, 1, mine):
            return Held(self, key, 1, mine, self._every)
        sight = self.look(key)
        if sight is None or self.hopeless(key) or not self.over(sight):
            return None
        if sight.claim.state == "published" and not again:
            return None
        mine = mine.model_copy(update={"failures": sight.claim.failures})
        if not self._append(key, sight.generation + 1, mine):
            self.look(key)
            return None
        return Held(self, key, sight.generation + 1, mine, self._every, after=sight.claim.state)

    def look(self, key: str) -> Sight | None:
        """The end of a target's chain now; None when nobody has claimed it."""
        seen = self._seen.get(key)
        last = self._last(key, seen.generation if seen else 0)
        now = self._clock()
        if last == 0:
            return None
        if seen is not None and seen.generation == last:
            return seen
        claim = self.entry(key, last) or UNREADABLE
        same = seen is not None and seen.claim.holder == claim.holder
        self._seen[key] = Sight(last, claim, now, seen.since if seen and same else now)
        return self._seen[key]

    def seen(self, key: str) -> tuple[Claim, float] | None:
        """Who had the target when it was last looked at, and for how many seconds of our clock."""
        sight = self._seen.get(key)
        return None if sight is None else (sight.claim, self._clock() - sight.since)

    def published(self, key: str) -> bool:
        """Whether the target's last holder had published it when this was last looked at."""
        sight = self._seen.get(key)
        return sight is not None and sight.claim.state == "published"

    def over(self, sight: Sight) -> bool:
        """Whether the claim has ended: said so, without news for a lease, or held for too long.

        Its holder's root can be locked by one process only; if that is this one, it lives no more.
        """
        if sight.claim.state != "held" or (self.me.place and sight.claim.place == self.me.place):
            return True
        now = self._clock()
        return now - sight.news >= self._lease or now - sight.since >= self._patience

    def hopeless(self, key: str) -> bool:
        """Whether waiting for others is no use: nobody who had this target made anything of it."""
        sight = self._seen.get(key)
        if sight is None or sight.claim.state != "failed":
            return False
        return sight.claim.failures >= MOST_FAILURES

    # -- chains -------------------------------------------------------------------------------

    def _last(self, key: str, known: int) -> int:
        """The last generation of a chain without gaps, from ``known`` on, in few requests."""
        step = 1
        while self.entry(key, known + step) is not None:
            known, step = known + step, step * 2
        while step > 1:
            step //= 2
            if self.entry(key, known + step) is not None:
                known += step
        return known

    def entry(self, key: str, generation: int) -> Claim | None:
        """One entry; None when it is not there."""
        data = self._store.read_small(self._fingerprint, _name(key, generation))
        if data is None:
            return None
        try:
            return Claim.model_validate_json(data)
        except ValidationError:
            return UNREADABLE

    def _append(self, key: str, generation: int, claim: Claim) -> bool:
        """Whether this entry is the one that stands there; also if the answer to it was lost."""
        if self._store.create(self._fingerprint, _name(key, generation), claim.dump()):
            return True
        return self.entry(key, generation) == claim


class Held:
    """A claim that this process holds; once started, it beats in a thread of its own."""

    def __init__(
        self,
        claims: Claims,
        key: str,
        generation: int,
        claim: Claim,
        every: float,
        after: State | None = None,
    ) -> None:
        self.key = key
        self.after = after
        """How the claim before this one ended; "held" where it was overtaken."""
        self._claims = claims
        self._generation = generation
        self._claim = claim
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._beats, args=(every,), name=f"claim on {key}", daemon=True
        )
        self.overtaken = False
        """Whether another took it over; compiling on does no harm."""

    def start(self) -> Held:
        """Beats from now on."""
        self._thread.start()
        return self

    def beat(self) -> bool:
        """Says that the holder lives; False when it has been overtaken. Raises StoreUnavailable."""
        return self._say(beat=self._claim.beat + 1)

    def end(self, state: State) -> None:
        """Ends the claim. What the store does not take is left to the others' clocks."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(JOIN_SECONDS)
        if self._thread.is_alive() or self.overtaken:
            return
        with suppress(StoreUnavailable):
            self._say(state=state, failures=self._claim.failures + (state == "failed"))

    def _say(self, **changes: int | str) -> bool:
        claim = self._claim.model_copy(update=changes)
        if not self._claims._append(self.key, self._generation + 1, claim):
            self.overtaken = True
            return False
        self._generation, self._claim = self._generation + 1, claim
        return True

    def _beats(self, every: float) -> None:
        # A store that fails now fails again when the artifact is published, and that is reported.
        with suppress(StoreUnavailable):
            while not self._stop.wait(every) and self.beat():
                pass


def _name(key: str, generation: int) -> str:
    return f"claims/{key}/{generation}.json"
