"""Named bytes below one root: what a store needs of a file system, a bucket or memory.

Names are posix, relative, and never change their content; a miss is FileNotFoundError. All errors are
OSError.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote

from compilecache.errors import StoreUnavailable
from compilecache.files import TEMP_PREFIX, creating, make_private, replacing

COPY_BYTES = 1 << 20

Option = str | int | float | bool | None | Mapping[str, "Option"]
"""An option of a store, as people write it in a configuration."""

Sent = Callable[[int], None]
"""Hears of so many more bytes that have gone; from several threads, and again of what is sent again."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One object, as a listing shows it."""

    size: int
    """In bytes."""
    modified: float
    """When it was written, by the storage's own clock: seconds since the epoch."""


class Blob(Protocol):
    """One stored object, open for reading at any place."""

    size: int

    def read_at(self, start: int, count: int) -> bytes:
        """At most ``count`` bytes from ``start``, and at least one, or OSError. In order is fastest."""

    def close(self) -> None:
        """Ends the reading."""


class Storage(Protocol):
    """One root. Every method may be called from several threads."""

    url: str
    """The root, as it is shown to people."""
    block_bytes: int
    """How much to ask for in one read of a large object."""
    workers: int
    """How many calls at a time help."""
    streams: tuple[int, int]
    """How many packs at a time to begin with, and how many may help where each waits."""

    def read(self, name: str, limit: int) -> bytes:
        """A small object, at most ``limit`` bytes of it."""

    def size(self, name: str) -> int | None:
        """Bytes of an object; None when it is absent."""

    def open(self, name: str) -> Blob:
        """An object to read in parts."""

    def create(self, name: str, data: bytes) -> bool:
        """Writes a small object unless it is there already: then False. Where the storage does
        not honour that, it may overwrite: read back."""

    def upload(
        self, name: str, source: Path, *, replace: bool, sent: Sent = lambda count: None
    ) -> None:
        """Writes a file's content under a name, all at once; ``replace`` an object of that name."""

    def walk(self, folder: str) -> dict[str, int]:
        """Names, relative to the folder, and sizes of everything below it."""

    def glance(self, folder: str, most: int) -> list[str] | None:
        """Names as ``walk`` finds them, where one request tells them all and they are no more than
        ``most``; else None. Always None where asking folder by folder costs nothing."""

    def survey(self, folder: str) -> dict[str, Stored]:
        """What ``walk`` finds, with sizes and times."""

    def folders(self, folder: str) -> list[str]:
        """Names of the folders directly in a folder."""

    def delete(self, name: str) -> None:
        """Removes an object; one that is absent is removed already."""

    def half_uploads(self, folder: str) -> dict[str, Stored]:
        """Uploads below a folder that began and did not end, by a name for ``drop_half_upload``."""

    def drop_half_upload(self, name: str) -> None:
        """Frees what such an upload has sent so far."""


class _LocalBlob:
    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.size = os.fstat(self._descriptor).st_size

    def read_at(self, start: int, count: int) -> bytes:
        return os.pread(self._descriptor, count, start)

    def close(self) -> None:
        os.close(self._descriptor)


class LocalStorage:
    """A directory. Creation is by link of a finished file: exactly one of many creators succeeds."""

    block_bytes = 256 << 10
    # As many as cores: more of them wait for each other and for the file system's journal.
    workers = min(8, os.cpu_count() or 1)
    streams = (workers, workers)

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = str(root)

    def read(self, name: str, limit: int) -> bytes:
        with (self.root / name).open("rb") as file:
            return file.read(limit)

    def size(self, name: str) -> int | None:
        try:
            return (self.root / name).stat().st_size
        except FileNotFoundError:
            return None

    def open(self, name: str) -> Blob:
        return _LocalBlob(self.root / name)

    def create(self, name: str, data: bytes) -> bool:
        def write() -> None:
            with creating(self._prepared(name)) as file:
                file.write(data)

        try:
            _in_spite_of_pruning(write)
        except FileExistsError:
            return False
        return True

    def upload(
        self, name: str, source: Path, *, replace: bool, sent: Sent = lambda count: None
    ) -> None:
        finishing = replacing if replace else creating

        def copy() -> None:
            with source.open("rb") as content, finishing(self._prepared(name)) as file:
                while block := content.read(COPY_BYTES):
                    file.write(block)
                    sent(len(block))

        with suppress(FileExistsError):
            _in_spite_of_pruning(copy)

    def walk(self, folder: str) -> dict[str, int]:
        return _sizes(self.survey(folder))

    def glance(self, folder: str, most: int) -> list[str] | None:
        return None

    def survey(self, folder: str) -> dict[str, Stored]:
        return {name: found for name, found in _walk(self.root / folder, "") if not _is_temp(name)}

    def folders(self, folder: str) -> list[str]:
        try:
            with os.scandir(self.root / folder) as found:
                return [entry.name for entry in found if entry.is_dir(follow_symlinks=False)]
        except FileNotFoundError:
            return []

    def delete(self, name: str) -> None:
        path = self.root / name
        path.unlink(missing_ok=True)
        for folder in path.parents:
            if folder == self.root:
                break
            try:
                folder.rmdir()
            except OSError:
                break

    def half_uploads(self, folder: str) -> dict[str, Stored]:
        found = _walk(self.root / folder, f"{folder}/")
        return {name: stored for name, stored in found if _is_temp(name)}

    def drop_half_upload(self, name: str) -> None:
        self.delete(name)

    def _prepared(self, name: str) -> Path:
        path = self.root / name
        make_private(path.parent)
        return path


PRUNED_TRIES = 50
"""How often a file is made again whose folder was taken away meanwhile."""


def _in_spite_of_pruning(act: Callable[[], None]) -> None:
    """Makes a file; again when ``delete`` took its folder, empty still, in between."""
    for number in range(PRUNED_TRIES):
        with suppress(FileNotFoundError):
            return act()
        time.sleep(random.uniform(0, 1e-4 * number))
    return act()


def _is_temp(name: str) -> bool:
    return name.rpartition("/")[2].startswith(TEMP_PREFIX)


def _sizes(found: Mapping[str, Stored]) -> dict[str, int]:
    return {name: stored.size for name, stored in found.items()}


def _walk(folder: Path, prefix: str) -> Iterator[tuple[str, Stored]]:
    try:
        with os.scandir(folder) as found:
            entries = sorted(found, key=lambda entry: entry.name)
    except FileNotFoundError:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(folder / entry.name, f"{prefix}{entry.name}/")
        else:
            with suppress(FileNotFoundError):
                status = entry.stat()
                yield prefix + entry.name, Stored(status.st_size, status.st_mtime)


class _MemoryBlob:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size = len(data)

    def read_at(self, start: int, count: int) -> bytes:
        return self._data[start : start + count]

    def close(self) -> None:
        self._data = b""


class MemoryStorage:
    """fsspec's memory file system: gone with the process, for tests and dry runs."""

    block_bytes = 1 << 20
    workers = 1
    streams = (1, 1)
    _lock = threading.Lock()

    def __init__(self, root: str) -> None:
        self.url = f"memory://{root}"
        self._root = f"/{root}"
        import fsspec  # most runs never need it

        self._files = fsspec.filesystem("memory")

    def read(self, name: str, limit: int) -> bytes:
        with self._lock:
            data: bytes = self._files.cat_file(self._path(name))
        return data[:limit]

    def size(self, name: str) -> int | None:
        with self._lock:
            try:
                size: int = self._files.info(self._path(name))["size"]
            except FileNotFoundError:
                return None
        return size

    def open(self, name: str) -> Blob:
        with self._lock:
            return _MemoryBlob(self._files.cat_file(self._path(name)))

    def create(self, name: str, data: bytes) -> bool:
        with self._lock:
            try:
                self._files.pipe_file(self._path(name), data, mode="create")
            except FileExistsError:
                return False
        return True

    def upload(
        self, name: str, source: Path, *, replace: bool, sent: Sent = lambda count: None
    ) -> None:
        data = source.read_bytes()
        with self._lock, suppress(FileExistsError):
            mode = "overwrite" if replace else "create"
            self._files.pipe_file(self._path(name), data, mode=mode)
            sent(len(data))

    def walk(self, folder: str) -> dict[str, int]:
        return _sizes(self.survey(folder))

    def glance(self, folder: str, most: int) -> list[str] | None:
        return None

    def survey(self, folder: str) -> dict[str, Stored]:
        root = self._path(folder) + "/"
        with self._lock:
            return {
                name.removeprefix(root): Stored(
                    info["size"], self._files.modified(name).timestamp()
                )
                for name, info in self._files.find(root, detail=True).items()
            }

    def folders(self, folder: str) -> list[str]:
        try:
            with self._lock:
                found = self._files.ls(self._path(folder), detail=True)
        except FileNotFoundError:
            return []
        return [i["name"].rpartition("/")[2] for i in found if i["type"] == "directory"]

    def delete(self, name: str) -> None:
        with self._lock, suppress(FileNotFoundError):
            self._files.rm_file(self._path(name))

    def half_uploads(self, folder: str) -> dict[str, Stored]:
        return {}

    def drop_half_upload(self, name: str) -> None:
        """There are none."""

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


def open_storage(
    url: str | Path | None, *, patience: float, options: Mapping[str, Option] | None
) -> Storage:
    """The storage at an address; None: ``COMPILECACHE_STORE``, else below the user's cache folder.

    Raises StoreUnavailable for an address that cannot be used, or an extra that is not installed.
    """
    address = os.fspath(url or os.environ.get("COMPILECACHE_STORE") or _default_root())
    scheme, mark, rest = address.partition("://")
    if not mark or scheme == "file":
        return LocalStorage(Path(unquote(rest) if mark else address).expanduser().absolute())
    # s3fs#1005: an object store takes "a//b" and "a/b/" for other names than "a/b".
    first, *others = [part for part in rest.split("/") if part] or [""]
    if scheme == "memory":
        return MemoryStorage("/".join([first, *others]) or "store")
    if scheme != "s3" or not first or "@" in first or {".", ".."}.intersection(others):
        raise StoreUnavailable(
            f"'{address}' is no address of a store",
            next_step="Use a directory, file://DIR, memory://NAME or s3://BUCKET/PREFIX",
        )
    try:
        from compilecache.s3 import S3Storage
    except ImportError as error:
        raise StoreUnavailable(
            f"store '{address}' needs botocore, which cannot be imported ({error})",
            next_step="Install it: pip install 'compilecache[s3]'",
        ) from error
    return S3Storage(first, "/".join(others), patience=patience, options=options)


def _default_root() -> str:
    try:
        caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:
        raise StoreUnavailable(
            "there is no home directory for the default store",
            next_step="Name a store with --store or COMPILECACHE_STORE",
        ) from error
    return str(Path(caches) / "compilecache" / "store")
