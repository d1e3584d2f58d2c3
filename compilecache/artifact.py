"""What one target produced: the record of its files, their digests, and the checks on them.

Importing this module does not import torch.
"""

from __future__ import annotations

import json
import os
import re
import stat
import unicodedata
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal, Self

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails, from_json

from compilecache.errors import ChecksumMismatch, UnsafePath
from compilecache.evidence import Evidence
from compilecache.rootfolder import OWN
from compilecache.shapes import CompileTarget

RECORD_FORMAT: Final = 1
ADOPTED = "adopted"
"""Keys of records of a whole directory, adopted without a target, start with this word."""
EXTRA = "extra-"
"""Keys of records of another compiler's cache root start with this, before its name."""
WITHOUT_TARGET = (ADOPTED, EXTRA)

MOST_FILES: Final = 1 << 17
"""In one record, and in one pack."""

BLOCK_BYTES = 1 << 20
_LARGEST = 2**63 - 1
_KEY = r"^[A-Za-z0-9][A-Za-z0-9._+@=-]{0,199}$"
_SHA256 = r"^[0-9a-f]{64}$"

Count = Annotated[int, Field(ge=0, le=_LARGEST)]
Sha256 = Annotated[str, Field(pattern=_SHA256)]
Xxh3 = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


def check_name(name: str) -> str:
    """The relative posix name of a file below the cache root, unchanged. Raises UnsafePath."""
    parts = name.split("/")
    problem = None
    if not name:
        problem = "is empty"
    elif name.startswith("/"):
        problem = "is absolute"
    elif ".." in parts:
        problem = "climbs with '..'"
    elif parts[0] == OWN:
        problem = f"lies in '{OWN}', where compilecache keeps what it knows of the root"
    elif "" in parts or "." in parts or "\\" in name or len(name) > 4096:
        problem = "is not a plain relative name"
    elif any(unicodedata.category(letter) in ("Cc", "Cs") for letter in name):
        problem = "has control characters or is not UTF-8"
    if problem is not None:
        raise UnsafePath(
            f"file name {name[:200]!a} {problem}",
            next_step="Do not use this artifact; publish it anew from a cache you trust",
            path=ascii(name[:200]),
        )
    return name


def file_and_directory(names: Collection[str]) -> str | None:
    """A name that is listed as a file although others lie below it; None when all can coexist."""
    directories = {name.rpartition("/")[0] for name in names}
    parents = {path for name in directories for path in _upwards(name)}
    return min(parents.intersection(names), default=None)


def _upwards(directory: str) -> Iterator[str]:
    while directory:
        yield directory
        directory = directory.rpartition("/")[0]


@dataclass(frozen=True, slots=True, order=True)
class FileEntry:
    """One file a target needs. Raises UnsafePath for a name that could leave the cache root."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    path: str
    """Posix, relative to the cache root."""
    size: Count
    """In bytes."""
    xxh3_128: Xxh3
    """Hex digest of the content."""
    pack: Sha256
    """sha256 of the pack that holds it, which another record may have published."""

    def __post_init__(self) -> None:
        check_name(self.path)


@dataclass(frozen=True, slots=True)
class PackInfo:
    """One pack: where it is (its name is its digest) and what it weighs."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    sha256: Sha256
    """Hex digest of the compressed bytes; also the name of the pack in the store."""
    size: Count
    """Compressed bytes."""
    files: Count
    """How many files it holds."""


def utc_now() -> str:
    """The time as records write it, to the second: ``2026-01-31T12:00:00Z``."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Record(BaseModel):
    """What is published of one target, written after its pack."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = RECORD_FORMAT
    fingerprint: Annotated[str, Field(pattern=r"^[0-9a-f]{8,128}$")]
    """Digest of the environment that produced it."""
    target: CompileTarget | None
    """What was compiled; None for an adopted directory, and for an extra cache root."""
    key: Annotated[str, Field(pattern=_KEY)]
    """The target's key, "adopted…" or "extra-…"."""
    generation: Annotated[int, Field(ge=1, le=10**9)] = 1
    """Counts up from 1; a higher one supersedes."""
    files: Annotated[tuple[FileEntry, ...], Field(max_length=MOST_FILES)]
    """Every file the target needs, by name; each says which pack holds it."""
    pack: PackInfo | None
    """The pack made for this record; None when other packs hold all files."""
    evidence: Evidence | None = None
    """What was seen when its files were made, or proven in a fresh process."""
    created: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")] = Field(
        default_factory=utc_now
    )
    """UTC."""
    environment: dict[str, str] | None = None
    """Facts for people; nothing depends on them."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        expected = ADOPTED if self.target is None else self.target.key
        without = self.target is None and self.key.startswith(WITHOUT_TARGET)
        if self.key != expected and not without:
            raise ValueError(f"key '{self.key}' does not belong to its target ('{expected}')")
        names = [entry.path for entry in self.files]
        if names != sorted(set(names)):
            raise ValueError("files are not sorted by name, or one is named twice")
        if clash := file_and_directory(names):
            raise ValueError(f"'{clash}' is both a file and a directory")
        if self.pack is not None:
            own = sum(entry.pack == self.pack.sha256 for entry in self.files)
            if own != self.pack.files:
                raise ValueError(f"the pack holds {self.pack.files} files, but {own} are listed")
        return self

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Reads a record.

        Raises ChecksumMismatch for one that is damaged or of another format version, UnsafePath for
        one that names a file outside the cache root.
        """
        try:
            fields = from_json(data, allow_inf_nan=False)
        except ValueError as error:
            raise _damaged((f"not JSON: {error}",)) from None
        version = fields.get("format") if isinstance(fields, dict) else None
        if not isinstance(version, int) or isinstance(version, bool):
            raise _damaged(("no format number; this is no record",))
        if version != RECORD_FORMAT:
            raise ChecksumMismatch(
                f"record has format {version}, this version of compilecache reads {RECORD_FORMAT}",
                next_step="Upgrade compilecache, or publish the target again with this version",
                faults=(f"format {version}",),
            )
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            details = error.errors(include_url=False, include_input=False)
            raise _unsafe(details) or _damaged(tuple(map(_fault, details))) from None

    def dump(self) -> bytes:
        """Canonical JSON: equal records are equal bytes."""
        fields = self.model_dump(mode="json")
        return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode() + b"\n"

    def same_content(self, other: Record) -> bool:
        """True when both restore the same files from the same packs for the same target.

        Generation, time, evidence and the facts about the environment may differ.
        """
        return (self.fingerprint, self.key, self.target, self.files) == (
            other.fingerprint,
            other.key,
            other.target,
            other.files,
        )


def _damaged(faults: tuple[str, ...]) -> ChecksumMismatch:
    shown = "; ".join(faults[:5]) + (f"; and {len(faults) - 5} more" if len(faults) > 5 else "")
    return ChecksumMismatch(
        f"record is damaged: {shown}",
        next_step="Publish the target again; the new record supersedes this one",
        faults=faults,
    )


def _unsafe(details: list[ErrorDetails]) -> UnsafePath | None:
    causes = (detail.get("ctx", {}).get("error") for detail in details)
    return next((cause for cause in causes if isinstance(cause, UnsafePath)), None)


def _fault(detail: ErrorDetails) -> str:
    where = ".".join(map(str, detail["loc"]))
    return f"{where}: {detail['msg']}" if where else detail["msg"]


def hash_files(root: Path, paths: Iterable[str]) -> dict[str, tuple[int, str]]:
    """Size in bytes and xxh3_128 of each file below ``root``.

    Raises UnsafePath for a link or anything else that is no regular file, OSError when unreadable.
    """
    tree = Tree(root)
    return {path: _measure(tree, path) for path in sorted(paths)}


def check_files(root: Path, entries: Iterable[FileEntry]) -> tuple[str, ...]:
    """Everything wrong with the files below ``root``: missing, other size, other content, a link."""
    tree = Tree(root)
    return tuple(fault for entry in entries if (fault := _check(tree, entry)) is not None)


def _check(tree: Tree, entry: FileEntry) -> str | None:
    try:
        with tree.open(entry.path) as (descriptor, size):
            if size != entry.size:
                return f"{entry.path}: {size} bytes instead of {entry.size}"
            digest = _digest(descriptor)
    except (FileNotFoundError, NotADirectoryError):
        return f"{entry.path}: missing"
    except UnsafePath as error:
        return f"{entry.path}: {error.problem}"
    except OSError as error:
        return f"{entry.path}: cannot be read ({error.strerror or error})"
    return None if digest == entry.xxh3_128 else f"{entry.path}: content differs"


def _measure(tree: Tree, path: str) -> tuple[int, str]:
    with tree.open(path) as (descriptor, size):
        return size, _digest(descriptor)


def _digest(descriptor: int) -> str:
    digest = xxhash.xxh3_128()
    while block := os.read(descriptor, BLOCK_BYTES):
        digest.update(block)
    return digest.hexdigest()


class Tree:
    """Regular files below one directory, opened without following any link on the way."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._real = {""}

    @contextmanager
    def open(self, name: str) -> Iterator[tuple[int, int]]:
        """Descriptor and size of one file. Raises UnsafePath for links and special files."""
        self._check_parents(check_name(name))
        status = os.lstat(self.root / name)
        if not stat.S_ISREG(status.st_mode):
            raise _no_file(name)
        descriptor = os.open(self.root / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            yield descriptor, os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)

    def _check_parents(self, name: str) -> None:
        parent = name.rpartition("/")[0]
        if parent in self._real:
            return
        self._check_parents(parent)
        if stat.S_ISLNK(os.lstat(self.root / parent).st_mode):
            raise _no_file(parent)
        self._real.add(parent)


def _no_file(name: str) -> UnsafePath:
    return UnsafePath(
        f"'{name}' is a link or a special file",
        next_step="Remove it from the cache root; only regular files are packed and restored",
        path=name,
    )


def is_key(text: str) -> bool:
    """True for text that can be the key of a record and a name in a store."""
    return re.fullmatch(_KEY, text) is not None
