"""Mending a store or a root by adding to it; no object and no file is ever written anew."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from compilecache.artifact import FileEntry, Record
from compilecache.cachedir import CacheDir
from compilecache.errors import CompileCacheError, StoreUnavailable
from compilecache.fetch import fetch_packs
from compilecache.findings import Finding
from compilecache.fingerprint import Fingerprint
from compilecache.inspection import Inspection
from compilecache.pack import write_pack
from compilecache.packages import described
from compilecache.rootinspection import lacking
from compilecache.store import ArtifactStore


def repair_store(
    done: Inspection, store: ArtifactStore, cache: CacheDir | None, mark: Fingerprint | None
) -> None:
    """Supersedes damaged targets by complete ones of the root, and adds a missing fingerprint.json.

    What was added is noted in ``done.repaired``. Raises StoreUnavailable.
    """
    kinds = {"record", "pack"} | ({"signature"} if store.signs else set())
    targets = {(f.fingerprint, f.key) for f in done.damage if f.kind in kinds}
    for fingerprint in sorted({fingerprint for fingerprint, _ in targets}):
        keys = {key for digest, key in targets if digest == fingerprint}
        if cache is not None:
            done.repaired += _supersede(store, cache, fingerprint, keys)
    for finding in done.damage:
        fitting = mark is not None and mark.digest == finding.fingerprint
        if finding.kind == "fingerprint" and finding.what == "missing" and fitting and mark:
            store.put_fingerprint(mark.digest, described(mark))
            done.repaired.append(f"{mark.digest[:12]}: fingerprint.json added")


def _supersede(
    store: ArtifactStore, cache: CacheDir, fingerprint: str, keys: Iterable[str]
) -> list[str]:
    """Publishes the next generation of those targets that are complete in the root, digest by digest."""
    said = []
    held: dict[str, FileEntry] = {}
    local = cache.records(fingerprint)
    for key in sorted(keys):
        record = local.get(key)
        if record is None or cache.damaged(record.files):
            continue
        with cache.staging() as folder:
            fresh, pack = _renewed(store, cache, record, held, folder / "pack")
            stored = store.publish(fresh, pack)
        held.update({entry.path: entry for entry in stored.files})
        said.append(f"{fingerprint[:12]} {key}: generation {stored.generation} from the root")
    return said


def _renewed(
    store: ArtifactStore,
    cache: CacheDir,
    record: Record,
    held: dict[str, FileEntry],
    out: Path,
) -> tuple[Record, Path | None]:
    """The next generation, in packs that were made in this repair only."""
    generation = store.highest_generation(record.fingerprint, record.key) + 1
    here = {e.path: e for e in record.files}
    for path, (size, digest) in cache.measured(here).items():  # a result of tuning may differ
        here[path] = FileEntry(path, size, digest, here[path].pack)
    new = [path for path, entry in here.items() if not _holds(held.get(path), entry)]
    # Plain packs of the same files have the same name, and that one may be the damaged one.
    mark = f"{record.key} {generation}".encode()
    pack = write_pack(cache.root, new, out, mark=mark) if new else None
    files = tuple(
        held[path]
        if path not in new
        else FileEntry(path, entry.size, entry.xxh3_128, pack.sha256 if pack else "")
        for path, entry in sorted(here.items())
    )
    update = {"generation": generation, "files": files, "pack": pack}
    return record.model_copy(update=update), out if pack else None


def _holds(held: FileEntry | None, entry: FileEntry) -> bool:
    return held is not None and (held.size, held.xxh3_128) == (entry.size, entry.xxh3_128)


def repair_root(done: Inspection, cache: CacheDir, store: ArtifactStore) -> None:
    """Brings files that are missing altogether from the store; under the root's lock.

    Files with other bytes stay as they are: ``restore`` moves them aside. Raises StoreUnavailable.
    """
    for finding in done.damage:
        if finding.kind != "files" or not finding.key:
            continue
        record = cache.records(finding.fingerprint).get(finding.key)
        if record is not None and (entries := lacking(cache, record)):
            done.repaired += _brought(cache, store, finding, entries)


def _brought(
    cache: CacheDir, store: ArtifactStore, finding: Finding, entries: list[FileEntry]
) -> list[str]:
    try:
        with cache.staging() as staged:
            fetch_packs(store, finding.fingerprint, entries, staged)
            count = cache.activate(staged, entries)
    except StoreUnavailable:
        raise
    except CompileCacheError:
        return []
    return [f"{finding.fingerprint[:12]} {finding.key}: {count} files from the store"]
