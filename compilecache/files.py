"""Writing files so that nobody ever sees half of one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

TEMP_PREFIX = ".tmp-"
"""Names of unfinished files start so; whoever lists a directory leaves them out."""


def replacing(path: Path, *, durable: bool = True) -> AbstractContextManager[BinaryIO]:
    """A writable file that becomes ``path`` when the block ends well, durably and all at once.

    The file is mode 0600. On an error inside the block ``path`` stays as it was. Without ``durable``
    a power cut may leave it empty: for what is checked when it is read, and can be had again. Raises
    OSError.
    """
    return _finishing(path, os.replace, durable=durable)


def creating(path: Path) -> AbstractContextManager[BinaryIO]:
    """Like ``replacing``, but raises FileExistsError at the end when ``path`` is already there.

    Of several processes that create the same path exactly one succeeds.
    """
    return _finishing(path, os.link)


@contextmanager
def _finishing(
    path: Path, finish: Callable[[Path, Path], None], *, durable: bool = True
) -> Iterator[BinaryIO]:
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=TEMP_PREFIX)
    temp = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        finish(temp, path)
    finally:
        with suppress(FileNotFoundError):
            temp.unlink()
    if durable:
        sync_directory(path.parent)


def make_private(directory: Path) -> None:
    """Makes a directory and the missing ones above it, for this user alone. Raises OSError."""
    if not directory.is_dir():
        make_private(directory.parent)
        with suppress(FileExistsError):
            directory.mkdir(mode=0o700)


def sync_directory(path: Path) -> None:
    """Makes names created, replaced or removed in a directory survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
