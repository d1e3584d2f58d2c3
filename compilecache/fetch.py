"""Bringing files out of a store's packs into a directory, every digest checked."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from compilecache.artifact import FileEntry, check_files, file_and_directory
from compilecache.errors import ChecksumMismatch, CompileCacheError
from compilecache.pack import broken_packs, unpack
from compilecache.store import ArtifactStore
from compilecache.streams import in_streams
from compilecache.transfer import Transfer
from compilecache.turns import short_turns

SPARE_BYTES = 4 << 30
"""A pack may hold so many bytes of files that are not wanted before it is refused."""


def fetch_packs(
    store: ArtifactStore,
    fingerprint: str,
    entries: Iterable[FileEntry],
    dest: Path,
    *,
    vouched: bool = True,
) -> None:
    """Brings these files, and no others, from their packs into ``dest``, every digest checked.

    ``vouched``: whether somebody stands for the packs themselves, by a signature or a tag: then their
    sha256 are checked beside the digests of the files.

    What an earlier attempt has left in ``dest`` is kept where it is right: a pack all of whose files
    are there is not fetched again. Packs come in parallel. All are tried, then one error is raised:
    StoreUnavailable, UnsafePath, or ChecksumMismatch with every fault found (also when two entries
    cannot lie in one directory). Raises OSError when ``dest`` cannot be written. After an error ``dest`` is incomplete.
    """
    packs = _by_pack(entries)
    moving = Transfer("restoring", _bytes(packs), store.listener)
    for sha256 in [sha256 for sha256, wanted in packs.items() if _kept(dest, wanted)]:
        moving.add(_bytes({sha256: packs.pop(sha256)}))

    def fetch(sha256: str) -> CompileCacheError | None:
        try:
            with store.open_pack(fingerprint, sha256) as stream:
                wanted = packs[sha256]
                whole = sha256 if vouched else None
                unpack(stream, whole, wanted, dest, spare_bytes=SPARE_BYTES, written=moving.add)
        except ChecksumMismatch as error:
            first, *others = error.faults
            named = first if first.startswith("pack ") else f"pack {sha256[:12]}: {first}"
            return broken_packs([named, *others])
        except CompileCacheError as error:
            return error
        return None

    largest_first = sorted(packs, key=lambda pack: _bytes({pack: packs[pack]}), reverse=True)
    with short_turns():
        found = in_streams(largest_first, fetch, *store.streams)
    errors = [error for error in found if error is not None]
    for error in errors:
        if not isinstance(error, ChecksumMismatch):
            raise error
    if errors:
        raise broken_packs(f for e in errors if isinstance(e, ChecksumMismatch) for f in e.faults)


def _bytes(packs: Mapping[str, Mapping[str, FileEntry]]) -> int:
    return sum(entry.size for wanted in packs.values() for entry in wanted.values())


def _kept(dest: Path, wanted: Mapping[str, FileEntry]) -> bool:
    """Whether all files of a pack are there, digests checked; what there is of others is removed."""
    there = [path for path in wanted if os.path.lexists(f"{dest}/{path}")]
    if len(there) == len(wanted) and not check_files(dest, wanted.values()):
        return True
    for path in there:
        (dest / path).unlink()
    return False


def _by_pack(entries: Iterable[FileEntry]) -> dict[str, dict[str, FileEntry]]:
    chosen: dict[str, FileEntry] = {}
    faults = []
    for entry in entries:
        known = chosen.setdefault(entry.path, entry)
        if (known.size, known.xxh3_128) != (entry.size, entry.xxh3_128):
            faults.append(
                f"{entry.path}: differs between pack {known.pack[:12]} and {entry.pack[:12]}"
            )
    if clash := file_and_directory(chosen):
        faults.append(f"{clash}: both a file and a directory")
    if faults:
        raise broken_packs(faults)
    packs: dict[str, dict[str, FileEntry]] = {}
    for entry in chosen.values():
        packs.setdefault(entry.pack, {})[entry.path] = entry
    return packs
