"""What every store promises, wherever it is."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from store_samples import FINGERPRINT, TARGET, harvest, packed, sample
from stores import Place

from compilecache.artifact import FileEntry, Record, check_files
from compilecache.errors import ChecksumMismatch, StoreUnavailable, UnsafePath
from compilecache.fetch import fetch_packs
from compilecache.pack import sha256_of
from compilecache.records import GLANCED
from compilecache.s3 import S3Storage
from compilecache.storage import open_storage
from compilecache.store import ArtifactStore


def raw_names(place: Place) -> set[str]:
    """Everything in the store, below its version folder."""
    storage = open_storage(place.url, patience=5, options=place.options)
    return set(storage.walk("v1"))


def put_raw(place: Place, name: str, data: bytes) -> None:
    """Writes an object past the store's own checks."""
    storage = open_storage(place.url, patience=5, options=place.options)
    assert storage.create(f"v1/{name}", data)


class TestStoreContract:
    """Holds on a directory, in memory and on an S3 server."""

    def test_an_empty_store_is_a_miss_not_an_error(self, store: ArtifactStore) -> None:
        """Nothing published: None and empty answers everywhere."""
        assert store.get_fingerprint(FINGERPRINT) is None
        assert store.fingerprints() == []
        assert store.entries(FINGERPRINT) == ()
        view = store.latest(FINGERPRINT, [TARGET.key])
        assert (dict(view.records), view.faults) == ({}, ())

    def test_the_first_text_of_a_fingerprint_stays(self, store: ArtifactStore) -> None:
        """A fingerprint is written once and listed by its digest."""
        store.put_fingerprint(FINGERPRINT, "one ü")
        store.put_fingerprint(FINGERPRINT, "two")
        assert store.get_fingerprint(FINGERPRINT) == "one ü"
        assert store.fingerprints() == [FINGERPRINT]

    def test_what_is_published_can_be_fetched(
        self, place: Place, store: ArtifactStore, tmp_path: Path
    ) -> None:
        """Record, pack and layout come out as they went in, for another client too.

        filesystem_spec#1062: a recursive put nested folders; every key is the one that was meant.
        """
        record, pack = sample(tmp_path)
        assert store.publish(record, pack) == record
        other = place.open()
        assert dict(other.latest(FINGERPRINT).records) == {"adopted": record}
        with other.open_pack(FINGERPRINT, record.pack.sha256) as stream:
            assert sha256_of(stream) == record.pack.sha256
        (tmp_path / "out").mkdir()
        fetch_packs(other, FINGERPRINT, record.files, tmp_path / "out")
        assert check_files(tmp_path / "out", record.files) == ()
        assert len(harvest(tmp_path / "out")) == len(record.files)
        assert raw_names(place) == {
            f"{FINGERPRINT}/artifacts/adopted/1.json",
            f"{FINGERPRINT}/packs/{record.pack.sha256}.tar.zst",
        }

    def test_equal_content_is_published_once(self, store: ArtifactStore, tmp_path: Path) -> None:
        """The second publisher of the same files gets the first one's record."""
        record, pack = sample(tmp_path)
        store.publish(record, pack)
        later = record.model_copy(update={"created": "2030-01-01T00:00:00Z"})
        assert store.publish(later, pack) == record

    def test_other_content_becomes_the_next_generation(
        self, store: ArtifactStore, tmp_path: Path
    ) -> None:
        """Nothing is overwritten; the newest is in force."""
        first, pack = sample(tmp_path, 1)
        second, other_pack = sample(tmp_path, 2)
        store.publish(first, pack)
        stored = store.publish(second, other_pack)
        assert stored.generation == 2
        assert stored.same_content(second)
        assert dict(store.latest(FINGERPRINT).records) == {"adopted": stored}
        assert [entry.generation for entry in store.entries(FINGERPRINT)] == [2]

    def test_a_record_can_build_on_the_pack_of_another(
        self, store: ArtifactStore, tmp_path: Path
    ) -> None:
        """A record without a pack of its own is fetched from the packs its files name."""
        record, pack = sample(tmp_path)
        store.publish(record, pack)
        thin = record.model_copy(
            update={"key": "adopted-part", "files": record.files[:1], "pack": None}
        )
        store.publish(thin, None)
        (tmp_path / "out").mkdir()
        fetch_packs(store, FINGERPRINT, thin.files, tmp_path / "out")
        assert list(harvest(tmp_path / "out")) == [thin.files[0].path]

    def test_only_the_keys_asked_for_come(self, store: ArtifactStore, tmp_path: Path) -> None:
        """A restore sees its targets, those that exist."""
        for seed in range(3):
            store.publish(*sample(tmp_path, seed, key=f"adopted-{seed}"))
        view = store.latest(FINGERPRINT, ["adopted-1", "adopted-9", "../adopted-2"])
        assert set(view.records) == {"adopted-1"}
        assert set(store.latest(FINGERPRINT).records) == {f"adopted-{n}" for n in range(3)}

    @pytest.mark.parametrize(
        "garbage", [b"<html>Sign in</html>", b"", b'{"format":1', b'{"format":9}', b"\xff" * 50]
    )
    def test_an_unreadable_record_falls_back(
        self, place: Place, store: ArtifactStore, tmp_path: Path, garbage: bytes
    ) -> None:
        """A damaged generation is listed as a fault; the one before stays in force."""
        record, pack = sample(tmp_path)
        store.publish(record, pack)
        put_raw(place, f"{FINGERPRINT}/artifacts/adopted/2.json", garbage)
        view = store.latest(FINGERPRINT)
        assert dict(view.records) == {"adopted": record}
        assert len(view.faults) == 1
        assert "generation 2" in view.faults[0]
        after = store.publish(record.model_copy(update={"generation": 2}), pack)
        assert after.generation == 3

    def test_a_record_in_the_wrong_place_is_a_fault(
        self, place: Place, store: ArtifactStore, tmp_path: Path
    ) -> None:
        """A record copied to another key or generation is not believed."""
        record, _ = sample(tmp_path)
        put_raw(place, f"{FINGERPRINT}/artifacts/adopted-x/1.json", record.dump())
        put_raw(place, f"{FINGERPRINT}/artifacts/adopted/3.json", record.dump())
        view = store.latest(FINGERPRINT)
        assert (dict(view.records), len(view.faults)) == ({}, 2)

    def test_foreign_names_are_passed_over(self, place: Place, store: ArtifactStore) -> None:
        """Signatures, leases and whatever else lies beside the records disturb nothing."""
        for name in (
            "artifacts/adopted/1.json.sig",
            "artifacts/adopted/x/1.json",
            "claims/a/1.json",
        ):
            put_raw(place, f"{FINGERPRINT}/{name}", b"x")
        put_raw(place, "README", b"x")
        view = store.latest(FINGERPRINT)
        assert (dict(view.records), view.faults) == ({}, ())

    def test_a_damaged_pack_is_replaced(
        self, place: Place, store: ArtifactStore, tmp_path: Path
    ) -> None:
        """Publishing the same content again heals a pack that was cut or altered."""
        for seed, damage in enumerate((lambda b: b[:100], lambda b: b"x" + b[1:])):
            record, pack = sample(tmp_path, seed, key=f"adopted-{seed}")
            name = f"{FINGERPRINT}/packs/{record.pack.sha256}.tar.zst"
            put_raw(place, name, damage(pack.read_bytes()))
            store.publish(record, pack)
            with store.open_pack(FINGERPRINT, record.pack.sha256) as stream:
                assert sha256_of(stream) == record.pack.sha256

    def test_a_pack_that_is_not_the_records_is_refused(
        self, place: Place, store: ArtifactStore, tmp_path: Path
    ) -> None:
        """A file that changed since it was packed is never sent."""
        record, pack = sample(tmp_path)
        pack.write_bytes(pack.read_bytes() + b"x")
        with pytest.raises(ChecksumMismatch):
            store.publish(record, pack)
        assert raw_names(place) == set()

    def test_all_faults_of_a_fetch_come_at_once(
        self, place: Place, store: ArtifactStore, tmp_path: Path
    ) -> None:
        """One missing and one altered pack are two faults in one error."""
        good, good_pack = sample(tmp_path, 0, key="adopted-0")
        store.publish(good, good_pack)
        altered, pack = sample(tmp_path, 1)
        data = bytearray(pack.read_bytes())
        data[len(data) // 2] ^= 1
        put_raw(place, f"{FINGERPRINT}/packs/{altered.pack.sha256}.tar.zst", bytes(data))
        files = {f"other/{entry.path}" for entry in altered.files}
        wanted = [*good.files, FileEntry("gone", 1, "0" * 32, "f" * 64)]
        wanted += [FileEntry(f"other/{e.path}", e.size, e.xxh3_128, e.pack) for e in altered.files]
        (tmp_path / "out").mkdir()
        with pytest.raises(ChecksumMismatch) as caught:
            fetch_packs(store, FINGERPRINT, wanted, tmp_path / "out")
        text = " ".join(caught.value.faults)
        assert "missing" in text
        assert altered.pack.sha256[:12] in text
        assert files.isdisjoint(harvest(tmp_path / "out"))

    def test_entries_that_contradict_each_other_are_refused(
        self, store: ArtifactStore, tmp_path: Path
    ) -> None:
        """Two contents under one name, or a file that is also a directory, fetch nothing."""
        one = FileEntry("f", 1, "0" * 32, "a" * 64)
        for other in (
            FileEntry("f", 1, "1" * 32, "b" * 64),
            FileEntry("f/g", 1, "0" * 32, "a" * 64),
        ):
            with pytest.raises(ChecksumMismatch):
                fetch_packs(store, FINGERPRINT, [one, other], tmp_path)

    def test_a_large_pack_comes_in_blocks(self, store: ArtifactStore, tmp_path: Path) -> None:
        """A pack larger than one read, and than one part of an upload, survives."""
        record, pack = sample(tmp_path, 5, size=12_000_000)
        store.publish(record, pack)
        (tmp_path / "out").mkdir()
        fetch_packs(store, FINGERPRINT, record.files, tmp_path / "out")
        assert check_files(tmp_path / "out", record.files) == ()

    def test_some_targets_are_found_among_few_and_among_many(
        self, store: ArtifactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """By one listing of all while they are few, else by one for each; never by reading them all."""
        keys = [f"adopted-{number}" for number in range(GLANCED * 2 + 1)]
        for number, key in enumerate(keys[:-1]):
            record, pack = sample(tmp_path, number, key=key, size=10)
            store.publish(record, pack)
        walked: list[str] = []
        walk = store.storage.walk

        def noting(folder: str) -> dict[str, int]:
            walked.append(folder.rpartition("/")[2])
            return walk(folder)

        monkeypatch.setattr(store.storage, "walk", noting)
        few = store.latest(FINGERPRINT, keys[:2])
        assert sorted(few.records) == keys[:2]
        glances = isinstance(store.storage, S3Storage)
        assert walked == ([] if glances else keys[:2])
        monkeypatch.undo()
        record, pack = sample(tmp_path, 99, key=keys[-1], size=10)
        store.publish(record, pack)
        monkeypatch.setattr(store.storage, "walk", noting)
        walked.clear()
        many = store.latest(FINGERPRINT, keys[:2])
        assert many.records == few.records
        assert sorted(walked) == keys[:2]

    def test_what_others_publish_later_is_seen(
        self, place: Place, store: ArtifactStore, tmp_path: Path
    ) -> None:
        """s3fs#851: no client remembers a listing; not of nothing, nor of what there was."""
        assert store.entries(FINGERPRINT) == ()
        for seed in range(2):
            place.open().publish(*sample(tmp_path, seed, key=f"adopted-{seed}"))
            assert [entry.key for entry in store.entries(FINGERPRINT)] == [
                f"adopted-{n}" for n in range(seed + 1)
            ]

    def test_fingerprints_that_others_publish_are_seen(
        self, place: Place, store: ArtifactStore, tmp_path: Path
    ) -> None:
        """The same of folders."""
        assert store.fingerprints() == []
        place.open().publish(*sample(tmp_path, 0))
        assert store.fingerprints() == self.shown([FINGERPRINT])

    def shown(self, folders: list[str]) -> list[str]:
        """Of these folders, those that the kind of store lists."""
        return folders

    def test_ls_tells_sizes(self, store: ArtifactStore, tmp_path: Path) -> None:
        """An entry says generation, time, files and bytes."""
        record, pack = sample(tmp_path)
        store.publish(record, pack)
        (entry,) = store.entries(FINGERPRINT)
        assert (entry.key, entry.generation, entry.created) == ("adopted", 1, record.created)
        assert (entry.files, entry.file_bytes) == (3, 60_000)
        assert entry.pack_bytes == pack.stat().st_size


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("s3://b//x///y/", "s3://b/x/y"),
        ("s3://b", "s3://b"),
        ("memory://a//b/", "memory://a/b"),
        ("file:///tmp//a%20b/", "/tmp/a b"),
        ("/tmp//x/", "/tmp/x"),
        (Path("/tmp/x"), "/tmp/x"),
    ],
)
def test_addresses_are_normalised(given: str | Path, shown: str) -> None:
    """s3fs#1005: doubled and trailing slashes name the same store."""
    assert ArtifactStore.open(given).url == shown


@pytest.mark.parametrize("url", ["gs://b/x", "s3://", "s3://key:secret@b/x", "s3://b/../x"])
def test_addresses_that_cannot_be_used_are_refused(url: str) -> None:
    """Other schemes, no bucket, secrets and '..' are one clear error."""
    with pytest.raises(StoreUnavailable, match="no address of a store"):
        ArtifactStore.open(url)


def test_the_default_store_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """COMPILECACHE_STORE first, then the user's cache folder."""
    monkeypatch.setenv("COMPILECACHE_STORE", "memory://m")
    assert ArtifactStore.open().url == "memory://m"
    monkeypatch.delenv("COMPILECACHE_STORE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/c")
    assert ArtifactStore.open().url == "/var/c/compilecache/store"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert ArtifactStore.open().url == str(Path.home() / ".cache/compilecache/store")


def test_a_local_store_is_private(tmp_path: Path) -> None:
    """Directories are 0700, files 0600, whatever the umask."""
    before = os.umask(0)
    try:
        ArtifactStore.open(tmp_path / "store").publish(*sample(tmp_path))
    finally:
        os.umask(before)
    for path in (tmp_path / "store", *(tmp_path / "store").rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)


def test_nothing_imports_torch_or_botocore_before_it_must(tmp_path: Path) -> None:
    """Opening a local store loads neither; a missing extra is told with its remedy."""
    import subprocess
    import sys

    script = (
        "import sys; sys.modules['botocore.session'] = None\n"
        "from compilecache.errors import StoreUnavailable\n"
        "from compilecache.store import ArtifactStore\n"
        f"ArtifactStore.open({str(tmp_path)!r}).latest('ab' * 16)\n"
        "assert not {'torch', 'fsspec', 'urllib3'} & sys.modules.keys()\n"
        "try: ArtifactStore.open('s3://b/x')\n"
        "except StoreUnavailable as error: assert \"pip install 'compilecache[s3]'\" in str(error)\n"
        "else: raise SystemExit('opened')\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment)


def test_unsafe_records_of_a_store_are_faults(tmp_path: Path) -> None:
    """A record that names a file outside the root is not believed and stops nothing."""
    record, _ = sample(tmp_path)
    evil = record.dump().replace(b"00/kernel0.so", b"../kernel0.so")
    with pytest.raises(UnsafePath):
        Record.parse(evil)
    place = Place(str(tmp_path / "store"))
    put_raw(place, f"{FINGERPRINT}/artifacts/adopted/1.json", evil)
    assert "climbs" in place.open().latest(FINGERPRINT).faults[0]


def test_a_pack_of_one_wanted_file_is_enough(tmp_path: Path) -> None:
    """Files of a pack that nobody asks for are not written."""
    pack, entries, info = packed(tmp_path, {"a": b"1", "b": b"2"})
    store = ArtifactStore.open(tmp_path / "store")
    record = Record(
        fingerprint=FINGERPRINT,
        target=None,
        key="adopted",
        files=tuple(entries.values()),
        pack=info,
    )
    store.publish(record, pack)
    (tmp_path / "out").mkdir()
    fetch_packs(store, FINGERPRINT, [entries["b"]], tmp_path / "out")
    assert harvest(tmp_path / "out") == {"b": b"2"}
