"""The records that a tag names, byte for byte, and whether a store still has all they need."""

from __future__ import annotations

from collections.abc import Collection

from compilecache.artifact import Record
from compilecache.errors import ChecksumMismatch, CompileCacheError, StoreUnavailable
from compilecache.store import ArtifactStore
from compilecache.tags import Tag, TaggedRecord


def tagged_records(tag: Tag, store: ArtifactStore) -> dict[str, Record]:
    """The records that a tag names, by key; the packs that they need are there.

    Raises ChecksumMismatch naming everything that is gone or has other bytes.
    """

    def read(one: TaggedRecord) -> Record | str:
        try:
            record = store.pinned(tag.fingerprint, one.key, one.generation, one.sha256)
        except StoreUnavailable:
            raise
        except CompileCacheError as error:
            return f"{one.key}, generation {one.generation}: {error.problem}"
        return record or f"{one.key}, generation {one.generation}, is missing"

    looked = store.each(tag.records, read)
    records = [one for one in looked if isinstance(one, Record)]
    faults = [one for one in looked if isinstance(one, str)]
    faults += lost(store, tag.fingerprint, records)
    if faults:
        more = f"; and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise ChecksumMismatch(
            f"tag '{tag.full_name}' cannot be brought back whole: {'; '.join(faults[:5])}{more}",
            next_step="Name an older one (NAME@GENERATION), publish from a root that has it whole "
            "('compilecache fsck PLAN --repair'), or restore by the plan",
            faults=tuple(faults),
        )
    return {record.key: record for record in records}


def lost(store: ArtifactStore, fingerprint: str, records: Collection[Record]) -> list[str]:
    """What of these records and their packs is not in the store (any more), in words."""
    packs = {entry.pack for record in records for entry in record.files}
    gone = store.missing_packs(fingerprint, packs)
    there = store.each(list(records), store.has_record)
    faults = [
        f"{record.key}, generation {record.generation}, is missing"
        for record, is_there in zip(records, there, strict=True)
        if not is_there
    ]
    return faults + [f"pack {sha256[:12]} is missing" for sha256 in sorted(gone)]
