"""Packs: deterministic tar + zstd, written from a directory and read back without trust in it.

A pack is a plain archive: ``tar --zstd -xf PACK`` reads it.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import tarfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Protocol

import xxhash

from compilecache.artifact import MOST_FILES, FileEntry, PackInfo, Tree
from compilecache.errors import ChecksumMismatch, CompileCacheError, UnsafePath
from compilecache.files import replacing
from compilecache.tarstream import RECORD, DamageError, Tar

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

LEVEL = 3
BLOCK_BYTES = 512 << 10
MOST_TIMES = 1000
"""How much larger than itself a pack may unpack; compiled code takes 3 to 20 times its pack."""
FREE_BYTES = 64 << 20
"""So much may be unpacked of any pack, however well it compresses."""
_SKIPPED = (0x184D2A50).to_bytes(4, "little")
"""Begins a skippable frame (RFC 8878, 3.1.2): every reader of zstd passes over it."""


class Readable(Protocol):
    """A stream of bytes: a file, or what a store gives for one."""

    def read(self, size: int, /) -> bytes:
        """At most ``size`` bytes, none at the end."""


def write_pack(root: Path, paths: Iterable[str], out: Path, *, mark: bytes = b"") -> PackInfo:
    """Packs files below ``root`` into ``out``; equal files give equal bytes, wherever and whenever.

    ``mark``: bytes that are added and mean nothing, so that the pack gets another name where the one
    of its plain name is damaged.

    Raises UnsafePath for links and names that would leave the root, ChecksumMismatch for a file that
    changes meanwhile, CompileCacheError for what nobody would unpack, OSError.
    """
    names = sorted(set(paths))
    if len(names) > MOST_FILES:
        raise _too_much(f"{len(names)} files")
    tree = Tree(root)
    with replacing(out) as file:
        writer = _Writer(file)
        for name in names:
            with tree.open(name) as (descriptor, size):
                writer.add(name, descriptor, size)
        sha256, packed = writer.close(mark)
        if writer.inflated > _most_inflated(packed):
            raise _too_much(f"{writer.inflated} bytes that compress to {packed}")
    return PackInfo(sha256=sha256, size=packed, files=len(names))


class _Writer:
    """tar into zstd into a file, with the digest of what is written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._zstd = zstd.ZstdCompressor(level=LEVEL)
        self._sha256 = hashlib.sha256()
        self._size = 0
        self.inflated = 0
        """Bytes before compression."""

    def add(self, name: str, descriptor: int, size: int) -> None:
        header = tarfile.TarInfo(name)
        header.size, header.mode, header.mtime = size, 0o600, 0
        self._put(header.tobuf(tarfile.GNU_FORMAT, "utf-8", "strict"))
        left = size
        while left and (block := os.read(descriptor, min(left, BLOCK_BYTES))):
            self._put(block)
            left -= len(block)
        if left or os.read(descriptor, 1):
            raise ChecksumMismatch(
                f"file '{name}' changed while it was packed",
                next_step="Pack again once nothing writes to the cache",
                faults=(f"{name}: changed while it was packed",),
            )
        self._put(bytes(-size % RECORD))

    def close(self, mark: bytes) -> tuple[str, int]:
        self._put(bytes(2 * RECORD))
        self._write(self._zstd.flush())
        if mark:
            self._write(_SKIPPED + len(mark).to_bytes(4, "little") + mark)
        return self._sha256.hexdigest(), self._size

    def _put(self, data: bytes) -> None:
        self.inflated += len(data)
        self._write(self._zstd.compress(data))

    def _write(self, data: bytes) -> None:
        self._sha256.update(data)
        self._size += len(data)
        self._file.write(data)


def unpack(
    stream: Readable,
    sha256: str | None,
    wanted: Mapping[str, FileEntry],
    dest: Path,
    *,
    spare_bytes: int = 0,
    written: Callable[[int], None] = lambda count: None,
) -> None:
    """Writes the wanted files of a pack below ``dest``, every digest checked, in one pass.

    ``sha256``: of the whole pack; None where nobody vouches for it, and only the files count.
    Files of the pack that nobody wants are faults; with ``spare_bytes`` they are skipped, up to so
    many bytes in all. Nothing is decompressed much past what the wanted files and these add up to,
    nor past ``MOST_TIMES`` what was read; and no more is read than they could take up compressed.
    ``written`` hears of bytes of files as they come. Raises ChecksumMismatch with every fault found, UnsafePath for a pack that is intact but holds
    links, devices or names outside the root, OSError from either side. After any error none of the
    files is left.
    """
    limit = _tar_bytes(wanted.values()) + spare_bytes
    inflated = _Inflated(stream, limit, summed=sha256 is not None)
    unpacker = _Unpacker(Tar(inflated.block, wanted), wanted, dest, written, skips=spare_bytes > 0)
    try:
        unsafe = unpacker.run()
        actual = inflated.drain()
        if sha256 is not None and actual != sha256:
            unpacker.faults.insert(0, f"pack {sha256[:12]}: its sha256 is {actual}")
        elif unsafe is not None:
            raise unsafe
        if unpacker.faults:
            raise broken_packs(unpacker.faults)
    except BaseException:
        unpacker.undo()
        raise


def sha256_of(stream: Readable) -> str:
    """Hex digest of what is left of a stream."""
    digest = hashlib.sha256()
    while block := stream.read(BLOCK_BYTES):
        digest.update(block)
    return digest.hexdigest()


def broken_packs(faults: Iterable[str]) -> ChecksumMismatch:
    """The error for everything found wrong with one or several packs."""
    found = tuple(faults)
    more = f"; and {len(found) - 5} more" if len(found) > 5 else ""
    return ChecksumMismatch(
        f"the store holds other bytes than its records promise: {'; '.join(found[:5])}{more}",
        next_step="Compile and publish these targets again; the new records supersede the old",
        faults=found,
    )


def _most_inflated(packed: int) -> int:
    return FREE_BYTES + MOST_TIMES * packed


def _too_much(what: str) -> CompileCacheError:
    return CompileCacheError(
        f"a pack of {what} would be taken for a bomb, and nobody would unpack it",
        next_step="Keep large constants out of compiled code, or publish fewer files at a time",
    )


def _tar_bytes(entries: Iterable[FileEntry]) -> int:
    """At least what a tar of these files weighs: contents, headers, long names, padding."""
    return 64 * RECORD + sum(e.size + 5 * RECORD + 4 * len(e.path) for e in entries)


class _Inflated:
    """Decompressed blocks of a stream, and the digest of its compressed bytes if that is wanted."""

    def __init__(self, stream: Readable, limit: int, *, summed: bool) -> None:
        self._stream = stream
        self._limit = limit
        self._inflated = 0
        self._read_bytes = 0
        self._zstd = zstd.ZstdDecompressor()
        self._sha256 = hashlib.sha256() if summed else None

    def block(self) -> bytes:
        """At most BLOCK_BYTES; empty at the end. Raises DamageError."""
        while not self._zstd.eof:
            data = self._read() if self._zstd.needs_input else b""
            if not data and self._zstd.needs_input:
                raise DamageError("it ends too early")
            try:
                inflated = self._zstd.decompress(data, BLOCK_BYTES)
            except zstd.ZstdError:
                raise DamageError("it is not zstd, or damaged") from None
            self._inflated += len(inflated)
            if self._inflated > self._limit:
                raise DamageError("it unpacks to more than its records list")
            if self._inflated > _most_inflated(self._read_bytes):
                raise DamageError(f"it unpacks to more than {MOST_TIMES} times its size")
            if inflated:
                return inflated
        return b""

    def drain(self) -> str | None:
        """sha256 of the whole stream, reading what is left of it; of too long a one, of a part."""
        with suppress(DamageError):
            while self._read():
                pass
        return self._sha256.hexdigest() if self._sha256 is not None else None

    def _read(self) -> bytes:
        data = self._stream.read(BLOCK_BYTES)
        if self._sha256 is not None:
            self._sha256.update(data)
        self._read_bytes += len(data)
        # zstd adds less than a hundredth to what it cannot compress.
        if self._read_bytes > self._limit + self._limit // 64 + BLOCK_BYTES:
            raise DamageError("it is longer than what its records list")
        return data


class _Unpacker:
    """Writes what is wanted of a tar stream and remembers everything wrong with it."""

    def __init__(
        self,
        tar: Tar,
        wanted: Mapping[str, FileEntry],
        dest: Path,
        tell: Callable[[int], None],
        *,
        skips: bool,
    ) -> None:
        self._tell = tell
        self._tar = tar
        self._wanted = wanted
        self._dest = dest
        self._skips = skips
        self._seen: set[str] = set()
        self._directories = {""}
        self._written: list[str] = []
        self.faults: list[str] = []

    def run(self) -> UnsafePath | None:
        """Reads to the end, or to where the archive cannot be read further."""
        try:
            for name, size in self._tar.members():
                self._member(name, size)
            if not self._tar.at_end():
                raise DamageError("something follows its end mark")
        except DamageError as damage:
            self.faults.append(f"the pack cannot be read further: {damage}")
        except UnsafePath as error:
            return error
        missing = sorted(self._wanted.keys() - self._seen)
        self.faults.extend(f"{name}: not in its pack" for name in missing)
        return None

    def undo(self) -> None:
        """Removes what was written."""
        for name in self._written:
            with suppress(FileNotFoundError):
                os.unlink(self._dest / name)  # noqa: PTH108 - thousands of names

    def _member(self, name: str, size: int) -> None:
        entry = self._wanted.get(name)
        fault = self._fault(name, size, entry)
        if fault is None and entry is not None:
            if self._write(name, size) != entry.xxh3_128:
                self.faults.append(f"{name}: content differs")
        else:
            self.faults.extend([fault] if fault else [])
            for _ in self._tar.take(size):
                pass
        self._seen.add(name)

    def _fault(self, name: str, size: int, entry: FileEntry | None) -> str | None:
        if name in self._seen:
            return f"{name}: twice in its pack"
        if entry is None:
            return None if self._skips else f"{name}: in the pack, but no record lists it"
        return None if size == entry.size else f"{name}: {size} bytes instead of {entry.size}"

    def _write(self, name: str, size: int) -> str:
        self._make_parents(name.rpartition("/")[0])
        digest = xxhash.xxh3_128()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(f"{self._dest}/{name}", flags, 0o600)
        self._written.append(name)
        try:
            for piece in self._tar.take(size):
                digest.update(piece)
                self._tell(len(piece))
                while piece:
                    piece = piece[os.write(descriptor, piece) :]
        finally:
            os.close(descriptor)
        return digest.hexdigest()

    def _make_parents(self, parent: str) -> None:
        if parent in self._directories:
            return
        self._make_parents(parent.rpartition("/")[0])
        path = f"{self._dest}/{parent}"
        if not os.path.lexists(path):
            with suppress(FileExistsError):
                os.mkdir(path, mode=0o700)  # noqa: PTH102 - thousands of names
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            raise UnsafePath(
                f"'{path}' is in the way of the directory of that name",
                next_step="Restore into an empty directory",
                path=path,
            )
        self._directories.add(parent)
