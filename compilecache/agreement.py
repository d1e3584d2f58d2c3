"""Which records can lie in one root together."""

from __future__ import annotations

from collections.abc import Iterable

from compilecache.artifact import FileEntry, Record
from compilecache.contents import LIBRARY, SETTLED


def same(one: FileEntry, other: FileEntry) -> bool:
    """Whether two entries have the same content, whichever packs hold it."""
    return (one.size, one.xxh3_128) == (other.size, other.xxh3_128)


def agreeing(records: list[Record]) -> tuple[list[Record], list[Record]]:
    """Those that can lie in one root as they are, and the others.

    Several machines may each have built a library that their targets share.
    """
    together: list[Record] = []
    others: list[Record] = []
    entries: dict[str, FileEntry] = {}
    for record in records:
        fixed = {entry.path: entry for entry in _fixed(record)}
        if all(same(entry, entries.get(path, entry)) for path, entry in fixed.items()):
            together.append(record)
            entries.update(fixed)
        else:
            others.append(record)
    return together, others


def interchangeable(one: Record, other: Record) -> bool:
    """Whether a root that has the files of one has those of the other.

    Libraries of two roots do the same in other bytes; so does any result of tuning.
    """
    mine = {e.path: e for e in _fixed(one) if not LIBRARY.match(e.path)}
    theirs = {e.path: e for e in _fixed(other) if not LIBRARY.match(e.path)}
    paths = {entry.path for entry in one.files} == {entry.path for entry in other.files}
    return paths and all(same(entry, theirs[path]) for path, entry in mine.items())


def _fixed(record: Record) -> Iterable[FileEntry]:
    return (entry for entry in record.files if not SETTLED.match(entry.path))
