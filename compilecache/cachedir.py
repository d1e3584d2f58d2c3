"""One local cache root: where it is, whether it can be used, who writes it, what lies in it.

Layout: the root itself is ``TORCHINDUCTOR_CACHE_DIR``; what is ours lies in ``.compilecache/``
below it (lock, holder, staging, records, quarantine).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import inspect
import json
import mmap
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout

from compilecache.artifact import FileEntry, Record, check_files, hash_files
from compilecache.contents import SETTLED, is_tuning
from compilecache.errors import ChecksumMismatch, LockTimeout, UnsafePath
from compilecache.files import make_private, replacing
from compilecache.kernels import FOLDER, regroup
from compilecache.ownership import refuse_foreign

OWN = ".compilecache"
NETWORK = (
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "smbfs",
    "fuse.sshfs",
    "lustre",
    "gpfs",
    "ceph",
    "9p",
    "afs",
)
ENTRIES_LAST = ("fxgraph/", "aotautograd/")
"""An index entry is put in place after the binaries it points to."""
LEAST_FREE = 64 * 2**20


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


class CacheDir:
    """A cache root. Making one touches nothing; ``prepare`` creates and checks it."""

    def __init__(self, root: str | Path | None = None) -> None:
        self.root = Path(os.path.abspath(root or default_root()))  # noqa: PTH100 - keeps links
        self._own = self.root / OWN

    # -- whether it can be used -------------------------------------------------------------

    def prepare(self, *, allow_network: bool = False) -> None:
        """Creates the root (0700) and refuses one that cannot hold a cache safely.

        Raises UnsafePath (unwritable, full, noexec, network) or UntrustedArtifact (others could
        write to it, or to a folder above it).
        """
        self.create()
        self.refuse_foreign_owner()
        self.refuse_full()
        self.refuse_noexec()
        if not allow_network:
            self.refuse_network()

    def create(self) -> None:
        """Makes the root (0700) where there is none. Raises UnsafePath when it cannot be written."""
        with self._explaining():
            make_private(self._own)

    def refuse_network(self) -> None:
        """Raises UnsafePath for a root that other hosts see."""
        kind = filesystem(self.root)
        if kind in NETWORK:
            raise UnsafePath(
                f"cache root '{self.root}' lies on a network file system ({kind}), where locks and "
                "half-written files break compilers",
                next_step="Choose a local disk with --root, or insist with --allow-network-root",
                path=self.root,
            )

    def prepare_to_clean(self) -> bool:
        """Checks a root that is there, full or not; False when there is none.

        Raises UnsafePath or UntrustedArtifact.
        """
        if not self.root.is_dir():
            return False
        with self._explaining():
            self._own.mkdir(exist_ok=True, mode=0o700)
        self.refuse_foreign_owner()
        return True

    def refuse_foreign_owner(self) -> None:
        """Raises UntrustedArtifact for a root that somebody else can write, or replace."""
        with self._explaining():
            refuse_foreign(self.root)
            refuse_foreign(self._own)

    def refuse_full(self) -> None:
        """Raises UnsafePath where no plan would find room."""
        free = shutil.disk_usage(self.root).free
        if free < LEAST_FREE:
            raise UnsafePath(
                f"cache root '{self.root}' has {free / 2**20:.0f} MiB free; a plan needs at least "
                f"{LEAST_FREE // 2**20}",
                next_step="Free some space, or choose another disk with --root",
                path=self.root,
            )

    def refuse_more(self, size: int) -> None:
        """Raises UnsafePath when so many more bytes would fill the disk, before one is written."""
        free = shutil.disk_usage(self.root).free
        if free < size + LEAST_FREE:
            raise UnsafePath(
                f"cache root '{self.root}' has {free / 2**20:.0f} MiB free, and what is to be "
                f"restored unpacks to {size / 2**20:.0f}",
                next_step="Free some space, or choose another disk with --root",
                path=self.root,
            )

    def refuse_noexec(self) -> None:
        """Raises UnsafePath where nothing can be mapped for execution."""
        with self._explaining(), tempfile.TemporaryFile(dir=self._own) as probe:
            probe.write(b"\0" * mmap.PAGESIZE)
            probe.flush()
            try:
                mmap.mmap(
                    probe.fileno(), mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_EXEC
                ).close()
            except PermissionError as error:
                raise UnsafePath(
                    f"cache root '{self.root}' is mounted noexec: compiled kernels cannot be loaded",
                    next_step="Remount it with exec, or choose another disk with --root",
                    path=self.root,
                ) from error

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        """Turns a refusal of the file system into one error that names the root."""
        try:
            yield
        except OSError as error:
            if error.errno not in (
                errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT,
                errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.EIO,
            ):  # fmt: skip
                raise
            raise UnsafePath(
                f"cache root '{self.root}' cannot be written: {error.strerror}",
                next_step="Choose a writable local folder with --root or COMPILECACHE_ROOT",
                path=self.root,
            ) from error

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
        with self._explaining():
            lock = _file_lock(self._own / "lock")
        deadline = time.monotonic() + timeout
        while True:
            try:
                remaining = max(0.0, deadline - time.monotonic())
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
            with contextlib.suppress(UnsafePath):  # a full disk is no reason not to clean it
                self.say(doing)
            yield
        finally:
            (self._own / "holder.json").unlink(missing_ok=True)
            lock.release()

    def say(self, doing: str) -> None:
        """What the holder of the lock is working on, for those who wait."""
        holder = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": time.time(),
            "doing": doing,
        }
        with self._explaining(), replacing(self._own / "holder.json") as file:
            file.write(json.dumps(holder).encode())

    def holder(self) -> Holder | str:
        """Who holds the lock; a plain word when it did not say."""
        try:
            return Holder(**json.loads((self._own / "holder.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return "a process that has not said who it is"

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
        for folder, folders, names in os.walk(self.root):
            folders[:] = [
                name for name in folders if not (name == OWN and folder == str(self.root))
            ]
            prefix = os.path.relpath(folder, self.root)
            found.update(name if prefix == "." else f"{prefix}/{name}" for name in names)
        return found

    def records(self, fingerprint: str) -> dict[str, Record]:
        """The records of targets that were activated or made here; unreadable ones are left out."""
        found = {}
        for path in sorted((self._own / "records" / fingerprint).glob("*.json")):
            with contextlib.suppress(OSError, ChecksumMismatch, UnsafePath):
                record = Record.parse(path.read_bytes())
                found[record.key] = record
        return found

    def keep_record(self, record: Record, *, published: bool) -> None:
        """Notes that every file of the record is in place; written last."""
        folder = self._own / "records" / record.fingerprint
        marker = folder / f"{record.key}.unpublished"
        with self._explaining():
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not published:
                marker.touch(mode=0o600)
            with replacing(folder / f"{record.key}.json") as file:
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
        with self._explaining():
            place.parent.mkdir(exist_ok=True, mode=0o700)
            try:
                (self.root / path).rename(place)
            except FileNotFoundError:
                return False
        return True

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """An empty folder on the root's own file system, gone afterwards; old ones are swept."""
        parent = self._own / "staging"
        with self._explaining():
            parent.mkdir(exist_ok=True, mode=0o700)
            for left in parent.iterdir():
                shutil.rmtree(left, ignore_errors=True)
            folder = Path(tempfile.mkdtemp(dir=parent))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def activate(self, staged: Path, entries: Collection[FileEntry]) -> int:
        """Puts checked files from staging in place; index entries last. Returns how many were new.

        What is there already is never overwritten: equal content is kept, other content under the
        same name raises ChecksumMismatch naming both, before anything is put in place.
        """
        self.refuse_conflicts(entries)
        count = 0
        with self._explaining():
            for entry in sorted(entries, key=lambda e: (e.path.startswith(ENTRIES_LAST), e.path)):
                count += _put(staged / entry.path, self.root / entry.path)
            regroup(self.root, [entry.path for entry in entries])
        return count

    def refuse_conflicts(self, entries: Collection[FileEntry]) -> None:
        """Raises ChecksumMismatch naming every file that is there with other content."""
        present = [entry for entry in entries if os.path.lexists(self.root / entry.path)]
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


def _put(source: Path, place: Path) -> int:
    place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        os.link(source, place)
    except FileExistsError:
        return 0
    except OSError:
        if place.exists():
            return 0
        source.rename(place)
        return 1
    source.unlink()
    return 1


def default_root() -> str:
    """COMPILECACHE_ROOT, then TORCHINDUCTOR_CACHE_DIR, then torch's own default."""
    for name in ("COMPILECACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR"):
        if os.environ.get(name):
            return os.environ[name]
    from compilecache.inductor_names import default_cache_dir

    return default_cache_dir()


def filesystem(path: Path) -> str:
    """The type of file system that holds a path ("ext4", "nfs4", "tmpfs"), "unknown" if untold."""
    best, kind = "", "unknown"
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return kind
    real = os.path.realpath(path)
    for line in lines:
        left, _, right = line.partition(" - ")
        mount = left.split()[4].replace("\\040", " ")
        if len(mount) >= len(best) and (real + "/").startswith(mount.rstrip("/") + "/"):
            best, kind = mount, right.split()[0]
    return kind
