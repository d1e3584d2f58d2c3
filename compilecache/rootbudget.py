"""How large a cache root may grow: by bytes and by files, and never what is in use.

What goes first is what no complete record lists; then the records of fingerprints that were looked at
longest ago, with the files that only they list.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from compilecache.artifact import Record
from compilecache.cachedir import ENTRIES_LAST, CacheDir
from compilecache.contents import TRANSIENT
from compilecache.engines.programfile import FOLDER as PROGRAMS
from compilecache.errors import ChecksumMismatch, UnsafePath
from compilecache.keeping import ROOT_BYTES, ROOT_FILES, Keep
from compilecache.kernels import FOLDER as KERNELS
from compilecache.kernels import kernel_folder
from compilecache.rootfolder import OWN

GOING = ".going"
"""A record on its way out has this suffix, for a moment."""
Kind = Literal["damaged", "unfinished", "programs", "unlisted", "records"]
KINDS: tuple[Kind, ...] = ("damaged", "unfinished", "programs", "unlisted", "records")
"""In the order in which they go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RootBudget(Keep):
    """How much a cache root keeps. Files that were moved aside go by their age, too."""

    keep_bytes: int = ROOT_BYTES
    """Of all files together; what is over goes."""
    keep_files: int = ROOT_FILES
    """How many."""


@dataclass(frozen=True, slots=True)
class Trimmed:
    """What goes, or went, of one kind."""

    kind: Kind
    """``damaged``: moved aside; ``unfinished``: left by processes that died; ``programs``: no record
    names them; ``unlisted``: no complete record lists them; ``records``: targets with their files."""
    what: str
    """The fingerprint, where there is one."""
    files: int
    bytes: int


@dataclass(slots=True)
class Trim:
    """What goes, or went, of a root."""

    root: str
    files: int
    """How many there are before."""
    bytes: int
    """What they weigh."""
    trimmed: list[Trimmed] = field(default_factory=list)
    unpublished: int = 0
    """Records that no store has: they stay, and may be why the root stays too large."""
    over_files: int = 0
    """Files above the budget that stay all the same: all that is left is in use or unpublished."""
    over_bytes: int = 0

    @property
    def freed(self) -> int:
        """Bytes."""
        return sum(part.bytes for part in self.trimmed)


@dataclass(frozen=True, slots=True)
class _File:
    size: int
    used: float
    """When it was last read or written, as far as the file system tells."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """A record of the root, or one that cannot be read."""

    path: Path
    record: Record | None
    used: float
    unpublished: bool
    complete: bool

    @property
    def fingerprint(self) -> str:
        return self.path.parent.name


class RootTrimmer:
    """Applies a budget to a cache root; ``plan`` only looks."""

    def __init__(self, cache: CacheDir, budget: RootBudget) -> None:
        self._cache, self._budget = cache, budget
        self._own = cache.root / OWN

    def plan(self) -> Trim:
        """What would go."""
        return _Look(self._cache, self._budget, for_real=False).run()

    def trim(self, *, timeout: float, waiting: Callable[[str], None] = lambda who: None) -> Trim:
        """Lets it go, under the root's lock. Raises LockTimeout, UnsafePath."""
        with self._cache.lock("gc", timeout=timeout, waiting=waiting):
            for left in self._leftovers():
                shutil.rmtree(left, ignore_errors=True)
            done = _Look(self._cache, self._budget, for_real=True).run()
        _prune(self._cache.root)
        return done

    def _leftovers(self) -> Iterator[Path]:
        """Restores that died: under the lock nobody else restores."""
        with contextlib.suppress(OSError):
            yield from (self._own / "staging").iterdir()


class _Look:
    """The root at one moment, and the decision about it."""

    def __init__(self, cache: CacheDir, budget: RootBudget, *, for_real: bool) -> None:
        self._root, self._own, self._budget = cache.root, cache.root / OWN, budget
        self._for_real = for_real
        self._now = time.time()
        self._files = dict(_measured(self._root, cache.files()))
        self._damaged = dict(_measured(self._root, self._below("damaged")))
        self._records = [self._kept(path) for path in sorted(self._own.glob("records/*/*.json"))]
        self._done = Trim(
            root=str(self._root),
            files=len(self._files) + len(self._damaged),
            bytes=sum(file.size for file in (*self._files.values(), *self._damaged.values())),
            unpublished=sum(kept.unpublished for kept in self._records),
        )
        self._left_files, self._left_bytes = self._done.files, self._done.bytes

    def run(self) -> Trim:
        """Decides, and removes what goes."""
        self._take("damaged", "", self._old(self._damaged, self._budget.longest))
        self._take("unfinished", "", self._unfinished())
        self._take("programs", "", self._old(self._unnamed_programs(), self._budget.grace))
        self._drop_incomplete()
        self._take("unlisted", "", self._unlisted())
        self._drop_fingerprints()
        self._done.over_files = max(0, self._left_files - self._budget.keep_files)
        self._done.over_bytes = max(0, self._left_bytes - self._budget.keep_bytes)
        return self._done

    # -- what lies there --------------------------------------------------------------------

    def _below(self, folder: str) -> list[str]:
        found = (self._own / folder).glob("*")
        return [f"{OWN}/{folder}/{path.name}" for path in found if path.is_file()]

    def _kept(self, path: Path) -> _Kept:
        record = None
        with contextlib.suppress(OSError, ChecksumMismatch, UnsafePath):
            record = Record.parse(path.read_bytes())
        entries = record.files if record else ()
        sizes = (self._files.get(entry.path) for entry in entries)
        whole = record is not None and all(
            file is not None and file.size == entry.size
            for file, entry in zip(sizes, entries, strict=True)
        )
        used = path.stat().st_mtime
        return _Kept(path, record, used, path.with_suffix(".unpublished").exists(), whole)

    def _over(self) -> bool:
        return (
            self._left_files > self._budget.keep_files or self._left_bytes > self._budget.keep_bytes
        )

    def _old(self, files: dict[str, _File], age: float) -> list[str]:
        return [name for name, file in files.items() if file.used <= self._now - age]

    # -- what may go ------------------------------------------------------------------------

    def _unfinished(self) -> list[str]:
        """Files that somebody began to write and never finished; locks are held by name and stay."""
        halves = {n: f for n, f in self._files.items() if TRANSIENT.search(n) and not _is_lock(n)}
        return self._old(halves, self._budget.grace)

    def _unnamed_programs(self) -> dict[str, _File]:
        listed = self._listed(self._records)
        return {
            name: file
            for name, file in self._files.items()
            if name.startswith(f"{PROGRAMS}/") and name not in listed
        }

    def _listed(self, records: Iterable[_Kept]) -> set[str]:
        """Files that these records list, and what lies beside their kernels: Triton needs its lists."""
        named = {e.path for kept in records if kept.record for e in kept.record.files}
        kernels = {kernel_folder(name) for name in named if name.startswith(f"{KERNELS}/")}
        return named | {
            name
            for name in self._files
            if name.startswith(f"{KERNELS}/") and kernel_folder(name) in kernels
        }

    def _unlisted(self) -> list[str]:
        """Unused for longest first, until the root fits."""
        listed = self._listed(kept for kept in self._records if kept.complete or self._stays(kept))
        free = {n: f for n, f in self._files.items() if n not in listed and not _is_lock(n)}
        old = sorted(self._old(free, self._budget.grace), key=lambda n: (self._files[n].used, n))
        return self._until_it_fits(old)

    def _until_it_fits(self, names: list[str]) -> list[str]:
        count, weight, chosen = self._left_files, self._left_bytes, []
        for name in names:
            if count <= self._budget.keep_files and weight <= self._budget.keep_bytes:
                break
            chosen.append(name)
            count, weight = count - 1, weight - self._files[name].size
        return chosen

    def _stays(self, kept: _Kept) -> bool:
        """In use, or nowhere else, or asked for."""
        young = kept.used > self._now - self._budget.grace
        asked = self._budget.asked_for(kept.fingerprint)
        return young or kept.unpublished or asked

    def _drop_incomplete(self) -> None:
        """Records that promise what is not there; their files become unlisted."""
        gone = [kept for kept in self._records if not (kept.complete or self._stays(kept))]
        for kept in gone:
            if self._forget([kept]):
                self._records.remove(kept)

    def _drop_fingerprints(self) -> None:
        used: dict[str, float] = {}
        for kept in self._records:
            used[kept.fingerprint] = max(kept.used, used.get(kept.fingerprint, 0.0))
        for fingerprint in sorted(used, key=lambda name: used[name]):
            group = [kept for kept in self._records if kept.fingerprint == fingerprint]
            old = used[fingerprint] <= self._now - self._budget.longest
            if (self._over() or old) and not any(map(self._stays, group)):
                self._drop(fingerprint, group)

    def _drop(self, fingerprint: str, group: list[_Kept]) -> None:
        others = [kept for kept in self._records if kept not in group]
        only = self._listed(group) - self._listed(others)
        if not self._forget(group):
            return
        self._take("records", fingerprint, [n for n in self._files if n in only])
        self._records = others

    def _forget(self, group: list[_Kept]) -> bool:
        """Removes records; False, and all stay, when a process has come to use one of them.

        Whoever uses a record touches it, or finds it gone: ``CacheDir.touch_record``.
        """
        if not self._for_real:
            return True
        aside = {kept.path.with_suffix(GOING): kept for kept in group}
        for path, kept in aside.items():
            kept.path.rename(path)
        if all(path.stat().st_mtime == kept.used for path, kept in aside.items()):
            for path in aside:
                path.unlink()
            return True
        for path, kept in aside.items():
            path.rename(kept.path)
        return False

    def _take(self, kind: Kind, what: str, names: list[str]) -> None:
        if not names:
            return
        known = self._damaged if kind == "damaged" else self._files
        files = {name: known.pop(name) for name in names}
        # Entries first: an entry that points to nothing makes torch compile where it says "hit".
        order = sorted(files, key=lambda name: (not name.startswith(ENTRIES_LAST), name))
        for name in order if self._for_real else ():
            (self._root / name).unlink(missing_ok=True)
        weight = sum(file.size for file in files.values())
        self._left_files -= len(files)
        self._left_bytes -= weight
        self._done.trimmed.append(Trimmed(kind, what, len(files), weight))


def _is_lock(name: str) -> bool:
    return name.startswith("locks/") or name.endswith(".lock")


def _measured(root: Path, names: Iterable[str]) -> Iterator[tuple[str, _File]]:
    for name in sorted(names):
        with contextlib.suppress(OSError):
            status = os.lstat(root / name)
            yield name, _File(status.st_size, max(status.st_mtime, status.st_atime))


def _prune(root: Path) -> None:
    """Removes folders that became empty; whoever needs one makes it again."""
    for folder, _, _ in os.walk(root, topdown=False):
        if folder != str(root) and OWN not in Path(folder).relative_to(root).parts[:1]:
            with contextlib.suppress(OSError):
                Path(folder).rmdir()
