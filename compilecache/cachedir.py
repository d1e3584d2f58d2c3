"""One local cache root: where it is, who writes it, what lies in it.

Layout: the root itself is ``TORCHINDUCTOR_CACHE_DIR``; what is ours lies in ``.compilecache/``
below it (lock, holder, staging, records, quarantine).
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout

from compilecache.artifact import FileEntry, Record, check_files, hash_files
from compilecache.contents import SETTLED, is_tuning
from compilecache.documents import read_json
from compilecache.errors import ChecksumMismatch, LockTimeout, StoreUnavailable, UnsafePath
from compilecache.files import replacing
from compilecache.kernels import FOLDER, regroup
from compilecache.rootfolder import OWN, RootFolder

ARRIVALS = "arrivals"
"""Below staging; the name of no other folder there."""
NOBODY_KNOWN = "a process that has not said who it is"
ENTRIES_LAST = ("fxgraph/", "aotautograd/")
"""An index entry is put in place after the binaries it points to."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds the lock of a cache root."""

    pid: int
    """Process id, meaningful on ``host`` only."""
    host: str
    """Where the process runs."""
    since: float
    """When it took the lock, seconds since the epoch."""
    doing: str
    """What it said it is working on."""

    def __str__(self) -> str:
        return (
            f"process {self.pid} on {self.host}, for {time.time() - self.since:.0f} s: {self.doing}"
        )


LOCK_TIMEOUT = 3600.0
"""Seconds: above what the slowest target takes."""


class CacheDir(RootFolder):
    """A cache root. Making one touches nothing; ``prepare`` creates and checks it."""

    def __init__(self, root: str | Path | None = None) -> None:
        super().__init__(Path(root or default_root()))

    def use(self) -> None:
        """Makes torch in this process, and its children, keep its cache here.

        Triton's part too, in one folder for all devices, unless the user has put it elsewhere: left
        alone it lands wherever the first kernel of the process happens to send it.
        """
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(self.root)
        current = os.environ.get("TRITON_CACHE_DIR")
        if current is None or any((folder / OWN).is_dir() for folder in Path(current).parents[:2]):
            os.environ["TRITON_CACHE_DIR"] = str(self.root / FOLDER)

    # -- who writes it ----------------------------------------------------------------------

    @contextmanager
    def lock(
        self,
        doing: str,
        *,
        timeout: float = 3600.0,
        waiting: Callable[[str], None] = lambda holder: None,
        every: float = 10.0,
    ) -> Iterator[None]:
        """Holds the one writer's lock. While it waits, ``waiting`` hears of the holder.

        A holder that dies gives the lock back at once (the kernel does). Raises LockTimeout.
        """
        with self.explaining():
            lock = _file_lock(self._own / "lock")
        deadline = time.monotonic() + timeout
        while True:
            try:
                remaining = max(0.0, deadline - time.monotonic())
                with self.explaining():
                    lock.acquire(timeout=min(every, remaining), poll_interval=0.1)
                break
            except Timeout:
                holder = self.holder()
                if time.monotonic() >= deadline:
                    raise LockTimeout(
                        f"cache root '{self.root}' stayed locked for {timeout:.0f} s by {holder}",
                        next_step="Wait for it, end that process, or raise --lock-timeout",
                        holder=str(holder),
                    ) from None
                waiting(str(holder))
        try:
            self.say(doing)
            yield
        finally:
            (self._own / "holder.json").unlink(missing_ok=True)
            lock.release()

    def say(self, doing: str) -> None:
        """What the holder of the lock is working on, for those who wait.

        A note, no more: where it cannot be written, as on a full disk, the work goes on without.
        """
        holder = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": time.time(),
            "doing": doing,
        }
        with suppress(OSError), replacing(self._own / "holder.json") as file:
            file.write(json.dumps(holder).encode())

    def holder(self) -> Holder | str:
        """Who holds the lock; a plain word when it did not say."""
        try:
            said = read_json((self._own / "holder.json").read_bytes())
            if isinstance(said, dict):
                pid, since = int(said["pid"]), float(said["since"])
                return Holder(pid, str(said["host"]), since, str(said["doing"]))
        except (OSError, ValueError, TypeError, LookupError, OverflowError):
            pass  # half-written, or of another version
        return NOBODY_KNOWN

    def lock_name(self) -> str:
        """Names the lock of this root, unlike every other on any machine; "" where nothing can tell.

        Whoever holds the lock knows by it that earlier holders write no more.
        """
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
            status = (self._own / "lock").stat()
        except (OSError, ValueError):
            return ""
        text = f"{boot} {status.st_dev} {status.st_ino}"
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    # -- what lies in it --------------------------------------------------------------------

    def files(self) -> set[str]:
        """Every cache file below the root, as a posix path relative to it."""
        found: set[str] = set()
        folders = [""]
        while folders:  # twice for every target that is primed: os.walk takes three times as long
            prefix = folders.pop()
            with suppress(OSError), os.scandir(f"{self.root}/{prefix}") as entries:
                for entry in entries:
                    if not entry.is_dir():
                        found.add(prefix + entry.name)
                    elif not entry.is_symlink() and (prefix or entry.name != OWN):
                        folders.append(f"{prefix}{entry.name}/")
        return found

    def records(self, fingerprint: str) -> dict[str, Record]:
        """The records of targets that were activated or made here; unreadable ones are left out."""
        found = {}
        for path in sorted((self._own / "records" / fingerprint).glob("*.json")):
            with suppress(OSError, ChecksumMismatch, UnsafePath):
                record = Record.parse(path.read_bytes())
                found[record.key] = record
        return found

    def last_used(self) -> str | None:
        """The fingerprint of which a process last found a record complete here; None without any."""
        latest: dict[str, float] = {}
        for path in (self._own / "records").glob("*/*.json"):
            with suppress(OSError):
                used = path.stat().st_mtime
                latest[path.parent.name] = max(used, latest.get(path.parent.name, 0.0))
        return max(latest, key=lambda digest: latest[digest], default=None)

    def keep_record(self, record: Record, *, published: bool) -> None:
        """Notes that every file of the record is in place; written last."""
        folder = self._own / "records" / record.fingerprint
        marker = folder / f"{record.key}.unpublished"
        with self.explaining():
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not published:
                marker.touch(mode=0o600)
            # What a store has too can be had again, like the files: a restore does not wait for the disk.
            with replacing(folder / f"{record.key}.json", durable=not published) as file:
                file.write(record.dump())
            if published:
                marker.unlink(missing_ok=True)

    def touch_record(self, record: Record) -> bool:
        """Notes that the record is in use; False when it was let go meanwhile."""
        path = self._own / "records" / record.fingerprint / f"{record.key}.json"
        try:
            os.utime(path)
        except FileNotFoundError:
            return False
        except OSError:  # a root that is read-only: nobody lets anything go there
            return True
        return True

    def unpublished(self, fingerprint: str) -> set[str]:
        """Keys of records that no store has taken yet."""
        folder = self._own / "records" / fingerprint
        return {path.stem for path in folder.glob("*.unpublished")}

    def damaged(self, entries: Iterable[FileEntry]) -> tuple[str, ...]:
        """Faults of files that should be here: missing, or other bytes than recorded."""
        fixed = [entry for entry in entries if not self.may_change(entry.path)]
        return check_files(self.root, fixed)

    def measured(self, paths: Iterable[str]) -> dict[str, tuple[int, str]]:
        """Size and digest of those of these files that may differ from their record."""
        return hash_files(self.root, [path for path in paths if self.may_change(path)])

    def may_change(self, path: str) -> bool:
        """Whether a file that is here may have other content than recorded."""
        return bool(SETTLED.match(path)) and is_tuning(self.root / path)

    def quarantine(self, entries: Iterable[FileEntry]) -> tuple[str, ...]:
        """Moves damaged files aside, so that whole ones can take their place. Nothing is deleted."""
        return tuple(
            entry.path
            for entry in entries
            if (self.root / entry.path).exists()
            and check_files(self.root, [entry])
            and self.move_aside(entry.path)
        )

    def move_aside(self, path: str) -> bool:
        """Moves one file where nobody looks for it; False when it was gone already."""
        place = self._own / "damaged" / f"{time.time_ns()}-{path.rpartition('/')[2]}"
        with self.explaining():
            place.parent.mkdir(exist_ok=True, mode=0o700)
            try:
                (self.root / path).rename(place)
            except FileNotFoundError:
                return False
        return True

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """An empty folder on the root's own file system, gone afterwards; old ones are swept."""
        parent = self._swept(keep=())
        with self.explaining():
            folder = Path(tempfile.mkdtemp(dir=parent))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @contextmanager
    def arrivals(self) -> Iterator[Path]:
        """A folder like that for what a store gives. It stays when the store fails or the process
        ends: the next restore finds in it what has come. Whatever else uses ``staging`` sweeps it."""
        folder = self._swept(keep=(ARRIVALS,)) / ARRIVALS
        with self.explaining():
            folder.mkdir(exist_ok=True, mode=0o700)
        try:
            yield folder
        except StoreUnavailable:
            raise
        except Exception:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(folder, ignore_errors=True)

    def _swept(self, keep: Collection[str]) -> Path:
        parent = self._own / "staging"
        with self.explaining():
            parent.mkdir(exist_ok=True, mode=0o700)
            for left in parent.iterdir():
                if left.name not in keep:
                    shutil.rmtree(left, ignore_errors=True)
        return parent

    def activate(self, staged: Path, entries: Collection[FileEntry]) -> int:
        """Puts checked files from staging in place; index entries last. Returns how many were new.

        What is there already is never overwritten: equal content is kept, other content under the
        same name raises ChecksumMismatch naming both, before anything is put in place.
        """
        self.refuse_conflicts(entries)
        folders: dict[str, list[str]] = {}
        for entry in entries:
            folders.setdefault(entry.path.partition("/")[0], []).append(entry.path)
        count = 0
        with self.explaining():
            for name in sorted(folders, key=lambda name: (f"{name}/" in ENTRIES_LAST, name)):
                count += _put_folder(staged, self.root, name, sorted(folders[name]))
            regroup(self.root, [entry.path for entry in entries])
        return count

    def refuse_conflicts(self, entries: Collection[FileEntry]) -> None:
        """Raises ChecksumMismatch naming every file that is there with other content."""
        present = [entry for entry in entries if os.path.lexists(f"{self.root}/{entry.path}")]
        faults = tuple(
            f"'{self.root / entry.path}' differs from '{entry.path}' of the store"
            for entry in present
            if not self.may_change(entry.path) and check_files(self.root, [entry])
        )
        if faults:
            raise ChecksumMismatch(
                f"{len(faults)} files in use differ from the ones to restore: {faults[0]}",
                next_step="Move the local ones away, or restore into an empty folder with --root",
                faults=faults,
            )


def _file_lock(path: Path) -> BaseFileLock:
    """A lock that the kernel frees when its holder dies; never filelock's soft one, which stays.

    filelock#67, #603: it falls back to the soft lock in silence where it is not told otherwise.
    """
    if "fallback_to_soft" in inspect.signature(FileLock.__init__).parameters:
        return FileLock(path, thread_local=False, fallback_to_soft=False)
    return FileLock(path, thread_local=False)


def _put_folder(staged: Path, root: Path, name: str, paths: Sequence[str]) -> int:
    """Moves all files of one folder of the root, in one piece where it is new and holds nothing else."""
    source, place = f"{staged}/{name}", f"{root}/{name}"
    if not os.path.lexists(place) and _files_below(source) == len(paths):
        with suppress(OSError):  # somebody has made that folder just now
            os.rename(source, place)  # noqa: PTH104
            return len(paths)
    return sum(_put(f"{staged}/{path}", f"{root}/{path}") for path in paths)


def _files_below(folder: str) -> int:
    return sum(len(names) for _, _, names in os.walk(folder))


def _put(source: str, place: str) -> int:
    """Moves a file where there is none; returns how many. Names are text: there are thousands."""
    try:
        try:
            os.link(source, place)
        except FileNotFoundError:
            Path(place).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.link(source, place)
    except FileExistsError:
        return 0
    except OSError:
        if Path(place).exists():
            return 0
        Path(source).rename(place)
        return 1
    os.unlink(source)  # noqa: PTH108
    return 1


def default_root() -> str:
    """COMPILECACHE_ROOT, then TORCHINDUCTOR_CACHE_DIR, then torch's own default."""
    for name in ("COMPILECACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR"):
        if os.environ.get(name):
            return os.environ[name]
    from compilecache.inductor_names import default_cache_dir

    return default_cache_dir()
