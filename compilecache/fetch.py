"""Bringing files out of a store's packs into a directory, every digest checked."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from compilecache.artifact import FileEntry, file_and_directory
from compilecache.errors import ChecksumMismatch, CompileCacheError
from compilecache.pack import broken_packs, unpack
from compilecache.store import ArtifactStore

SPARE_BYTES = 4 << 30
"""A pack may hold so many bytes of files that are not wanted before it is refused."""


def fetch_packs(
    store: ArtifactStore,
    fingerprint: str,
    entries: Iterable[FileEntry],
    dest: Path,
    *,
    workers: int | None = None,
) -> None:
    """Brings these files, and no others, from their packs into ``dest``, every digest checked.

    Packs come in parallel. All are tried, then one error is raised: StoreUnavailable, UnsafePath, or
    ChecksumMismatch with every fault found (also when two entries cannot lie in one directory).
    Raises OSError when ``dest`` cannot be written. After an error ``dest`` is incomplete: discard it.
    """
    packs = _by_pack(entries)

    def fetch(sha256: str) -> CompileCacheError | None:
        try:
            with store.open_pack(fingerprint, sha256) as stream:
                unpack(stream, sha256, packs[sha256], dest, spare_bytes=SPARE_BYTES)
        except CompileCacheError as error:
            return error
        return None

    largest_first = sorted(
        packs, key=lambda p: sum(e.size for e in packs[p].values()), reverse=True
    )
    with ThreadPoolExecutor(workers or store.workers) as pool:
        errors = [error for error in pool.map(fetch, largest_first) if error is not None]
    for error in errors:
        if not isinstance(error, ChecksumMismatch):
            raise error
    if errors:
        raise broken_packs(f for e in errors if isinstance(e, ChecksumMismatch) for f in e.faults)


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
