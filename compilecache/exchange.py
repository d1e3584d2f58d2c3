"""What goes between a cache root and a store, for one fingerprint: look, restore, publish."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from compilecache.agreement import agreeing, interchangeable, same
from compilecache.artifact import ADOPTED, FileEntry, Record, hash_files
from compilecache.cachedir import CacheDir
from compilecache.contents import LIBRARY
from compilecache.engines.programfile import program_among, read_header
from compilecache.errors import ChecksumMismatch, CompileCacheError, StoreUnavailable
from compilecache.evidence import Evidence
from compilecache.fetch import fetch_packs
from compilecache.fingerprint import Fingerprint
from compilecache.pack import write_pack
from compilecache.packages import described
from compilecache.records import StoreView
from compilecache.shapes import CompileTarget
from compilecache.store import ArtifactStore
from compilecache.vouching import refusal


@dataclass
class Restored:
    """What a restore brought, and what it could not."""

    keys: list[str] = field(default_factory=list)
    """Targets whose every file is now in the root, checked."""
    files: int = 0
    bytes: int = 0
    """Size of the files that were not there before."""
    seconds: float = 0.0
    faults: list[CompileCacheError] = field(default_factory=list)
    """One for every record that was passed over."""

    def add(self, more: Restored) -> None:
        """Counts a later restore in."""
        self.keys += more.keys
        self.files += more.files
        self.bytes += more.bytes
        self.seconds += more.seconds
        self.faults += more.faults


MOST_GPUS = 16
"""Of one host: how many indices are looked at for a program that can be rewritten."""


def siblings(targets: Iterable[CompileTarget]) -> dict[str, str]:
    """Keys of the same specs on other GPU indices → the key of the target they could stand in for."""
    own = {target.key: target for target in targets if target.device.startswith("cuda:")}
    return {
        other: key
        for key, target in own.items()
        for index in range(MOST_GPUS)
        if (other := replace(target, device=f"cuda:{index}").key) not in own
    }


def program_of(record: Record) -> str | None:
    """The program among its files; None for a target that goes by trace."""
    return program_among([entry.path for entry in record.files])


def _passed_over(view: StoreView) -> list[CompileCacheError]:
    """An error for each record that was not believed or could not be read."""
    damaged = [
        ChecksumMismatch(fault, next_step="The older record is used", faults=(fault,))
        for fault in view.faults
    ]
    return [*map(refusal, view.untrusted), *damaged]


class Exchange:
    """One root, one store (or none), one fingerprint, and the keys of the targets in question.

    ``elsewhere``: keys of records that can stand in for one of these targets → that target's key.
    ``exactly``: these very records of the store, instead of those in force.
    """

    def __init__(
        self,
        cache: CacheDir,
        store: ArtifactStore | None,
        mark: Fingerprint,
        keys: Collection[str],
        elsewhere: Mapping[str, str] | None = None,
        *,
        exactly: StoreView | None = None,
    ) -> None:
        self.cache = cache
        self.store = store
        self.mark = mark
        self.keys = frozenset(keys)
        self._elsewhere = dict(elsewhere or {})
        self.complete: dict[str, Record] = {}
        """Records whose files are all in the root, byte for byte."""
        self._libraries: dict[str, FileEntry] = {}
        """Native libraries that they list."""
        self._exactly = exactly
        self._view = exactly
        self._held: dict[str, FileEntry] = {}

    @property
    def missing(self) -> frozenset[str]:
        """Targets that are not complete in the root."""
        return self.keys - self.complete.keys()

    def look(self, *, repair: bool = False) -> list[str]:
        """Finds out what is complete in the root. Returns what is damaged, in words.

        ``repair`` (under the lock only): damaged files are moved aside to make room for whole ones.
        """
        troubles = []
        for key, record in self.cache.records(self.mark.digest).items():
            if key not in self.missing and key not in self._lacking():
                continue
            wanted = self._exactly.records.get(key) if self._exactly else None
            if wanted is not None and not interchangeable(record, wanted):
                continue
            if not self.cache.touch_record(record):
                continue
            faults = self.cache.damaged(record.files)
            if not faults:
                self._complete(record)
                continue
            troubles.append(f"{key} is damaged in the cache root: {'; '.join(faults[:3])}")
            if repair:
                self.cache.quarantine(record.files)
        return troubles

    def _lacking(self) -> frozenset[str]:
        """Records that could stand in for targets which nothing stands in for yet."""
        helped = {self._elsewhere.get(key) for key in self.complete}
        wanted = self.missing - helped
        return frozenset(key for key, own in self._elsewhere.items() if own in wanted)

    def stand_in(self, target: CompileTarget) -> Record | None:
        """A complete record of the same spec's program on another device of the kind."""
        kind = target.device.partition(":")[0]
        for record in self.complete.values():
            other = record.target
            if other is None or other.spec != target.spec or other.device == target.device:
                continue
            if other.device.partition(":")[0] == kind and program_of(record) is not None:
                return record
        return None

    def view(self) -> StoreView:
        """What the store holds for this fingerprint; asked once. Raises StoreUnavailable."""
        if self._view is None:
            if self.store is None:
                return StoreView(records={}, faults=())
            self._view = self.store.latest(self.mark.digest, self.keys)
            self._hold(self._view.records.values())
        return self._view

    def refresh(self, keys: Collection[str]) -> dict[str, int]:
        """Asks the store again what it has of these; the generation of each that is published.

        Raises StoreUnavailable.
        """
        if self.store is None:
            return {}
        known, now = self.view(), self.store.latest(self.mark.digest, keys)
        self._view = StoreView({**known.records, **now.records}, known.faults)
        for record in now.records.values():
            for entry in record.files:
                self._held.setdefault(entry.path, entry)
        return {key: record.generation for key, record in now.records.items()}

    def unusable(self) -> dict[str, int]:
        """Targets that are published and could not be restored, with their generations."""
        records = self.view().records
        return {key: records[key].generation for key in self.missing & records.keys()}

    def published_keys(self) -> frozenset[str]:
        """What the store holds for this fingerprint now, from one listing. Raises StoreUnavailable."""
        return self.store.keys(self.mark.digest) if self.store is not None else frozenset()

    def published(self, key: str) -> bool:
        """Whether a target is complete here and the store has it."""
        return key in self.complete and key not in self.cache.unpublished(self.mark.digest)

    def _hold(self, records: Iterable[Record]) -> None:
        for record in records:
            self._held.update({entry.path: entry for entry in record.files})

    # -- store to root ------------------------------------------------------------------------

    def restore(self) -> Restored:
        """Brings what the store has of the missing targets into the root; under the lock.

        A record that is damaged or in conflict is passed over, listed in ``faults``, and leaves
        nothing behind. Raises StoreUnavailable.
        """
        began = time.perf_counter()
        done = Restored()
        view = self.view()
        done.faults.extend(_passed_over(view))
        wanted = [record for key, record in view.records.items() if key in self.missing]
        self._bring_all(wanted, done)
        if self.store is not None and (lacking := self._lacking()):
            published = sorted(lacking & self.store.keys(self.mark.digest), reverse=True)
            first = {self._elsewhere[key]: key for key in published}  # one for each target
            others = self.store.latest(self.mark.digest, set(first.values()))
            done.faults.extend(_passed_over(others))
            self._hold(others.records.values())
            self._bring_all(list(others.records.values()), done)
        done.seconds = time.perf_counter() - began
        return done

    def restore_from(self, store: ArtifactStore) -> Restored:
        """The same from another store; what it has counts as published. Raises StoreUnavailable."""
        other = Exchange(self.cache, store, self.mark, self.keys, self._elsewhere)
        other.complete, other._libraries = self.complete, self._libraries
        return other.restore()

    def restore_again(self, keys: Collection[str]) -> Restored:
        """The same for what a ``refresh`` found of these targets."""
        began = time.perf_counter()
        done, records = Restored(), self.view().records
        wanted = self.missing.intersection(keys)
        self._bring_all([records[key] for key in sorted(wanted) if key in records], done)
        done.seconds = time.perf_counter() - began
        return done

    def restore_settled(self) -> Restored:
        """Brings what the store has in place of programs that nobody has run on their GPU.

        An image holds them as they were compiled; who has met the GPU since has published what came of it.
        Raises StoreUnavailable.
        """
        if self.store is None:
            return Restored()
        here = {key: self.complete[key] for key in self.keys & self.complete.keys()}
        unmet = {key: record for key, record in here.items() if self._is_unmet(record)}
        if not unmet:
            return Restored()
        later = {key for key, record in self.view().records.items() if key in unmet
                 and program_of(record) != program_of(unmet[key])}  # fmt: skip
        for key in later:
            del self.complete[key]
        done = self.restore_again(later)
        for key in later:
            self.complete.setdefault(key, unmet[key])
        return done

    def _is_unmet(self, record: Record) -> bool:
        """Whether its program says that it was compiled without its GPU, and not yet run."""
        program = program_of(record)
        if program is None:
            return False
        try:
            return read_header(self.cache.root / program).profile is not None
        except (ChecksumMismatch, OSError):
            return False

    def adopt(self, environment: Fingerprint) -> int:
        """Restores a directory that somebody saved as it was; returns how many files it had.

        It may hold what is missing: torch's own keys will tell. Raises StoreUnavailable, or
        ChecksumMismatch when it is damaged or in conflict with the root.
        """
        adopted = Exchange(self.cache, self.store, environment, [ADOPTED])
        adopted.look()
        for fault in adopted.restore().faults:
            raise fault
        return sum(len(record.files) for record in adopted.complete.values())

    def _bring_all(self, records: list[Record], done: Restored) -> None:
        while records:
            together, records = agreeing(records)
            self._bring_together(together, done)

    def _bring_together(self, records: list[Record], done: Restored) -> None:
        try:
            self._bring([self._with_own_libraries(record) for record in records], done)
        except StoreUnavailable:
            raise
        except CompileCacheError as error:
            if len(records) == 1:
                done.faults.append(error)
                self._distrust(records[0])
                return
            for record in records:
                self._bring_together([record], done)

    def _with_own_libraries(self, record: Record) -> Record:
        """The record with the libraries that this root has already, made or restored for other targets.

        Two roots build the same library in other bytes; the one that is in use stays.
        """
        files = tuple(self._libraries.get(entry.path, entry) for entry in record.files)
        if all(map(same, files, record.files)):
            return record
        return record.model_copy(update={"files": files, "pack": None})

    def _distrust(self, record: Record) -> None:
        """No new record may lean on packs that this one's trouble came from."""
        packs = {entry.pack for entry in record.files}
        self._held = {path: e for path, e in self._held.items() if e.pack not in packs}

    def _bring(self, records: list[Record], done: Restored) -> None:
        """Fetches, checks and activates records all together, or raises and activates none."""
        assert self.store is not None
        entries = {entry.path: entry for record in records for entry in record.files}
        there = {path for path in entries if os.path.isfile(f"{self.cache.root}/{path}")}  # noqa: PTH113
        present = [entry for path, entry in entries.items() if path in there]
        absent = [entry for path, entry in entries.items() if path not in there]
        self.cache.refuse_conflicts(present)
        self.cache.refuse_more(sum(entry.size for entry in absent))
        with self.cache.arrivals() as staged:
            with self.cache.explaining():
                vouched = self.store.trusts or self._exactly is not None
                fetch_packs(self.store, self.mark.digest, absent, staged, vouched=vouched)
            done.files += self.cache.activate(staged, absent)
        done.bytes += sum(entry.size for entry in absent)
        for record in records:
            self.cache.keep_record(record, published=True)
            self._complete(record)
            done.keys.append(record.key)

    # -- root to store ------------------------------------------------------------------------

    def publish(
        self,
        target: CompileTarget | None,
        files: Collection[str],
        evidence: Evidence | None,
        facts: Mapping[str, str] | None = None,
    ) -> Record:
        """Packs what no other record of the store holds and publishes the target; under the lock.

        ``facts``: about how it came about, for people.

        Without a store the record is kept in the root only. If the store does not take it, it is
        kept as unpublished, and the error is raised.
        """
        with self.cache.staging() as folder:
            try:
                self.view()
            except StoreUnavailable:
                record = self._record(target, files, evidence, facts, folder / "pack")[0]
                self._keep(record, published=False)
                raise
            record, pack = self._record(target, files, evidence, facts, folder / "pack")
            self._keep(record, published=False)
            if self.store is None:
                return record
            self.store.put_fingerprint(self.mark.digest, described(self.mark))
            try:
                stored = self.store.publish(record, pack)
            except ChecksumMismatch:
                # Packs that it leans on were collected since this store was looked at.
                self._held.clear()
                record, pack = self._record(target, files, evidence, facts, folder / "whole")
                self._keep(record, published=False)
                stored = self.store.publish(record, pack)
            self.store.put_fingerprint(self.mark.digest, described(self.mark))
        self._keep(stored, published=True)
        self._hold([stored])
        return stored

    def superseded(self, key: str) -> bool:
        """Whether somebody has published a younger record than the one that is complete here.

        False where the store does not say: whoever publishes meets its trouble.
        """
        here = self.complete.get(key)
        try:
            return here is not None and self.refresh([key]).get(key, 0) > here.generation
        except StoreUnavailable:
            return False

    def keep(
        self,
        target: CompileTarget,
        files: Collection[str],
        evidence: Evidence | None,
        facts: Mapping[str, str] | None = None,
    ) -> Record:
        """Records a target in the root alone; under the lock. The store has another of it that will do."""
        with self.cache.staging() as folder:
            record, _ = self._record(target, files, evidence, facts, folder / "pack")
            self._keep(record, published=False)
        return record

    def publish_complete(self, keys: Collection[str]) -> list[str]:
        """Publishes those of these complete targets that the store lacks. Returns their keys."""
        lacking = [key for key in sorted(keys) if key not in self.view().records]
        for key in lacking:
            record = self.complete[key]
            paths = [entry.path for entry in record.files]
            self.publish(record.target, paths, record.evidence, record.environment)
        return lacking

    def _keep(self, record: Record, *, published: bool) -> None:
        self.cache.keep_record(record, published=published)
        self._complete(record)

    def _complete(self, record: Record) -> None:
        self.complete[record.key] = record
        self._libraries.update({e.path: e for e in record.files if LIBRARY.match(e.path)})

    def _record(
        self,
        target: CompileTarget | None,
        files: Collection[str],
        evidence: Evidence | None,
        facts: Mapping[str, str] | None,
        out: Path,
    ) -> tuple[Record, Path | None]:
        hashed = hash_files(self.cache.root, files)
        new = [path for path, known in hashed.items() if self._holder(path, known) is None]
        with self.cache.explaining():
            pack = write_pack(self.cache.root, new, out) if new else None
        entries = []
        for path, known in hashed.items():
            name = self._holder(path, known) or (pack.sha256 if pack else "")
            entries.append(FileEntry(path=path, size=known[0], xxh3_128=known[1], pack=name))
        key = target.key if target else ADOPTED
        previous = self._view.records.get(key) if self._view else None
        record = Record(
            fingerprint=self.mark.digest,
            key=key,
            target=target,
            generation=previous.generation + 1 if previous else 1,
            files=tuple(entries),
            pack=pack,
            evidence=evidence,
            environment=dict(facts) if facts else None,
        )
        return record, out if pack else None

    def _holder(self, path: str, known: tuple[int, str]) -> str | None:
        """The pack of this store that holds exactly this file already."""
        held = self._held.get(path)
        return held.pack if held and (held.size, held.xxh3_128) == known else None
