"""Whether a cache root holds what its records promise; nothing is changed."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from compilecache.artifact import FileEntry, Record
from compilecache.cachedir import CacheDir
from compilecache.contents import TRANSIENT
from compilecache.errors import ChecksumMismatch, UnsafePath
from compilecache.findings import Finding
from compilecache.inspection import Inspection
from compilecache.keeping import DAY
from compilecache.remains import unfinished
from compilecache.rootfolder import OWN


def inspect_root(cache: CacheDir, *, deep: bool = False, grace: float = DAY) -> Inspection:
    """Looks at every record of a root and its files. ``deep``: reads them and checks every digest."""
    done = Inspection(str(cache.root), deep=deep)
    folder = cache.root / OWN / "records"
    paths = sorted(folder.glob("*/*.json"))
    present = cache.files()
    done.files, done.records = len(present), len(paths)
    done.fingerprints = len({path.parent.name for path in paths})
    for path in paths:
        done.findings += _record(cache, path, deep)
    done.findings += _half_written(cache, present, grace)
    return done


def lacking(cache: CacheDir, record: Record) -> list[FileEntry]:
    """Files of a record that are not there at all."""
    return [entry for entry in record.files if not os.path.lexists(cache.root / entry.path)]


def _record(cache: CacheDir, path: Path, deep: bool) -> Iterator[Finding]:
    where = f"{OWN}/records/{path.parent.name}/{path.name}"
    fingerprint, key = path.parent.name, path.stem
    try:
        record = Record.parse(path.read_bytes())
    except (ChecksumMismatch, UnsafePath) as error:
        yield Finding("record", where, error.problem, fingerprint, key)
        return
    except OSError as error:
        what = f"cannot be read: {error.strerror}"
        yield Finding("record", where, what, fingerprint, key)
        return
    faults = cache.damaged(record.files) if deep else tuple(_sizes(cache, record.files))
    if faults:
        more = f"; and {len(faults) - 1} more" if len(faults) > 1 else ""
        yield Finding("files", faults[0].partition(":")[0], f"{faults[0]}{more}", fingerprint, key)


def _sizes(cache: CacheDir, entries: Iterable[FileEntry]) -> Iterator[str]:
    for entry in entries:
        try:
            size = os.lstat(cache.root / entry.path).st_size
        except OSError:
            yield f"{entry.path}: missing"
            continue
        if size != entry.size and not cache.may_change(entry.path):
            yield f"{entry.path}: {size} bytes instead of {entry.size}"


def _half_written(cache: CacheDir, present: Collection[str], grace: float) -> Iterator[Finding]:
    """Libraries that cannot be whole end a process with SIGBUS; temporary files harm nobody."""
    for name in unfinished(cache):
        yield Finding("files", name, "it was never finished by whoever wrote it")
    for name in sorted(present):
        if TRANSIENT.search(name) and not name.endswith(".lock"):
            with contextlib.suppress(OSError):
                if os.lstat(cache.root / name).st_mtime <= time.time() - grace:
                    yield Finding("half upload", name, "a temporary file that was left")
