"""The folder of a cache root: made, and refused where it can hold no cache safely."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from compilecache.errors import UnsafePath
from compilecache.files import make_private
from compilecache.ownership import refuse_foreign

OWN = ".compilecache"
"""What is not torch's lies below it."""
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
LEAST_FREE = 64 * 2**20


class RootFolder:
    """A folder, absolute, whatever it is. Making one touches nothing."""

    def __init__(self, root: Path) -> None:
        self.root = Path(os.path.abspath(root))  # noqa: PTH100 - keeps links
        self._own = self.root / OWN

    def prepare(self, *, allow_network: bool = False) -> None:
        """Creates the root (0700) and refuses one that cannot hold a cache safely.

        Raises UnsafePath (unwritable, full, noexec, without locks, network) or UntrustedArtifact (others could
        write to it, or to a folder above it).
        """
        self.create()
        self.refuse_foreign_owner()
        self.refuse_full()
        self.refuse_noexec()
        self.refuse_lockless()
        if not allow_network:
            self.refuse_network()

    def create(self) -> None:
        """Makes the root (0700) where there is none. Raises UnsafePath when it cannot be written."""
        with self.explaining():
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
        with self.explaining():
            self._own.mkdir(exist_ok=True, mode=0o700)
        self.refuse_foreign_owner()
        return True

    def refuse_foreign_owner(self) -> None:
        """Raises UntrustedArtifact for a root that somebody else can write, or replace."""
        with self.explaining():
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
        with self.explaining(), tempfile.TemporaryFile(dir=self._own) as probe:
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

    def refuse_lockless(self) -> None:
        """Raises UnsafePath where the kernel locks no files, or where the lock is a link."""
        with self.explaining(), tempfile.TemporaryFile(dir=self._own) as probe:
            try:
                fcntl.flock(probe, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                # filelock#67, #603: a lock that is only a file stays when its holder dies.
                raise UnsafePath(
                    f"cache root '{self.root}' lies where files cannot be locked ({error.strerror})",
                    next_step="Choose a local disk with --root or COMPILECACHE_ROOT",
                    path=self.root,
                ) from error
        if (self._own / "lock").is_symlink():
            raise UnsafePath(
                f"the lock of cache root '{self.root}' is a link, which nobody here made",
                next_step=f"Find out who did, then remove '{self._own / 'lock'}'",
                path=self._own / "lock",
            )

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Turns a refusal of the file system into one error that names the root."""
        try:
            yield
        except OSError as error:
            if error.errno not in (
                errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT,
                errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.EIO, errno.ELOOP, errno.ENOSYS, errno.ENOLCK,
            ):  # fmt: skip
                raise
            raise UnsafePath(
                f"cache root '{self.root}' cannot be written: {error.strerror}",
                next_step="Choose a writable local folder with --root or COMPILECACHE_ROOT",
                path=self.root,
            ) from error


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
