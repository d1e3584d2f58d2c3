"""What a store keeps and lets go: by age, size and count, while others publish."""

from __future__ import annotations

import json
import random
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import boto3
import pytest
from aged import YEAR, AgedStorage
from store_samples import FINGERPRINT, sample
from stores import Place, Publishers

from compilecache.artifact import Record, check_files
from compilecache.budget import Budget
from compilecache.errors import ChecksumMismatch
from compilecache.fetch import fetch_packs
from compilecache.holdings import Surveyor
from compilecache.keeping import DAY
from compilecache.retention import Collection, Collector, Retention
from compilecache.rootbudget import RootBudget
from compilecache.storage import Blob, LocalStorage, Sent, open_storage
from compilecache.store import ArtifactStore
from compilecache.sweeps import Sweep, marks

OTHER = "cd" * 16
THIRD = "ef" * 16


EVERYWHERE = pytest.mark.parametrize("place", ["local", "memory", "s3"], indirect=True)


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A directory, or what a test asks for."""
    kind = getattr(request, "param", "local")
    if kind == "s3":
        s3_place: Place = request.getfixturevalue("s3_place")
        return s3_place
    return Place(str(tmp_path / "store") if kind == "local" else f"memory://{uuid.uuid4().hex}")


@pytest.fixture
def storage(place: Place) -> AgedStorage:
    """Each kind of storage, with a clock that a test can push."""
    return AgedStorage(open_storage(place.url, patience=10, options=place.options))


@pytest.fixture
def store(storage: AgedStorage) -> ArtifactStore:
    """A store on it."""
    return ArtifactStore(storage, Budget(storage.url, 20))


def collect(store: ArtifactStore, **rule: object) -> Collection:
    """What ``gc --yes`` with these options did."""
    return Collector(store, Retention(**rule)).collect(time.time())


def publish(
    store: ArtifactStore,
    folder: Path,
    seed: int,
    *,
    key: str = "adopted",
    fingerprint: str = FINGERPRINT,
    size: int = 2000,
) -> Record:
    """A record with a pack of its own."""
    record, pack = sample(folder / fingerprint, seed, key=key, size=size)
    store.put_fingerprint(fingerprint, "{}")
    return store.publish(record.model_copy(update={"fingerprint": fingerprint}), pack)


def assert_whole(store: ArtifactStore, record: Record, folder: Path) -> None:
    """The record is in force and every file of it comes back."""
    view = store.latest(record.fingerprint, [record.key])
    assert view.records.get(record.key) == record
    folder.mkdir(parents=True)
    fetch_packs(store, record.fingerprint, record.files, folder)
    assert check_files(folder, record.files) == ()


@EVERYWHERE
class TestStorageContract:
    """What collecting needs of a directory, of memory and of S3."""

    def test_times_are_those_of_writing(self, storage: AgedStorage) -> None:
        """Sizes and times of everything below a folder; the clocks agree within seconds."""
        storage.create("v1/a/one", b"123")
        storage.create("v1/a/b/two", b"")
        found = storage.inner.survey("v1/a")
        assert {name: stored.size for name, stored in found.items()} == {"one": 3, "b/two": 0}
        assert all(abs(stored.modified - time.time()) < 5 for stored in found.values())
        assert storage.survey("v1/none") == {}

    def test_what_is_deleted_is_gone(self, storage: AgedStorage) -> None:
        """Others stay; deleting twice is no error; the name can be created again."""
        storage.create("v1/a/one", b"1")
        storage.create("v1/a/two", b"2")
        storage.delete("v1/a/one")
        storage.delete("v1/a/one")
        assert storage.size("v1/a/one") is None
        assert storage.walk("v1/a") == {"two": 1}
        assert storage.create("v1/a/one", b"again")
        assert storage.read("v1/a/one", 99) == b"again"

    def test_an_emptied_folder_is_no_folder(self, storage: AgedStorage) -> None:
        """``ls`` shows no fingerprint of which nothing is left."""
        storage.create("v1/a/deep/one", b"1")
        storage.create("v1/b/one", b"1")
        storage.delete("v1/a/deep/one")
        assert storage.folders("v1") == ["b"]
        storage.delete("v1/b/one")
        assert storage.folders("v1") == []
        assert storage.half_uploads("v1") == {}


def test_folders_may_vanish_while_files_are_made(tmp_path: Path) -> None:
    """Of many creations beside deletions that prune folders none fails."""
    storage = LocalStorage(tmp_path / "store")
    stop = threading.Event()

    def prune() -> None:
        while not stop.is_set():
            storage.delete("v1/a/b/other")
            time.sleep(1e-3)  # without a pause nobody else's two calls ever come together

    thread = threading.Thread(target=prune)
    thread.start()
    try:
        for number in range(100):
            assert storage.create(f"v1/a/b/{number}", b"x")
            storage.delete(f"v1/a/b/{number}")
    finally:
        stop.set()
        thread.join()


# -- what goes and what stays ---------------------------------------------------------------------


def test_by_default_nothing_grows_without_end() -> None:
    """bazel-remote#712, jax#18751: finite numbers of days, bytes, fingerprints and files, in each command."""
    rule, budget = Retention(), RootBudget()
    for most in (rule.keep_days, rule.keep_bytes, rule.keep_fingerprints, budget.keep_days):
        assert 0 < most < 10**15
    assert 0 < budget.keep_bytes < 10**15
    assert 0 < budget.keep_files < 10**9


def test_nothing_young_goes(store: ArtifactStore, tmp_path: Path) -> None:
    """The strictest rule takes nothing that is younger than the grace time."""
    first, second = (publish(store, tmp_path, seed) for seed in (1, 2))
    done = collect(store, keep_days=0, keep_bytes=0, keep_fingerprints=0)
    assert (done.collected, done.freed) == ([], 0)
    assert [first.generation, second.generation] == [1, 2]
    assert_whole(store, second, tmp_path / "out")


@EVERYWHERE
def test_a_plan_changes_nothing(store: ArtifactStore, storage: AgedStorage, tmp_path: Path) -> None:
    """It says what would go and what that frees, and afterwards exactly that goes."""
    publish(store, tmp_path, 1)
    publish(store, tmp_path, 2)
    publish(store, tmp_path, 3, fingerprint=OTHER)
    storage.pass_time(YEAR)
    publish(store, tmp_path, 4, fingerprint=OTHER)
    before = storage.walk("v1")
    planned = Collector(store, Retention()).plan(time.time())
    assert storage.walk("v1") == before
    done = collect(store)
    assert done.freed == planned.freed == sum(before.values()) - sum(storage.walk("v1").values())
    assert done.collected == planned.collected
    assert [(part.fingerprint, part.why, part.whole) for part in done.collected] == [
        (FINGERPRINT, "age", True)
    ]
    assert store.fingerprints() == [OTHER]


@EVERYWHERE
def test_superseded_generations_go_and_shared_packs_stay(
    store: ArtifactStore, storage: AgedStorage, tmp_path: Path
) -> None:
    """A record leans on the pack of a superseded one: the record goes, its pack does not."""
    first = publish(store, tmp_path, 1)
    second = publish(store, tmp_path, 2)
    leaning = first.model_copy(
        update={"key": "adopted-part", "files": first.files[:1], "pack": None, "generation": 1}
    )
    store.publish(leaning, None)
    third = publish(store, tmp_path, 3)
    storage.pass_time(2 * DAY)
    done = collect(store)
    assert [(part.why, part.records, part.packs) for part in done.collected] == [
        ("superseded", 2, 1)
    ]
    names = storage.walk(f"v1/{FINGERPRINT}")
    assert f"packs/{second.pack.sha256}.tar.zst" not in names
    assert_whole(store, leaning, tmp_path / "leaning")
    assert_whole(store, third, tmp_path / "third")
    assert collect(store).collected == []


def test_a_successor_must_have_been_there_for_a_while(
    store: ArtifactStore, storage: AgedStorage, tmp_path: Path
) -> None:
    """Somebody may be restoring the old generation still."""
    publish(store, tmp_path, 1)
    storage.pass_time(2 * DAY)
    publish(store, tmp_path, 2)
    assert collect(store).collected == []


def test_a_generation_that_is_not_whole_supersedes_nothing(
    store: ArtifactStore, storage: AgedStorage, tmp_path: Path
) -> None:
    """Its pack is missing, or it cannot be read: the last one that can be restored is kept."""
    first = publish(store, tmp_path, 1)
    second = publish(store, tmp_path, 2)
    storage.create(f"v1/{FINGERPRINT}/artifacts/adopted/3.json", b"<html>")
    storage.delete(f"v1/{FINGERPRINT}/packs/{second.pack.sha256}.tar.zst")
    storage.pass_time(2 * DAY)
    assert collect(store).collected == []
    assert f"packs/{first.pack.sha256}.tar.zst" in storage.walk(f"v1/{FINGERPRINT}")


def test_a_collected_generation_is_not_used_again(
    store: ArtifactStore, storage: AgedStorage, tmp_path: Path
) -> None:
    """Who publishes with an old idea of the generations ends above those in force."""
    publish(store, tmp_path, 1)
    publish(store, tmp_path, 2)
    storage.pass_time(2 * DAY)
    collect(store)
    assert publish(store, tmp_path, 3).generation == 3
    assert publish(store, tmp_path, 1).generation == 4


@EVERYWHERE
def test_a_claim_holds_a_fingerprint(
    store: ArtifactStore, storage: AgedStorage, tmp_path: Path
) -> None:
    """While it is young nothing of the fingerprint goes; an old one holds nothing (sglang#34231)."""
    publish(store, tmp_path, 1)
    publish(store, tmp_path, 2)
    publish(store, tmp_path, 3, fingerprint=OTHER)
    storage.pass_time(YEAR)
    claim = f"v1/{FINGERPRINT}/claims/adopted/3-somebody.json"
    storage.create(claim, b"{}")
    done = collect(store)
    assert [part.fingerprint for part in done.collected] == [OTHER]
    assert done.held == {FINGERPRINT: "somebody claims a target of it"}
    storage.pass_time(2 * DAY)
    assert collect(store).collected[0].whole
    assert storage.walk("v1") == {}


def test_records_of_a_later_version_are_left_alone(
    store: ArtifactStore, storage: AgedStorage, tmp_path: Path
) -> None:
    """Nobody here knows what they need."""
    publish(store, tmp_path, 1)
    storage.create(f"v1/{FINGERPRINT}/artifacts/adopted/2.json", b'{"format": 2}')
    storage.pass_time(YEAR)
    assert list(collect(store).held) == [FINGERPRINT]
    assert len(storage.walk("v1")) == 4


def test_orphan_packs_go_once_they_are_old(
    store: ArtifactStore, storage: AgedStorage, tmp_path: Path
) -> None:
    """A young one may wait for its record; one beside a record that nobody can read stays."""
    kept = publish(store, tmp_path, 1)
    orphan = f"v1/{FINGERPRINT}/packs/{'1' * 64}.tar.zst"
    storage.create(orphan, b"x" * 1000)
    assert collect(store).freed == 0
    storage.pass_time(2 * DAY)
    garbage = f"v1/{FINGERPRINT}/artifacts/adopted-x/1.json"
    storage.create(garbage, b"garbage")
    assert collect(store).freed == 0
    storage.delete(garbage)
    assert collect(store).freed == 1000
    assert_whole(store, kept, tmp_path / "out")


@pytest.mark.parametrize("rule", [{"keep_fingerprints": 2}, {"keep_bytes": 16_000}])
def test_the_most_recently_published_stay(
    store: ArtifactStore, storage: AgedStorage, tmp_path: Path, rule: dict[str, int]
) -> None:
    """By count and by size, the one whose youngest record is oldest goes first."""
    for seed, fingerprint in enumerate((OTHER, FINGERPRINT, THIRD)):
        publish(store, tmp_path, seed, fingerprint=fingerprint)
        storage.pass_time(2 * DAY)
    (part,) = collect(store, **rule).collected
    assert (part.fingerprint, part.whole) == (OTHER, True)
    assert part.why == ("count" if "keep_fingerprints" in rule else "bytes")
    assert store.fingerprints() == sorted([FINGERPRINT, THIRD])


def test_fingerprints_can_be_kept_by_name(
    store: ArtifactStore, storage: AgedStorage, tmp_path: Path
) -> None:
    """The first digits are enough; superseded generations of it go all the same."""
    publish(store, tmp_path, 1)
    kept = publish(store, tmp_path, 2)
    storage.pass_time(YEAR)
    (part,) = collect(store, keep=(FINGERPRINT[:6],)).collected
    assert (part.why, part.whole, part.records) == ("superseded", False, 1)
    assert_whole(store, kept, tmp_path / "out")


def test_records_go_before_packs_and_the_name_last(
    store: ArtifactStore, storage: AgedStorage, tmp_path: Path
) -> None:
    """A reader sees the newest generation or none, and no record without its packs."""
    for seed in (1, 2):
        publish(store, tmp_path, seed)
    storage.pass_time(YEAR)
    gone: list[str] = []
    delete = storage.delete

    def noted(name: str) -> None:
        gone.append(name.removeprefix(f"v1/{FINGERPRINT}/"))
        delete(name)

    storage.delete = noted  # type: ignore[method-assign]
    collect(store)
    folders = [name.partition("/")[0] for name in gone]
    assert gone[:2] == ["artifacts/adopted/1.json", "artifacts/adopted/2.json"]
    assert folders == ["artifacts"] * 2 + ["packs"] * 2 + ["fingerprint.json", "sweeps"]


def test_half_uploads_are_dropped(s3_place: Place, tmp_path: Path) -> None:
    """Parts of a pack that were sent and never put together; on a directory, temporary files."""
    client = boto3.client(
        "s3",
        endpoint_url=s3_place.options["endpoint_url"],
        aws_access_key_id="testing",
        aws_secret_access_key="testing",
        region_name="us-east-1",
    )
    bucket = s3_place.url.split("/")[2]
    key = f"some/prefix/v1/{FINGERPRINT}/packs/{'1' * 64}.tar.zst"
    client.create_multipart_upload(Bucket=bucket, Key=key)
    storage = open_storage(s3_place.url, patience=10, options=s3_place.options)
    local = LocalStorage(tmp_path / "store")
    local.create("v1/x/one", b"")
    (tmp_path / "store/v1/x/.tmp-abc").write_bytes(b"half")
    assert collect(ArtifactStore(local, Budget("", 20))).half_uploads == 0
    for inner in (storage, local):
        assert len(inner.half_uploads("v1")) == 1
        old = ArtifactStore(AgedStorage(inner), Budget("", 20))
        assert Collector(old, Retention()).plan(time.time()).half_uploads == 1
        assert collect(old).half_uploads == 1
        assert inner.half_uploads("v1") == {}
    assert client.list_multipart_uploads(Bucket=bucket).get("Uploads", []) == []
    client.close()


# -- while others publish -------------------------------------------------------------------------


class Meddler(AgedStorage):
    """Does something once, right before an object whose name has these words goes or is made."""

    def __init__(self, inner: AgedStorage, when: str, words: str, act: Callable[[], None]) -> None:
        super().__init__(inner)
        self.older = inner.older
        self.inner = inner.inner
        self._when, self._words, self._act = when, words, act
        self.acted = False

    def _meddle(self, when: str, name: str) -> bool:
        if when == self._when and self._words in name and not self.acted:
            self.acted = True
            self._act()
            return True
        return False

    def delete(self, name: str) -> None:
        """Perhaps after the act."""
        self._meddle("delete", name)
        super().delete(name)

    def create(self, name: str, data: bytes) -> bool:
        """Perhaps after the act."""
        self._meddle("create", name)
        return super().create(name, data)

    def open(self, name: str) -> Blob:
        """Perhaps with the act between opening and reading, and an answer that breaks there."""
        blob = super().open(name)
        if self._meddle("open", name):
            blob.close()
        return blob

    def upload(
        self, name: str, source: Path, *, replace: bool, sent: Sent = lambda count: None
    ) -> None:
        """Perhaps before the act."""
        super().upload(name, source, replace=replace, sent=sent)
        self._meddle("upload", name)


def test_a_pack_that_goes_while_it_is_read_is_sent_again(s3_place: Place, tmp_path: Path) -> None:
    """Whoever publishes the same once more meets the old pack, and then does not."""
    storage = AgedStorage(open_storage(s3_place.url, patience=10, options=s3_place.options))
    store = ArtifactStore(storage, Budget(s3_place.url, 20))
    old = publish(store, tmp_path, 1)

    def sweep() -> None:
        collect(store, keep_days=0)

    storage.pass_time(YEAR)
    meddler = Meddler(storage, "open", "packs/", sweep)
    new = publish(ArtifactStore(meddler, Budget(s3_place.url, 20)), tmp_path, 1)
    assert meddler.acted
    assert new.same_content(old)
    assert_whole(store, new, tmp_path / "out")


def test_a_pack_that_is_taken_for_the_one_it_replaces_is_sent_again(
    store: ArtifactStore, storage: AgedStorage, tmp_path: Path
) -> None:
    """A sweep that had chosen the damaged one deletes the good one by its name."""
    old = publish(store, tmp_path, 1)
    name = f"v1/{FINGERPRINT}/packs/{old.pack.sha256}.tar.zst"
    (tmp_path / "store" / name).write_bytes(b"damaged")
    meddler = Meddler(storage, "upload", "packs/", lambda: storage.delete(name))
    new = publish(ArtifactStore(meddler, Budget(storage.url, 20)), tmp_path, 1)
    assert meddler.acted
    assert_whole(store, new, tmp_path / "out")


def test_a_pack_that_goes_while_it_is_restored_is_missing(s3_place: Place, tmp_path: Path) -> None:
    """Its record is passed over by name, as if it had never been there; the rest is restored."""
    storage = AgedStorage(open_storage(s3_place.url, patience=10, options=s3_place.options))
    store = ArtifactStore(storage, Budget(s3_place.url, 20))
    old = publish(store, tmp_path, 1)
    name = f"v1/{FINGERPRINT}/packs/{old.pack.sha256}.tar.zst"
    meddler = Meddler(storage, "open", "packs/", lambda: storage.delete(name))
    watched = ArtifactStore(meddler, Budget(s3_place.url, 20))
    (tmp_path / "out").mkdir()
    with pytest.raises(ChecksumMismatch, match=f"pack {old.pack.sha256[:12]}: missing"):
        fetch_packs(watched, FINGERPRINT, old.files, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


@EVERYWHERE
@pytest.mark.parametrize("words", ["sweeps/", "artifacts/", "packs/", "fingerprint.json"])
def test_what_is_published_at_any_moment_of_a_sweep_is_kept(
    store: ArtifactStore, storage: AgedStorage, tmp_path: Path, words: str
) -> None:
    """The same content again, into a fingerprint that is being collected whole."""
    old = publish(store, tmp_path, 1)
    storage.pass_time(YEAR)
    made: list[Record] = []

    def again() -> None:
        made.append(publish(store, tmp_path, 1))

    def start() -> None:  # it waits for the sweep, and the sweep for nobody
        thread.start()
        time.sleep(0.4)

    thread = threading.Thread(target=again)
    when = "create" if words == "sweeps/" else "delete"
    meddled = Meddler(storage, when, words, start)
    done = collect(ArtifactStore(meddled, Budget(storage.url, 20)))
    thread.join(30)
    assert meddled.acted and not thread.is_alive()
    assert_whole(store, made[0], tmp_path / "out")
    assert made[0].same_content(old)
    assert len(done.collected) <= 1
    assert marks(storage, store.call, f"v1/{FINGERPRINT}") == set()


def test_who_leans_on_packs_that_were_collected_hears_of_it(
    store: ArtifactStore, storage: AgedStorage, tmp_path: Path
) -> None:
    """A record is not written in front of nothing."""
    first = publish(store, tmp_path, 1)
    leaning = first.model_copy(
        update={"key": "adopted-part", "files": first.files[:1], "pack": None}
    )
    storage.pass_time(YEAR)
    assert collect(store).collected[0].whole
    with pytest.raises(ChecksumMismatch, match="missing"):
        store.publish(leaning, None)
    assert store.keys(FINGERPRINT) == frozenset()


def test_a_long_sweep_looks_again(
    store: ArtifactStore, storage: AgedStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a mark has served its time, another is put before anything more is deleted."""
    for seed in range(3):
        publish(store, tmp_path, seed)
    storage.pass_time(YEAR)
    monkeypatch.setattr("compilecache.sweeps.SWEEP_SECONDS", 0.05)
    put: list[str] = []
    delete, create = storage.delete, storage.create

    def slow(name: str) -> None:
        time.sleep(0.02)
        delete(name)

    def noted(name: str, data: bytes) -> bool:
        put.append(name)
        return create(name, data)

    storage.delete, storage.create = slow, noted  # type: ignore[method-assign]
    assert collect(store).collected[0].records == 3
    assert len(put) > 2
    assert storage.walk("v1") == {}


def test_marks_of_dead_collectors_hold_nobody_up(
    store: ArtifactStore, storage: AgedStorage, tmp_path: Path
) -> None:
    """After an hour they do not count, after a day they are removed."""
    storage.create(f"v1/{FINGERPRINT}/sweeps/dead", b"")
    storage.pass_time(2 * DAY)
    began = time.monotonic()
    kept = publish(store, tmp_path, 1)
    assert time.monotonic() - began < 3
    with Sweep(storage, store.call, f"v1/{FINGERPRINT}"):
        assert len(storage.walk(f"v1/{FINGERPRINT}/sweeps")) == 1
    assert storage.walk(f"v1/{FINGERPRINT}/sweeps") == {}
    assert_whole(store, kept, tmp_path / "out")


@pytest.mark.parametrize("kind", ["local", "s3"])
def test_publishers_and_collectors_at_the_same_time(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Four processes publish what lies there since a year, and new things; nothing is lost.

    The rule would take everything that is not young, again and again.
    """
    place = request.getfixturevalue("s3_place") if kind == "s3" else Place(str(tmp_path / "store"))
    storage = AgedStorage(open_storage(place.url, patience=20, options=place.options))
    store = ArtifactStore(storage, Budget(place.url, 30))
    for seed in range(4):
        publish(store, tmp_path / "old", seed, key=f"adopted-{seed}")
    storage.pass_time(YEAR)
    time.sleep(1.1)  # listings of S3 tell seconds apart
    moments = random.Random(3)
    tasks = [place.task([n, n + 100, n + 1], size=2000) for n in range(4)]
    with Publishers(tasks, tmp_path) as publishers:
        for number in range(len(tasks)):
            publishers.start(number)
            collect(store, keep_days=0, keep_bytes=0)
            time.sleep(moments.uniform(0, 0.05))
        for _ in range(3):
            collect(store, keep_days=0, keep_bytes=0)
    said = [line for n in range(len(tasks)) for line in publishers.said(n)]
    assert [line for line in said if "error" in json.loads(line)] == []
    records = {r.key: r for r in (Record.parse(line.encode()) for line in said)}
    assert len(records) == 9
    for key, record in records.items():
        assert_whole(store, record, tmp_path / "out" / key)


def test_surveying_reads_a_record_once(
    store: ArtifactStore, storage: AgedStorage, tmp_path: Path
) -> None:
    """Looking again costs a listing, until a record changes."""
    publish(store, tmp_path, 1)
    surveyor = Surveyor(store)
    first = surveyor.look(FINGERPRINT)
    storage.read = lambda name, limit: pytest.fail(name)  # type: ignore[method-assign]
    assert surveyor.look(FINGERPRINT) == first
