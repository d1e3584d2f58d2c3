"""Signatures, and what doctor leaves, when a store is collected and checked."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from aged import YEAR, AgedStorage
from store_samples import FINGERPRINT, sample

from compilecache.artifact import Record
from compilecache.budget import Budget
from compilecache.inspection import Inspection, inspect_store
from compilecache.keeping import DAY
from compilecache.retention import Collection, Collector, Retention
from compilecache.signing import Keys, SignKey, load_sign_key, make_key
from compilecache.storage import LocalStorage
from compilecache.store import ArtifactStore

FOLDER = f"v1/{FINGERPRINT}"


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> SignKey:
    """Who signs."""
    path = tmp_path_factory.mktemp("keys") / "key"
    make_key(path)
    return load_sign_key(path)


@pytest.fixture
def storage(tmp_path: Path) -> AgedStorage:
    """A directory with a clock that a test can push."""
    return AgedStorage(LocalStorage(tmp_path / "store"))


@pytest.fixture
def signing(storage: AgedStorage, key: SignKey) -> ArtifactStore:
    """Who publishes with the key."""
    return ArtifactStore(storage, Budget("", 20), Keys((key.public,), key))


@pytest.fixture
def trusting(storage: AgedStorage, key: SignKey) -> ArtifactStore:
    """Who uses what the key signed."""
    return ArtifactStore(storage, Budget("", 20), Keys((key.public,)))


@pytest.fixture
def plain(storage: AgedStorage) -> ArtifactStore:
    """Who knows no keys."""
    return ArtifactStore(storage, Budget("", 20))


def publish(store: ArtifactStore, folder: Path, seed: int) -> Record:
    """A record with a pack of its own."""
    record, pack = sample(folder, seed, size=2000)
    return store.publish(record, pack)


def collect(store: ArtifactStore) -> Collection:
    """What ``gc --yes`` does."""
    return Collector(store, Retention()).collect(time.time())


def damage(done: Inspection) -> list[tuple[str, str]]:
    """Kind and place of what somebody will meet."""
    return [(finding.kind, finding.where) for finding in done.damage]


def test_signatures_go_after_their_records(
    plain: ArtifactStore, signing: ArtifactStore, storage: AgedStorage, tmp_path: Path, key: SignKey
) -> None:
    """Superseded, or all of it: no record is ever seen without its signature, none is left over."""
    publish(signing, tmp_path, 1)
    kept = publish(signing, tmp_path, 2)
    storage.pass_time(2 * DAY)
    gone: list[str] = []
    delete = storage.delete
    storage.delete = lambda name: (gone.append(name), delete(name))[1]  # type: ignore[method-assign]
    (part,) = collect(plain).collected
    assert (part.records, part.packs) == (1, 1)
    artifacts = f"{FOLDER}/artifacts/adopted"
    assert gone[:2] == [f"{artifacts}/1.json", f"{artifacts}/1.{key.public.id}.sig"]
    assert signing.latest(FINGERPRINT).records == {"adopted": kept}
    storage.pass_time(YEAR)
    assert collect(plain).collected[0].whole
    assert storage.walk("v1") == {}


def test_unsigned_generations_supersede_nothing_that_is_signed(
    plain: ArtifactStore,
    signing: ArtifactStore,
    trusting: ArtifactStore,
    storage: AgedStorage,
    tmp_path: Path,
) -> None:
    """Who trusts the key goes on with what it signed."""
    first = publish(signing, tmp_path, 1)
    publish(plain, tmp_path, 2)
    storage.pass_time(2 * DAY)
    assert collect(plain).collected == []
    assert trusting.latest(FINGERPRINT).records == {"adopted": first}
    publish(signing, tmp_path, 3)
    storage.pass_time(2 * DAY)
    assert collect(plain).collected[0].records == 2


def test_a_signature_without_its_record(
    plain: ArtifactStore, signing: ArtifactStore, storage: AgedStorage, tmp_path: Path, key: SignKey
) -> None:
    """Left over by a collector that died: harmless, collected once it is old, never built upon."""
    record = publish(signing, tmp_path, 1)
    storage.delete(f"{FOLDER}/artifacts/adopted/1.json")
    again = publish(signing, tmp_path, 1)
    assert (again.generation, again.same_content(record)) == (2, True)
    assert [f.kind for f in inspect_store(plain).findings] == ["fingerprint"]
    storage.pass_time(2 * DAY)
    orphans = [f.where for f in inspect_store(plain).findings if f.kind == "orphan"]
    assert orphans == [f"artifacts/adopted/1.{key.public.id}.sig"]
    assert collect(plain).collected[0].records == 0
    assert f"{orphans[0]}" not in storage.walk(FOLDER)
    assert signing.latest(FINGERPRINT).records == {"adopted": again}


def test_fsck_knows_signatures(
    plain: ArtifactStore,
    signing: ArtifactStore,
    trusting: ArtifactStore,
    storage: AgedStorage,
    tmp_path: Path,
    key: SignKey,
) -> None:
    """A cut one is damage for everybody; one of nobody trusted only for who trusts."""
    signing.put_fingerprint(FINGERPRINT, "{}")
    publish(signing, tmp_path, 1)
    mark = ("fingerprint", "fingerprint.json")
    assert damage(inspect_store(trusting)) == [mark]
    signature = f"artifacts/adopted/1.{key.public.id}.sig"
    storage.delete(f"{FOLDER}/{signature}")
    assert damage(inspect_store(plain)) == [mark]
    assert damage(inspect_store(trusting)) == [("signature", "artifacts/adopted"), mark]
    storage.create(f"{FOLDER}/{signature}", b"cut")
    assert damage(inspect_store(plain)) == [("signature", signature), mark]
    assert publish(signing, tmp_path, 1).generation == 2
    assert damage(inspect_store(trusting)) == [mark]


def test_what_doctor_left_goes_once_it_is_old(plain: ArtifactStore, storage: AgedStorage) -> None:
    """It could not delete its probe."""
    storage.create("probes/one", b"first")
    assert (collect(plain).probes, inspect_store(plain).findings) == (0, [])
    storage.pass_time(2 * DAY, "probes")
    storage.create("probes/two", b"first")
    (found,) = inspect_store(plain).findings
    assert (found.kind, found.where, found.harmless) == ("orphan", "probes/one", True)
    assert Collector(plain, Retention()).plan(time.time()).probes == 1
    assert collect(plain).probes == 1
    assert storage.walk("probes") == {"two": 5}
