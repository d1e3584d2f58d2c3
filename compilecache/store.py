"""The remote side: fingerprints, records and packs below one root, only ever added to.

Layout below the root::

    v1/<fingerprint>/fingerprint.json
                    /artifacts/<key>/<generation>.json    written last
                    /packs/<sha256>.tar.zst
                    /claims/<key>/<generation>.json       see claims.py
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

from compilecache.artifact import FileEntry, PackInfo, Record, file_and_directory, is_key
from compilecache.budget import Budget
from compilecache.errors import (
    ChecksumMismatch,
    CompileCacheError,
    StoreUnavailable,
    UnsafePath,
)
from compilecache.pack import broken_packs, sha256_of, unpack
from compilecache.reader import Reader
from compilecache.storage import Option, Storage, open_storage

VERSION = "v1"
BUDGET_SECONDS = 120.0
RECORD_BYTES = 64 << 20
"""No record or fingerprint is larger; what is larger is not read."""
READ_BACK_BYTES = 64 << 20
"""Packs up to here are read back whole after an upload; of larger ones the size is compared."""
SPARE_BYTES = 4 << 30
"""A pack may hold so many bytes of files that are not wanted before it is refused."""
GENERATIONS_TRIED = 64

_SHA256 = re.compile(r"[0-9a-f]{64}")
_DIGEST = re.compile(r"[0-9a-f]{8,128}")
_GENERATION = re.compile(r"([1-9][0-9]{0,9})\.json")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoreEntry:
    """One published target, as ``ls`` shows it."""

    key: str
    """The target's key."""
    generation: int
    """Which of its records is in force."""
    created: str
    """UTC, ISO."""
    files: int
    """How many files it needs."""
    file_bytes: int
    """What they weigh restored."""
    pack_bytes: int
    """What its own pack weighs; 0 when other packs hold its files."""


@dataclass(frozen=True, slots=True)
class StoreView:
    """What a store holds for one fingerprint, at one moment."""

    records: Mapping[str, Record]
    """By key: the readable record of the highest generation."""
    faults: tuple[str, ...]
    """Records that could not be read, and why; an older generation stands in where there is one."""

    @property
    def entries(self) -> tuple[StoreEntry, ...]:
        """One line for each record, by key."""
        return tuple(_entry(record) for _, record in sorted(self.records.items()))


def _entry(record: Record) -> StoreEntry:
    return StoreEntry(
        key=record.key,
        generation=record.generation,
        created=record.created,
        files=len(record.files),
        file_bytes=sum(entry.size for entry in record.files),
        pack_bytes=record.pack.size if record.pack else 0,
    )


class ArtifactStore:
    """One store. Safe to use from several threads and after a fork.

    Every method raises StoreUnavailable when the store does not answer, refuses, or has used up its
    budget; what is not there is None or empty.
    """

    def __init__(self, storage: Storage, budget: Budget) -> None:
        self._storage = storage
        self._budget = budget

    @classmethod
    def open(
        cls,
        url: str | Path | None = None,
        *,
        budget_seconds: float = BUDGET_SECONDS,
        storage_options: Mapping[str, Option] | None = None,
    ) -> Self:
        """The store at a directory, ``file://``, ``memory://`` or ``s3://`` address; touches nothing yet.

        ``None``: ``COMPILECACHE_STORE``, else ``~/.cache/compilecache/store``. ``budget_seconds``:
        what its failures may cost in all. ``storage_options``: keyword arguments of s3fs
        (``endpoint_url``, ``key``, ``secret``, ``config_kwargs``, …); the environment's
        ``AWS_ENDPOINT_URL`` and credentials count as usual.
        """
        storage = open_storage(url, patience=budget_seconds, options=storage_options)
        return cls(storage, Budget(storage.url, budget_seconds))

    @property
    def url(self) -> str:
        """The address, normalised, without secrets."""
        return self._storage.url

    # -- fingerprints -------------------------------------------------------------------------

    def put_fingerprint(self, digest: str, text: str) -> None:
        """Publishes what a digest stands for, for ``explain``; the first text stays."""
        name = f"{_folder(digest)}/fingerprint.json"
        if self._call("fingerprint lookup", lambda: self._storage.size(name)) is None:
            self._call("fingerprint", lambda: self._storage.create(name, text.encode()))

    def get_fingerprint(self, digest: str) -> str | None:
        """The text of a fingerprint, unchecked."""
        data = self._read(f"{_folder(digest)}/fingerprint.json")
        return None if data is None else data.decode(errors="replace")

    def fingerprints(self) -> list[str]:
        """Digests of every fingerprint that something was published for."""
        found = self._call("listing fingerprints", lambda: self._storage.folders(VERSION))
        return sorted(name for name in found if _DIGEST.fullmatch(name))

    # -- small objects of a fingerprint -------------------------------------------------------

    def create(self, fingerprint: str, name: str, data: bytes) -> bool:
        """Writes a small object unless one of that name is there: then False.

        Also False when it is ours and only the answer was lost: read it back.
        """
        path = f"{_folder(fingerprint)}/{name}"
        return self._call(f"writing '{name}'", lambda: self._storage.create(path, data))

    def read_small(self, fingerprint: str, name: str) -> bytes | None:
        """A small object, unchecked; None when there is none."""
        return self._read(f"{_folder(fingerprint)}/{name}")

    # -- publishing ---------------------------------------------------------------------------

    def publish(self, record: Record, pack: Path | None) -> Record:
        """Adds the pack, then the record, at its generation or the next free one above.

        Returns the record that is in the store now: this one, or somebody else's of the same content.
        A pack that is there is checked and not sent again; a damaged one is replaced by the good one.
        Raises ChecksumMismatch when ``pack`` is not what the record says.
        """
        if record.pack is not None:
            if pack is None:
                raise ValueError("a record with a pack needs the file of that pack")
            self._send(record.fingerprint, record.pack, pack)
        return self._add(record)

    def _send(self, fingerprint: str, info: PackInfo, pack: Path) -> None:
        if not _is_pack(pack, info):
            raise ChecksumMismatch(
                f"'{pack}' is not the pack {info.sha256[:12]} of its record",
                next_step="Pack the target again",
                faults=(f"pack {info.sha256}",),
            )
        name = _pack_name(fingerprint, info.sha256)
        what = f"pack {info.sha256[:12]}"
        size = self._call(what, lambda: self._storage.size(name))
        if size is not None and self._holds(name, info, whole=True):
            return
        self._call(what, lambda: self._storage.upload(name, pack, replace=size is not None))
        if not self._holds(name, info, whole=info.size <= READ_BACK_BYTES):
            raise StoreUnavailable(
                f"store '{self.url}' does not give back the bytes of {what} that were sent",
                next_step="Check the store for a proxy or a full disk, or name another one",
            )

    def _holds(self, name: str, info: PackInfo, *, whole: bool) -> bool:
        try:
            with self._reader(name) as reader:
                right_size = reader.size == info.size
                return right_size and (not whole or sha256_of(reader) == info.sha256)
        except _AbsentError:
            return False

    def _add(self, record: Record) -> Record:
        for generation in range(record.generation, record.generation + GENERATIONS_TRIED):
            candidate = record.model_copy(update={"generation": generation})
            stored = self._settle(candidate)
            if stored is not None:
                return stored
        raise StoreUnavailable(
            f"store '{self.url}' does not keep the record of {record.key}: {GENERATIONS_TRIED} "
            f"generations from {record.generation} on read back as something else",
            next_step="Check that the address is a store and not some other server",
        )

    def _settle(self, record: Record) -> Record | None:
        """What is stored at this generation when its content is the record's; None otherwise."""
        name = _record_name(record)
        data = self._read(name)
        if data is None:
            written = record.dump()
            self._call(f"record {record.key}", lambda: self._storage.create(name, written))
            # s3fs#973: some stores ignore "only if absent"; what counts is what can be read back.
            data = self._read(name)
        try:
            stored = Record.parse(data or b"")
        except (ChecksumMismatch, UnsafePath):
            return None
        return stored if stored.same_content(record) else None

    # -- reading ------------------------------------------------------------------------------

    def latest(self, fingerprint: str, keys: Collection[str] | None = None) -> StoreView:
        """The record in force of each of these targets; of all, when ``keys`` is None.

        With ``keys`` the cost depends on their number only, not on what else is published.
        """
        faults: list[str] = []
        generations = self._generations(fingerprint, keys)
        read = self._each(
            sorted(generations),
            lambda key: self._newest(fingerprint, key, generations[key], faults),
        )
        return StoreView({r.key: r for r in read if r is not None}, tuple(sorted(faults)))

    def keys(self, fingerprint: str) -> frozenset[str]:
        """Keys of everything published for a fingerprint, from one listing."""
        return frozenset(self._generations(fingerprint, None))

    def entries(self, fingerprint: str) -> tuple[StoreEntry, ...]:
        """What ``ls`` shows: a line for each published target."""
        return self.latest(fingerprint).entries

    def _generations(self, fingerprint: str, keys: Collection[str] | None) -> dict[str, list[int]]:
        """By key: the generations there are, highest first."""
        folder = f"{_folder(fingerprint)}/artifacts"
        found: dict[str, list[int]] = {}
        for names in self._listings(folder, keys):
            for name in names:
                key, _, file = name.partition("/")
                if is_key(key) and (match := _GENERATION.fullmatch(file)):
                    found.setdefault(key, []).append(int(match[1]))
        return {key: sorted(numbers, reverse=True) for key, numbers in found.items()}

    def _listings(self, folder: str, keys: Collection[str] | None) -> Iterable[Iterable[str]]:
        if keys is None:
            return [self._call("listing records", lambda: self._storage.walk(folder))]

        def listing(key: str) -> list[str]:
            names = self._call("listing records", lambda: self._storage.walk(f"{folder}/{key}"))
            return [f"{key}/{name}" for name in names]

        return self._each(sorted(filter(is_key, set(keys))), listing)

    def _newest(
        self, fingerprint: str, key: str, generations: list[int], faults: list[str]
    ) -> Record | None:
        for generation in generations:
            data = self._read(f"{_folder(fingerprint)}/artifacts/{key}/{generation}.json")
            if data is None:
                continue
            try:
                record = Record.parse(data)
            except (ChecksumMismatch, UnsafePath) as error:
                faults.append(f"{key}, generation {generation}: {error.problem}")
                continue
            if (record.fingerprint, record.key, record.generation) == (
                fingerprint,
                key,
                generation,
            ):
                return record
            faults.append(f"{key}, generation {generation}: the record names another place")
        return None

    @contextmanager
    def open_pack(self, fingerprint: str, sha256: str) -> Iterator[Reader]:
        """A pack to read once from the front; a read that fails is tried again at its place.

        Raises ChecksumMismatch when the store does not have it.
        """
        try:
            with self._reader(_pack_name(fingerprint, sha256)) as reader:
                yield reader
        except _AbsentError:
            raise broken_packs([f"pack {sha256[:12]}: missing"]) from None

    # -- calls --------------------------------------------------------------------------------

    @property
    def workers(self) -> int:
        """How many transfers at a time help."""
        return self._storage.workers

    def _each(self, items: list[str], act: Callable[[str], T]) -> list[T]:
        if self._storage.workers == 1 or len(items) < 2:
            return [act(item) for item in items]
        with ThreadPoolExecutor(self._storage.workers) as pool:
            return list(pool.map(act, items))

    @contextmanager
    def _reader(self, name: str) -> Iterator[Reader]:
        try:
            reader = Reader(self._storage, name, self._budget)
        except FileNotFoundError:
            raise _AbsentError from None
        with reader:
            yield reader

    def _read(self, name: str) -> bytes | None:
        try:
            return self._call(f"reading '{name}'", lambda: self._storage.read(name, RECORD_BYTES))
        except FileNotFoundError:
            return None

    def _call(self, what: str, act: Callable[[], T]) -> T:
        return self._budget.call(what, act)


class _AbsentError(Exception):
    """The pack is not in the store."""


def fetch_packs(
    store: ArtifactStore,
    fingerprint: str,
    entries: Iterable[FileEntry],
    dest: Path,
    *,
    workers: int | None = None,
) -> None:
    """Brings these files, and no others, from their packs into ``dest``, every digest checked.

    Packs come in parallel. All are tried, then one error is raised: StoreUnavailable, UnsafePath, or
    ChecksumMismatch with every fault found (also when two entries cannot lie in one directory).
    Raises OSError when ``dest`` cannot be written. After an error ``dest`` is incomplete: discard it.
    """
    packs = _by_pack(entries)

    def fetch(sha256: str) -> CompileCacheError | None:
        try:
            with store.open_pack(fingerprint, sha256) as stream:
                unpack(stream, sha256, packs[sha256], dest, spare_bytes=SPARE_BYTES)
        except CompileCacheError as error:
            return error
        return None

    largest_first = sorted(
        packs, key=lambda p: sum(e.size for e in packs[p].values()), reverse=True
    )
    with ThreadPoolExecutor(workers or store.workers) as pool:
        errors = [error for error in pool.map(fetch, largest_first) if error is not None]
    for error in errors:
        if not isinstance(error, ChecksumMismatch):
            raise error
    if errors:
        raise broken_packs(f for e in errors if isinstance(e, ChecksumMismatch) for f in e.faults)


def _by_pack(entries: Iterable[FileEntry]) -> dict[str, dict[str, FileEntry]]:
    chosen: dict[str, FileEntry] = {}
    faults = []
    for entry in entries:
        known = chosen.setdefault(entry.path, entry)
        if (known.size, known.xxh3_128) != (entry.size, entry.xxh3_128):
            faults.append(
                f"{entry.path}: differs between pack {known.pack[:12]} and {entry.pack[:12]}"
            )
    if clash := file_and_directory(chosen):
        faults.append(f"{clash}: both a file and a directory")
    if faults:
        raise broken_packs(faults)
    packs: dict[str, dict[str, FileEntry]] = {}
    for entry in chosen.values():
        packs.setdefault(entry.pack, {})[entry.path] = entry
    return packs


def _folder(fingerprint: str) -> str:
    if not _DIGEST.fullmatch(fingerprint):
        raise ValueError(f"{fingerprint[:80]!r} is no digest of a fingerprint")
    return f"{VERSION}/{fingerprint}"


def _pack_name(fingerprint: str, sha256: str) -> str:
    if not _SHA256.fullmatch(sha256):
        raise ValueError(f"{sha256[:80]!r} is no sha256")
    return f"{_folder(fingerprint)}/packs/{sha256}.tar.zst"


def _is_pack(path: Path, info: PackInfo) -> bool:
    with path.open("rb", buffering=0) as file:
        return sha256_of(file) == info.sha256 and path.stat().st_size == info.size


def _record_name(record: Record) -> str:
    return f"{_folder(record.fingerprint)}/artifacts/{record.key}/{record.generation}.json"
