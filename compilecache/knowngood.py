"""Bringing back what a tag names: those generations and no younger ones, every digest checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from compilecache.artifact import EXTRA, Record
from compilecache.cachedir import LOCK_TIMEOUT, CacheDir
from compilecache.changes import Change
from compilecache.exchange import Exchange, Restored
from compilecache.extras import ExtraRoot
from compilecache.pinning import tagged_records
from compilecache.progress import Teller
from compilecache.records import StoreView
from compilecache.store import ArtifactStore
from compilecache.tags import Tag


@dataclass(frozen=True, slots=True)
class Returned:
    """What a restore by tag brought."""

    tag: str
    """Its full name."""
    fingerprint: str
    targets: int
    """Records of the tag, without those of extra roots that were not asked for."""
    local: int
    """Complete in the root before, in the very generation."""
    restored: int
    """Complete now."""
    files: int
    bytes: int
    seconds: float
    missing: tuple[str, ...]
    """Keys of what is not in the root now."""
    faults: tuple[str, ...]
    """Why."""
    left_out: tuple[str, ...]
    """Extra roots that the tag has and nobody asked for."""
    changes: tuple[Change, ...] = ()
    """What is not as it was when the tag was made."""

    def as_json(self) -> dict[str, object]:
        """For programs."""
        return asdict(self)


def restore_tag(
    tag: Tag,
    cache: CacheDir,
    store: ArtifactStore,
    tell: Teller,
    *,
    extras: tuple[ExtraRoot, ...] = (),
    lock_timeout: float = LOCK_TIMEOUT,
) -> Returned:
    """Brings the files of a tag's records into the root, and of its extra roots into these.

    Nothing is brought when anything that the tag names is gone. Raises ChecksumMismatch, LockTimeout,
    StoreUnavailable.
    """
    records = tagged_records(tag, store)
    own = {key: record for key, record in records.items() if not key.startswith(EXTRA)}
    places = {extra.key: extra for extra in extras}
    asked = {key: record for key, record in records.items() if key in places}
    parts = [_bring(tag, cache, store, own, tell, lock_timeout)] if own else []
    for key, record in asked.items():
        places[key].cache.prepare()
        parts.append(_bring(tag, places[key].cache, store, {key: record}, tell, lock_timeout))
        places[key].settle(record)
    done = Restored()
    for part in parts:
        done.add(part.done)
    return Returned(
        tag=tag.full_name,
        fingerprint=tag.fingerprint,
        targets=len(own) + len(asked),
        local=sum(part.local for part in parts),
        restored=len(done.keys),
        files=done.files,
        bytes=done.bytes,
        seconds=done.seconds,
        missing=tuple(key for part in parts for key in part.missing),
        faults=tuple(map(str, done.faults)),
        left_out=tuple(
            key.removeprefix(EXTRA) for key in sorted(records.keys() - own.keys() - asked.keys())
        ),
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """What came into one root."""

    local: int
    done: Restored
    missing: tuple[str, ...]


def _bring(
    tag: Tag,
    cache: CacheDir,
    store: ArtifactStore,
    records: Mapping[str, Record],
    tell: Teller,
    lock_timeout: float,
) -> _Part:
    exchange = Exchange(cache, store, tag.mark, records, exactly=StoreView(records, faults=()))
    with cache.lock(
        f"restoring tag {tag.full_name}",
        timeout=lock_timeout,
        waiting=lambda holder: tell(f"waiting for {holder}"),
    ):
        for trouble in exchange.look(repair=True):
            tell(f"warning: {trouble}; moved aside")
        local = len(exchange.complete)
        done = exchange.restore()
    return _Part(local, done, tuple(sorted(exchange.missing)))
