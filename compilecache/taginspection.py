"""Whether the tags of a store can be read, and what they name is there; nothing is changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from compilecache.artifact import Record
from compilecache.errors import ChecksumMismatch
from compilecache.findings import Finding
from compilecache.holdings import named
from compilecache.pinning import tagged_records
from compilecache.store import ArtifactStore
from compilecache.tags import Tag
from compilecache.tagstore import Shelved


def inspect_tags(
    store: ArtifactStore, damaged: Mapping[str, Mapping[str, str]]
) -> tuple[int, list[Finding]]:
    """How many tags there are, and what is wrong with them.

    ``damaged``: by fingerprint, the packs whose contents are known to be bad. Raises
    StoreUnavailable.
    """
    live = store.tags.shelf(unsigned=True).live
    return len(live), [finding for entry in live for finding in _findings(store, entry, damaged)]


def _findings(
    store: ArtifactStore, entry: Shelved, damaged: Mapping[str, Mapping[str, str]]
) -> Iterator[Finding]:
    where = f"tags/{entry.name}/{entry.generation}.json"
    if entry.error is not None:
        yield Finding("foreign" if entry.later else "tag", where, entry.error.problem)
        return
    if entry.untrusted:
        yield Finding("signature", where, f"tag '{entry.full_name}': {entry.untrusted}")
        return
    if not isinstance(entry.content, Tag):
        return
    tag = entry.content
    try:
        records = tagged_records(tag, store)
    except ChecksumMismatch as error:
        for fault in error.faults:
            yield Finding("tag", where, fault, tag.fingerprint)
        return
    yield from _bad_packs(tag, where, records, damaged.get(tag.fingerprint, {}))


def _bad_packs(
    tag: Tag, where: str, records: Mapping[str, Record], bad: Mapping[str, str]
) -> Iterator[Finding]:
    for key, record in records.items():
        for sha256 in sorted(named(record) & bad.keys()):
            what = f"{key}, generation {record.generation}: pack {sha256[:12]} is damaged"
            yield Finding("tag", where, what, tag.fingerprint, key)
