"""What goes between an extra cache root and a store: restored before, published after, only ever more."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from compilecache.artifact import MOST_FILES, FileEntry, PackInfo, Record, hash_files
from compilecache.errors import CompileCacheError, LockTimeout, StoreUnavailable, UnsafePath
from compilecache.exchange import Exchange, Restored
from compilecache.extras import ExtraRoot
from compilecache.fingerprint import Fingerprint
from compilecache.pack import write_pack
from compilecache.packages import described
from compilecache.progress import Teller
from compilecache.report import ExtraReport
from compilecache.store import ArtifactStore

PUBLISHED_AGAIN = 8
"""So often a publisher adds what others published meanwhile."""

Surviving = Callable[[str], AbstractContextManager[None]]
"""A block in which trouble with what is named ends nothing, or, where somebody is strict, raises."""


@dataclass(frozen=True, slots=True)
class Sent:
    """What an extra root holds now, and what of it was new to the store."""

    files: int
    published: int
    """Files that the store did not have."""


class ExtraRoots:
    """The extra roots of one warm-up."""

    def __init__(
        self,
        extras: Sequence[ExtraRoot],
        store: ArtifactStore | None,
        mark: Fingerprint,
        lock_timeout: float,
    ) -> None:
        self._extras, self._store, self._mark = extras, store, mark
        self._lock_timeout = lock_timeout
        self._restored: dict[str, int] = {}
        self._sent: dict[str, Sent] = {}

    def restore(self, surviving: Surviving, tell: Teller) -> None:
        """Brings them, and makes this process read them there. Trouble goes to ``surviving``."""
        for extra in self._extras:
            if late := extra.use():
                tell(late)
            with surviving(f"restoring extra root {extra.name}"), _not_for_all():
                done = self._exchange(extra, tell).restore()
                self._restored[extra.name] = done.files
                for fault in done.faults:
                    raise fault

    def publish(self, surviving: Surviving, tell: Teller) -> None:
        """Sends what is new in them."""
        for extra in self._extras:
            with surviving(f"publishing extra root {extra.name}"), _not_for_all():
                self._sent[extra.name] = self._exchange(extra, tell).publish()

    def _exchange(self, extra: ExtraRoot, tell: Teller) -> ExtraExchange:
        return ExtraExchange(extra, self._store, self._mark, tell, self._lock_timeout)

    def report(self) -> tuple[ExtraReport, ...]:
        """What became of each."""
        nothing = Sent(0, 0)
        return tuple(
            ExtraReport(
                name=extra.name,
                root=str(extra.cache.root),
                files=self._sent.get(extra.name, nothing).files,
                restored=self._restored.get(extra.name, 0),
                published=self._sent.get(extra.name, nothing).published,
            )
            for extra in self._extras
        )


@contextmanager
def _not_for_all() -> Iterator[None]:
    """The lock of an extra root that is never freed is trouble with that root alone."""
    try:
        yield
    except LockTimeout as error:
        raise CompileCacheError(error.problem, next_step=error.next_step) from error


class ExtraExchange:
    """One extra root and a store (or none), under one fingerprint."""

    def __init__(
        self,
        extra: ExtraRoot,
        store: ArtifactStore | None,
        mark: Fingerprint,
        tell: Teller,
        lock_timeout: float = 3600.0,
    ) -> None:
        self._extra, self._store, self._mark = extra, store, mark
        self._tell, self._lock_timeout = tell, lock_timeout
        self._cache = extra.cache

    def restore(self) -> Restored:
        """Brings what the store has into the root. What is there with other content stays.

        Raises UnsafePath and UntrustedArtifact for a root that cannot be used, LockTimeout,
        StoreUnavailable.
        """
        self._cache.prepare()
        exchange = self._exchange()
        with self._lock("restoring"):
            for trouble in exchange.look(repair=True):
                self._tell(f"{trouble}; moved aside")
            done = Restored()
            if self._store is not None and exchange.missing:
                done = exchange.restore()
            for record in exchange.complete.values():
                self._extra.settle(record)
        return done

    def publish(self) -> Sent:
        """Adds to the store what the root holds and the store does not. Raises as ``restore``."""
        files, links = self._extra.files()
        for link in links:
            self._tell(f"'{self._cache.root / link}' is a link and was left out")
        known = self._cache.records(self._mark.digest).get(self._extra.key)
        waits = self._cache.unpublished(self._mark.digest)
        listed = {entry.path for entry in known.files} if known and not waits else set()
        if self._store is None or listed.issuperset(files):
            return Sent(len(files), 0)
        if len(files) > MOST_FILES:
            raise UnsafePath(
                f"extra cache root '{self._cache.root}' holds {len(files)} files, above the limit of "
                f"{MOST_FILES}",
                next_step=f"Give '{self._extra.name}' a folder for this workload alone",
                path=self._cache.root,
            )
        with self._lock("publishing"):
            return Sent(len(files), self._add(self._store, files))

    def _lock(self, doing: str) -> AbstractContextManager[None]:
        return self._cache.lock(
            f"{doing} {self._extra.name}",
            timeout=self._lock_timeout,
            waiting=lambda holder: self._tell(f"waiting for {holder}"),
        )

    def _exchange(self) -> Exchange:
        return Exchange(self._cache, self._store, self._mark, [self._extra.key])

    # -- adding -------------------------------------------------------------------------------

    def _add(self, store: ArtifactStore, files: list[str]) -> int:
        """How many of these files the store did not have."""
        key = self._extra.key
        before = store.latest(self._mark.digest, [key]).records.get(key)
        union = {entry.path: entry for entry in before.files} if before else {}
        new = self._new(union, files)
        if not new and before is not None:
            self._keep(before)
            return 0
        store.put_fingerprint(self._mark.digest, described(self._mark))
        generation = before.generation + 1 if before else 1
        with self._cache.staging() as folder:
            pack = write_pack(self._cache.root, new, folder / "pack")
            union |= {
                path: FileEntry(path, *known, pack.sha256)
                for path, known in hash_files(self._cache.root, new).items()
            }
            stored = store.publish(self._record(generation, union, pack), folder / "pack")
        store.put_fingerprint(self._mark.digest, described(self._mark))
        self._keep(self._with_others(store, generation, stored))
        return len(new)

    def _new(self, union: dict[str, FileEntry], files: Iterable[str]) -> list[str]:
        """Files that the store lacks, and those that the compiler wrote anew for more of them."""
        lacking = [path for path in files if path not in union]
        whole = all((self._cache.root / path).is_file() for path in union)
        changing = [path for path in union if whole and self._cache.may_change(path)]
        now = hash_files(self._cache.root, changing) if lacking else {}
        return lacking + [p for p, k in now.items() if k != (union[p].size, union[p].xxh3_128)]

    def _record(
        self, generation: int, entries: dict[str, FileEntry], pack: PackInfo | None
    ) -> Record:
        return Record(
            fingerprint=self._mark.digest,
            key=self._extra.key,
            target=None,
            generation=generation,
            files=tuple(entry for _, entry in sorted(entries.items())),
            pack=pack,
        )

    def _with_others(self, store: ArtifactStore, expected: int, stored: Record) -> Record:
        """The record in force, once it has also what others published in between."""
        for _ in range(PUBLISHED_AGAIN):
            union = {entry.path: entry for entry in stored.files}
            count = len(union)
            for generation in range(expected, stored.generation):
                other = self._other(store, generation)
                for entry in other.files if other else ():
                    union.setdefault(entry.path, entry)
            if len(union) == count:
                break
            expected = stored.generation + 1
            stored = store.publish(self._record(expected, union, None), None)
        return stored

    def _other(self, store: ArtifactStore, generation: int) -> Record | None:
        try:
            found = store.exact(self._mark.digest, self._extra.key, generation)
        except StoreUnavailable:
            raise
        except CompileCacheError:
            return None
        return found.record if found else None

    def _keep(self, record: Record) -> None:
        """Notes the record as complete here, if it is: what others added comes with a restore."""
        if not self._cache.damaged(record.files) and self._has_all(record):
            self._cache.keep_record(record, published=True)

    def _has_all(self, record: Record) -> bool:
        return all(Path(self._cache.root, entry.path).is_file() for entry in record.files)
