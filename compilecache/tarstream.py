"""A tar stream read without trust in it, as far as packs need: names, sizes, contents."""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass

from compilecache.artifact import MOST_FILES, check_name
from compilecache.errors import UnsafePath

RECORD = tarfile.BLOCKSIZE
_NAME_LIMIT = 8192


class DamageError(Exception):
    """The archive cannot be read further."""


@dataclass(frozen=True, slots=True)
class _Header:
    """What a tar header says of one member; the rest of it means nothing here."""

    name: str
    """The short name: of a long one, the beginning."""
    size: int
    """In bytes."""
    kind: bytes
    """A plain file, a long name, or something that is refused."""

    @classmethod
    def parse(cls, data: bytes) -> _Header:
        """Raises DamageError. tarfile's own reader takes ten times as long, for what packs never have."""
        try:
            right = sum(data) - sum(data[148:156]) + 8 * ord(" ") == _number(data[148:156])
            size = _number(data[124:136])
        except ValueError:
            right, size = False, 0
        if not right:
            raise DamageError("a tar header is damaged")
        # The short form of a long name may end inside a character; a long name replaces it.
        name = data[:100].partition(b"\0")[0].decode(errors="surrogateescape")
        return cls(name, size, data[156:157])


def _number(field: bytes) -> int:
    """Octal digits; or, for sizes from 8 GiB on, bytes after a mark (GNU tar)."""
    if field[0] == 0o200:
        return int.from_bytes(field[1:])
    digits = field.partition(b"\0")[0].strip() or b"0"
    if not digits.isdigit():
        raise ValueError(digits)  # int() would take a sign, too, and underscores
    return int(digits, 8)


class Tar:
    """The members of a tar stream: plain files and GNU long names, nothing else.

    ``block`` gives the next bytes, none at the end; ``known``: names that have been checked already.
    """

    def __init__(self, block: Callable[[], bytes], known: Container[str]) -> None:
        self._block = block
        self._known = known
        self._rest = memoryview(b"")

    def members(self) -> Iterator[tuple[str, int]]:
        """Name and size of each file; its content is then to be taken. Raises DamageError, UnsafePath."""
        long_name: str | None = None
        count = 0
        while (header := self._header()) is not None:
            count += 1
            if count > 2 * MOST_FILES:  # a long name is a member of its own
                raise DamageError(f"it holds more than {MOST_FILES} files")
            if header.kind == tarfile.GNUTYPE_LONGNAME:
                long_name = self._long_name(header.size)
                continue
            name = header.name if long_name is None else long_name
            if name not in self._known:
                check_name(name)
            if header.kind not in (tarfile.REGTYPE, tarfile.AREGTYPE):
                raise UnsafePath(
                    f"pack member '{name}' is no regular file (tar type {header.kind!r})",
                    next_step="Do not use this artifact; publish it anew from a cache you trust",
                    path=name,
                )
            yield name, header.size
            long_name = None
            self._padding(header.size)

    def take(self, count: int) -> Iterator[memoryview]:
        """The next ``count`` bytes, in pieces. Raises DamageError at the end of the stream."""
        while count > 0:
            if not self._rest:
                self._rest = memoryview(self._block())
                if not self._rest:
                    raise DamageError("it ends too early")
            piece, self._rest = self._rest[:count], self._rest[count:]
            count -= len(piece)
            yield piece

    def at_end(self) -> bool:
        """True when nothing follows but zeros, the padding that tar adds."""
        clean = not any(self._rest)
        while clean and (block := self._block()):
            clean = not any(block)
        return clean

    def _header(self) -> _Header | None:
        data = self._exactly(RECORD)
        if not any(data):
            if any(self._exactly(RECORD)):
                raise DamageError("its end mark is damaged")
            return None
        return _Header.parse(data)

    def _long_name(self, size: int) -> str:
        if size > _NAME_LIMIT:
            raise DamageError("a file name is too long")
        data = self._exactly(size)
        self._padding(size)
        try:
            return data.rstrip(b"\0").decode()
        except UnicodeDecodeError:
            raise DamageError("a file name is not UTF-8") from None

    def _padding(self, size: int) -> None:
        self._exactly(-size % RECORD)

    def _exactly(self, count: int) -> bytes:
        if count <= len(self._rest):
            piece, self._rest = self._rest[:count], self._rest[count:]
            return bytes(piece)
        return b"".join(self.take(count))
