"""What a store keeps: by age, size and count, and never less than somebody may be about to need.

Superseded generations and packs that nothing names go first, then whole fingerprints, those first whose
youngest record is oldest. How it is done while others publish: ``sweeps.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from compilecache.holdings import Holding, Surveyor, old_probes, order, place_of
from compilecache.keeping import STORE_BYTES, STORE_FINGERPRINTS, Keep
from compilecache.records import VERSION
from compilecache.storage import Stored
from compilecache.store import ArtifactStore
from compilecache.sweeps import FOLDER as SWEEPS
from compilecache.sweeps import Sweep, SweepExpired
from compilecache.tagstore import FOLDER as TAGS
from compilecache.tagstore import released_objects

Why = Literal["superseded", "age", "count", "bytes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention(Keep):
    """How much a store keeps. A fingerprint is as old as its youngest record."""

    keep_bytes: int = STORE_BYTES
    """All fingerprints together, the most recently published ones first."""
    keep_fingerprints: int = STORE_FINGERPRINTS
    """How many, the most recently published ones first."""


@dataclass(frozen=True, slots=True)
class Collected:
    """What goes, or went, of one fingerprint."""

    fingerprint: str
    why: Why
    whole: bool
    """Whether nothing of it stays."""
    records: int
    packs: int
    bytes: int
    """What that frees."""


@dataclass(slots=True)
class Collection:
    """What goes, or went, of a store."""

    url: str
    fingerprints: int
    """How many the store has."""
    bytes: int
    """What all of them weigh."""
    collected: list[Collected] = field(default_factory=list)
    half_uploads: int = 0
    """Uploads that never ended."""
    probes: int = 0
    """Objects of ``doctor`` that it could not delete."""
    tags: int = 0
    """Tags that were released."""
    kept_by: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Fingerprints that stay at least in part → the tags that need them."""
    held: dict[str, str] = field(default_factory=dict)
    """Fingerprints that nothing was taken of, and why not."""

    @property
    def freed(self) -> int:
        """Bytes."""
        return sum(part.bytes for part in self.collected)


def untouchable(holding: Holding, now: float, rule: Retention) -> str | None:
    """Why nothing of a fingerprint may go at all; None when something may."""
    if holding.leased(now, rule.grace):
        return "somebody claims a target of it"
    if holding.foreign:
        return "another version of compilecache has written records of it"
    if holding.unjudged is not None:
        return (
            f"tag '{holding.unjudged}' cannot be read, and may need it "
            f"('compilecache tag {holding.unjudged} --release' lets go of it)"
        )
    return None


def may_go_whole(holding: Holding, now: float, rule: Retention) -> bool:
    """Whether a fingerprint is old enough, unclaimed, in no tag, and nobody asked to keep it."""
    asked = rule.asked_for(holding.fingerprint)
    old = holding.touched() <= now - rule.grace
    return old and not asked and not holding.kept and untouchable(holding, now, rule) is None


def choose(holdings: Iterable[Holding], now: float, rule: Retention) -> dict[str, Why]:
    """Which fingerprints go as a whole, and why."""
    chosen: dict[str, Why] = {}
    kept_bytes = kept = 0
    for holding in sorted(holdings, key=lambda h: (-h.youngest_record, h.fingerprint)):
        left = holding.bytes - _weight(holding, spare(holding, now, rule))
        why: Why | None = None
        if holding.youngest_record <= now - rule.longest:
            why = "age"
        elif kept >= rule.keep_fingerprints:
            why = "count"
        elif kept_bytes + left > rule.keep_bytes:
            why = "bytes"
        if why is not None and may_go_whole(holding, now, rule):
            chosen[holding.fingerprint] = why
        else:
            kept, kept_bytes = kept + 1, kept_bytes + left
    return chosen


def spare(holding: Holding, now: float, rule: Retention) -> list[str]:
    """What can go of a fingerprint that stays: superseded generations, packs that nothing names."""
    if untouchable(holding, now, rule):
        return []
    old = holding.superseded(now, rule.grace)
    return [*old, *holding.free_packs(now, rule.grace, without=old)]


def _weight(holding: Holding, names: Iterable[str]) -> int:
    return sum(holding.objects[name].size for name in names)


class Collector:
    """Applies a rule to a store; ``plan`` only looks."""

    def __init__(self, store: ArtifactStore, rule: Retention) -> None:
        self._store, self._rule = store, rule
        self._surveyor = Surveyor(store)
        self._touched: dict[str, float] = {}

    def plan(self, now: float) -> Collection:
        """What would go. Raises StoreUnavailable."""
        holdings = [self._surveyor.look(digest) for digest in self._store.fingerprints()]
        whole = choose(holdings, now, self._rule)
        done = Collection(self._store.url, len(holdings), sum(h.bytes for h in holdings))
        self._touched = {holding.fingerprint: holding.touched() for holding in holdings}
        for holding in holdings:
            why = whole.get(holding.fingerprint, "superseded")
            names = (
                list(holding.objects)
                if holding.fingerprint in whole
                else spare(holding, now, self._rule)
            )
            if holding.kept:
                named = sorted({name for names in holding.kept.values() for name in names})
                done.kept_by[holding.fingerprint] = tuple(named)
            reason = untouchable(holding, now, self._rule)
            if reason is not None:
                done.held[holding.fingerprint] = reason
            if names:
                sizes = {name: holding.objects[name] for name in names}
                done.collected.append(
                    _collected(holding.fingerprint, why, sizes, holding.fingerprint in whole)
                )
        done.half_uploads = len(self._half_uploads(now))
        done.tags = len(self._released_tags(now))
        done.probes = len(old_probes(self._store, now - self._rule.grace))
        return done

    def collect(self, now: float, tell: Callable[[str], None] = lambda text: None) -> Collection:
        """Lets it go. What was published meanwhile, and what that needs, stays.

        Raises StoreUnavailable; what is gone by then is gone in whole parts.
        """
        planned = self.plan(now)
        done = Collection(planned.url, planned.fingerprints, planned.bytes, held=planned.held)
        done.kept_by = planned.kept_by
        for part in planned.collected:
            tell(f"collecting {part.fingerprint[:12]}")
            gone = self._sweep(part)
            if gone.records or gone.packs or gone.bytes:
                done.collected.append(gone)
        for name in self._half_uploads(now):
            self._drop(name)
            done.half_uploads += 1
        for name in self._released_tags(now):
            self._delete(name)
            done.tags += 1
        for name in old_probes(self._store, now - self._rule.grace):
            self._delete(name)
            done.probes += 1
        return done

    def _released_tags(self, now: float) -> list[str]:
        """Objects of tags that were released long ago; the releases stay, so that names count on."""
        objects = self._store.call("listing", lambda: self._store.storage.survey(TAGS))
        latest = now - self._rule.grace
        shelf = self._store.tags.shelf(unsigned=True)
        gone = released_objects(shelf, objects, lambda name: objects[name].modified <= latest)
        return [f"{TAGS}/{name}" for name in gone]

    def _delete(self, name: str) -> None:
        self._store.call(f"deleting '{name}'", lambda: self._store.storage.delete(name))

    def _drop(self, name: str) -> None:
        self._store.call("dropping", lambda: self._store.storage.drop_half_upload(name))

    def _sweep(self, part: Collected) -> Collected:
        gone: dict[str, Stored] = {}
        while True:
            folder = f"{VERSION}/{part.fingerprint}"
            with suppress(SweepExpired), Sweep(self._store.storage, self._store.call, folder) as s:
                turn = _Turn(self._surveyor, s, part, self._rule, gone)
                left = turn.run(self._touched[part.fingerprint])
                return _collected(part.fingerprint, part.why, gone, not left)

    def _half_uploads(self, now: float) -> list[str]:
        try:
            found = self._store.storage.half_uploads(VERSION)
        except OSError:  # not every store lists them
            return []
        return [n for n, stored in found.items() if stored.modified <= now - self._rule.grace]


class _Turn:
    """What happens to one fingerprint under one mark: everything is looked at anew."""

    def __init__(
        self,
        surveyor: Surveyor,
        sweep: Sweep,
        part: Collected,
        rule: Retention,
        gone: dict[str, Stored],
    ) -> None:
        self._surveyor, self._sweep, self._rule, self._gone = surveyor, sweep, rule, gone
        self._part = part

    def run(self, touched: float) -> bool:
        """Records, then packs that none of those left names, then the rest. Whether anything stays.

        ``touched``: when the youngest object was written that the plan knew.
        """
        now, holding = self._sweep.now, self._look()
        old = spare(holding, now, self._rule)
        if self._part.whole and self._unchanged(holding, touched):
            old = list(holding.objects)
        records = [name for name in old if name.startswith("artifacts/")]
        self._delete(holding, records)
        holding = self._look()
        if untouchable(holding, now, self._rule) is not None:
            return True
        self._delete(holding, holding.free_packs(now, self._rule.grace))
        if holding.records or holding.unreadable or not self._part.whole:
            return True
        if not self._unchanged(holding, touched):
            return True
        live = {name for name in holding.objects if name.startswith(f"{SWEEPS}/")}
        self._delete(holding, set(holding.objects) - live - self._gone.keys())
        return False

    def _unchanged(self, holding: Holding, touched: float) -> bool:
        """Whether nobody has published or claimed since, and the fingerprint may go."""
        return holding.touched() <= touched and may_go_whole(holding, self._sweep.now, self._rule)

    def _look(self) -> Holding:
        return self._surveyor.look(self._part.fingerprint)

    def _delete(self, holding: Holding, names: Iterable[str]) -> None:
        for name in sorted(names, key=order):
            self._sweep.delete(name)
            self._gone[name] = holding.objects[name]


def _collected(fingerprint: str, why: Why, gone: dict[str, Stored], whole: bool) -> Collected:
    return Collected(
        fingerprint=fingerprint,
        why=why,
        whole=whole,
        records=sum(place_of(name) is not None for name in gone),
        packs=sum(name.startswith("packs/") for name in gone),
        bytes=sum(stored.size for stored in gone.values()),
    )
