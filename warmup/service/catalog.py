"""What the store holds, by fingerprint: looked at now and then, by one thread at a time, for all who ask."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from pydantic import BaseModel, ConfigDict

from compilecache.errors import CompileCacheError, PlanError
from compilecache.fingerprint import Fingerprint
from compilecache.holdings import Holding, place_of
from compilecache.records import VERSION
from compilecache.store import ArtifactStore
from warmup.service.problems import Refusal

FRESH_SECONDS = 10.0
"""How old an answer may be."""
MOST_FINGERPRINTS = 200
PATIENCE_SECONDS = 5.0
"""How long somebody waits for the first answer that another has asked for."""
LABELS = ("torch", "gpu", "device", "workload")

T = TypeVar("T")


class StoredFingerprint(BaseModel):
    """What is published for one fingerprint."""

    model_config = ConfigDict(frozen=True)

    digest: str
    targets: int
    """How many have an artifact."""
    bytes: int
    """What all of its objects weigh."""
    newest: float
    """When the youngest artifact was written, seconds since the epoch."""
    what: dict[str, str]
    """Components that tell fingerprints apart: torch, gpu, device, workload."""


class StoreContents(BaseModel):
    """What the store holds."""

    model_config = ConfigDict(frozen=True)

    store: str | None
    """Its address; None without a store."""
    fingerprints: tuple[StoredFingerprint, ...]
    """The youngest first."""
    left_out: int
    """How many more there are."""
    looked: float
    """When it was looked at, seconds since the epoch."""


class StoredArtifact(BaseModel):
    """One published target."""

    model_config = ConfigDict(frozen=True, from_attributes=True)

    key: str
    generation: int
    created: str
    """UTC, ISO."""
    files: int
    file_bytes: int
    pack_bytes: int


class FingerprintContents(BaseModel):
    """What is published for one fingerprint, target by target."""

    model_config = ConfigDict(frozen=True)

    digest: str
    components: dict[str, str]
    """Everything it is made of; empty for one that cannot be read."""
    artifacts: tuple[StoredArtifact, ...]
    faults: tuple[str, ...]
    """Records that could not be read, or that no trusted key signed, and why."""
    looked: float


class Catalog:
    """Asks the store. Safe to use from threads; every method raises Refusal when it does not answer."""

    def __init__(self, open_store: Callable[[], ArtifactStore | None]) -> None:
        self._open = open_store
        self._contents = _Kept[StoreContents]()
        self._details = _Kept[FingerprintContents]()
        self._marks: dict[str, dict[str, str]] = {}

    def contents(self) -> StoreContents:
        """All fingerprints, at most 200."""
        return self._contents.get("", self._look)

    def fingerprint(self, digest: str) -> FingerprintContents:
        """The artifacts of one. Raises Refusal when the store has none of that name."""
        if digest not in {known.digest for known in self.contents().fingerprints}:
            raise Refusal(
                404,
                f"the store has no fingerprint '{digest}'",
                next_step="List them: GET /v1/fingerprints",
            )
        return self._details.get(digest, lambda: self._detail(digest))

    def _look(self) -> StoreContents:
        now = time.time()
        with _answering():
            store = self._open()
            if store is None:
                return StoreContents(store=None, fingerprints=(), left_out=0, looked=now)
            digests = store.fingerprints()
            found = [self._summary(store, digest) for digest in digests[:MOST_FINGERPRINTS]]
        return StoreContents(
            store=store.url,
            fingerprints=tuple(sorted(found, key=lambda one: -one.newest)),
            left_out=max(0, len(digests) - MOST_FINGERPRINTS),
            looked=now,
        )

    def _summary(self, store: ArtifactStore, digest: str) -> StoredFingerprint:
        folder = f"{VERSION}/{digest}"
        objects = store.call("listing", lambda: store.storage.survey(folder))
        holding = Holding(digest, objects, {}, {}, frozenset())
        places = [(place, objects[name]) for name in objects if (place := place_of(name))]
        newest = max((stored.modified for _, stored in places), default=holding.youngest_record)
        parts = self._parts(store, digest)
        return StoredFingerprint(
            digest=digest,
            targets=len({place.key for place, _ in places}),
            bytes=holding.bytes,
            newest=newest,
            what={label: parts[label] for label in LABELS if label in parts},
        )

    def _detail(self, digest: str) -> FingerprintContents:
        with _answering():
            store = self._open()
            assert store is not None, "contents() named one of its fingerprints"
            view = store.latest(digest)
            parts = self._parts(store, digest)
        return FingerprintContents(
            digest=digest,
            components=parts,
            artifacts=tuple(StoredArtifact.model_validate(entry) for entry in view.entries),
            faults=(*view.faults, *view.untrusted),
            looked=time.time(),
        )

    def _parts(self, store: ArtifactStore, digest: str) -> dict[str, str]:
        """Its components, which never change; read again while they are not there yet."""
        known = self._marks.get(digest) or _components(store.get_fingerprint(digest))
        if len(self._marks) >= MOST_FINGERPRINTS:
            self._marks.clear()
        self._marks[digest] = known
        return known


def _components(text: str | None) -> dict[str, str]:
    try:
        return dict(Fingerprint.parse(text or "").components)
    except PlanError:
        return {}


@contextmanager
def _answering() -> Iterator[None]:
    """Turns trouble with the store into what the API answers."""
    try:
        yield
    except CompileCacheError as error:
        raise Refusal(503, error.problem, next_step=error.next_step) from error


class _Kept(Generic[T]):
    """Answers that are good for a while, refusals too; of several who ask at once one looks."""

    def __init__(self, *, fresh: float = FRESH_SECONDS, most: int = 64) -> None:
        self._fresh = fresh
        self._most = most
        self._kept: OrderedDict[str, tuple[float, T | Refusal]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, name: str, look: Callable[[], T]) -> T:
        """What is kept, or what ``look`` says now; what was kept, while somebody else looks."""
        kept = self._kept.get(name)
        if kept is None or time.monotonic() >= kept[0]:
            if self._lock.acquire(timeout=PATIENCE_SECONDS if kept is None else 0):
                try:
                    kept = self._look(name, look)
                finally:
                    self._lock.release()
            elif kept is None:
                raise Refusal(503, "the store is still being asked", next_step="Try again soon")
        if isinstance(kept[1], Refusal):
            raise kept[1]
        return kept[1]

    def _look(self, name: str, look: Callable[[], T]) -> tuple[float, T | Refusal]:
        kept = self._kept.get(name)
        if kept is not None and time.monotonic() < kept[0]:
            return kept
        found: T | Refusal
        try:
            found = look()
        except Refusal as refusal:
            found = refusal
        kept = (time.monotonic() + self._fresh, found)
        self._kept[name] = kept
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)
        return kept
