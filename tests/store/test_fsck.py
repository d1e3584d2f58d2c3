"""What fsck finds in a store, and that its repairs only add."""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path

import pytest
from aged import YEAR, AgedStorage
from click.testing import CliRunner
from store_samples import packed, sample

from compilecache.artifact import Record
from compilecache.budget import Budget
from compilecache.cachedir import CacheDir
from compilecache.cli import fsck as command
from compilecache.fetch import fetch_packs
from compilecache.fingerprint import Fingerprint
from compilecache.inspection import Inspection, inspect_store
from compilecache.pack import sha256_of, write_pack
from compilecache.repair import repair_root, repair_store
from compilecache.rootinspection import inspect_root
from compilecache.storage import LocalStorage
from compilecache.store import ArtifactStore

MARK = Fingerprint(components={"torch": "2", "device": "cpu"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the store is."""
    return tmp_path / "store"


@pytest.fixture
def store(folder: Path) -> ArtifactStore:
    """A store in a directory, so that its objects can be damaged."""
    return ArtifactStore.open(folder)


@pytest.fixture
def cache(tmp_path: Path) -> CacheDir:
    """A root that is ready."""
    cache = CacheDir(tmp_path / "root")
    cache.prepare()
    return cache


def publish(
    store: ArtifactStore, folder: Path, seed: int = 0, *, key: str = "adopted", mark: bool = True
) -> Record:
    """A record with its pack, and what its fingerprint stands for."""
    made = random.Random(seed)
    files = {f"fxgraph/{key}/{n}": made.randbytes(5000) for n in range(3)}
    pack, entries, info = packed(folder / "made" / f"{key}-{seed}", files)
    record = Record(
        fingerprint=MARK.digest, target=None, key=key, files=tuple(entries.values()), pack=info
    )
    if mark:
        store.put_fingerprint(MARK.digest, MARK.dump())
    return store.publish(record, pack)


def restore(cache: CacheDir, store: ArtifactStore, record: Record) -> None:
    """Brings the record into the root."""
    with cache.staging() as staged:
        fetch_packs(store, record.fingerprint, record.files, staged)
        cache.activate(staged, record.files)
    cache.keep_record(record, published=True)


def pack_file(folder: Path, record: Record) -> Path:
    """Where its pack lies."""
    return folder / f"v1/{record.fingerprint}/packs/{record.pack.sha256}.tar.zst"


def flip(path: Path) -> None:
    """One bit in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def kinds(done: Inspection) -> list[tuple[str, str]]:
    """Kind and what, of each finding."""
    return [(finding.kind, finding.what) for finding in done.findings]


def bytes_of(folder: Path) -> dict[str, bytes]:
    """Every object of the store."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def assert_whole(store: ArtifactStore, record: Record, out: Path) -> None:
    """What is in force for the record's target has its files, and comes back whole."""
    latest = store.latest(record.fingerprint).records[record.key]
    assert [(e.path, e.xxh3_128) for e in latest.files] == [
        (e.path, e.xxh3_128) for e in record.files
    ]
    out.mkdir()
    fetch_packs(store, record.fingerprint, latest.files, out)


def test_a_whole_store_is_clean(store: ArtifactStore, tmp_path: Path) -> None:
    """Counts, and no findings, deep or not; an empty store is clean, too."""
    assert inspect_store(store).findings == []
    publish(store, tmp_path)
    done = inspect_store(store, deep=True)
    assert (done.fingerprints, done.records, done.packs) == (1, 1, 1)
    assert done.findings == []


def test_a_missing_and_a_cut_pack_are_found(
    store: ArtifactStore, folder: Path, tmp_path: Path
) -> None:
    """From names and sizes alone."""
    first, second = (publish(store, tmp_path, n, key=f"adopted-{n}") for n in (1, 2))
    pack_file(folder, first).unlink()
    os.truncate(pack_file(folder, second), 100)
    done = inspect_store(store)
    assert kinds(done) == [
        ("pack", f"pack {first.pack.sha256[:12]} is missing"),
        (
            "pack",
            f"pack {second.pack.sha256[:12]} has 100 bytes instead of {second.pack.size}",
        ),
    ]
    assert [f.key for f in done.damage] == ["adopted-1", "adopted-2"]


def test_a_flipped_bit_is_found_by_a_deep_look(
    store: ArtifactStore, folder: Path, tmp_path: Path
) -> None:
    """Name and size are right: only reading tells."""
    record = publish(store, tmp_path)
    flip(pack_file(folder, record))
    assert inspect_store(store).findings == []
    (finding,) = inspect_store(store, deep=True).findings
    assert (finding.kind, finding.key, finding.harmless) == ("pack", "adopted", False)
    assert record.pack.sha256[:12] in finding.what


def test_a_file_that_differs_from_the_record_is_found(
    store: ArtifactStore, folder: Path, tmp_path: Path
) -> None:
    """The pack is what it says; the record promises another digest of a file in it."""
    record, pack = sample(tmp_path, 1)
    wrong = record.files[0].__class__(
        record.files[0].path, record.files[0].size, "0" * 32, record.pack.sha256
    )
    lying = record.model_copy(
        update={"fingerprint": MARK.digest, "files": (wrong, *record.files[1:])}
    )
    store.put_fingerprint(MARK.digest, MARK.dump())
    store.publish(lying, pack)
    (finding,) = inspect_store(store, deep=True).damage
    assert "content differs" in finding.what


def test_unreadable_records_are_found(store: ArtifactStore, folder: Path, tmp_path: Path) -> None:
    """Garbage is damage, unless a whole generation is above it; a later version's record is not."""
    record = publish(store, tmp_path)
    records = folder / f"v1/{MARK.digest}/artifacts"
    (records / "adopted/2.json").write_bytes(b"<html>")
    assert [f.kind for f in inspect_store(store).damage] == ["record"]
    publish(store, tmp_path, 5)
    done = inspect_store(store)
    assert done.damage == []
    assert [(f.kind, f.harmless) for f in done.findings] == [("superseded", True)]
    (records / "adopted/4.json").write_bytes(b'{"format": 7}')
    assert ("foreign", True) in [(f.kind, f.harmless) for f in inspect_store(store).findings]
    assert record.generation == 1


def test_orphans_and_half_uploads_are_found_once_they_are_old(folder: Path, tmp_path: Path) -> None:
    """They harm nobody; young ones may be on their way."""
    storage = AgedStorage(LocalStorage(folder))
    store = ArtifactStore(storage, Budget("", 5))
    publish(store, tmp_path)
    storage.create(f"v1/{MARK.digest}/packs/{'1' * 64}.tar.zst", b"xyz")
    assert inspect_store(store).findings == []
    (folder / f"v1/{MARK.digest}/packs/.tmp-half").write_bytes(b"x")
    storage.pass_time(YEAR)
    done = inspect_store(store)
    assert kinds(done) == [
        ("orphan", "no record names it (3 bytes)"),
        ("half upload", "began and never ended"),
    ]
    assert done.damage == []


def test_a_missing_and_a_wrong_fingerprint_are_found(
    store: ArtifactStore, folder: Path, tmp_path: Path
) -> None:
    """Without it nobody can say what differs."""
    publish(store, tmp_path, mark=False)
    assert kinds(inspect_store(store)) == [("fingerprint", "missing")]
    other = Fingerprint(components={"torch": "3"})
    store.put_fingerprint(MARK.digest, other.dump())
    assert kinds(inspect_store(store)) == [
        ("fingerprint", f"it has the digest {other.digest[:12]}")
    ]
    (folder / f"v1/{MARK.digest}/fingerprint.json").write_text("nonsense")
    assert [f.kind for f in inspect_store(store).damage] == ["fingerprint"]


# -- repairs --------------------------------------------------------------------------------------


def test_a_repair_adds_and_rewrites_nothing(
    store: ArtifactStore, folder: Path, cache: CacheDir, tmp_path: Path
) -> None:
    """One pack missing, one damaged, one record garbage: the root has all, and is published again.

    Every object that was there is there still, byte for byte, the damaged ones too.
    """
    records = [publish(store, tmp_path, n, key=f"adopted-{n}", mark=False) for n in range(3)]
    for record in records:
        restore(cache, store, record)
    pack_file(folder, records[0]).unlink()
    flip(pack_file(folder, records[1]))
    (folder / f"v1/{MARK.digest}/artifacts/adopted-2/2.json").write_bytes(b"garbage")
    before = bytes_of(folder)
    found = inspect_store(store, deep=True)
    assert len(found.damage) == 4
    repair_store(found, store, cache, MARK)
    assert len(found.repaired) == 4
    assert before.items() <= bytes_of(folder).items()
    after = inspect_store(store, deep=True)
    assert after.damage == []
    assert {f.kind for f in after.findings} == {"superseded"}
    assert store.latest(MARK.digest).records["adopted-2"].generation == 3
    for number, record in enumerate(records):
        assert_whole(store, record, tmp_path / f"out{number}")


def test_what_the_root_does_not_have_whole_stays_damaged(
    store: ArtifactStore, folder: Path, cache: CacheDir, tmp_path: Path
) -> None:
    """A damaged root repairs nothing, and a plan of something else adds no fingerprint."""
    record = publish(store, tmp_path, mark=False)
    restore(cache, store, record)
    flip(cache.root / record.files[0].path)
    pack_file(folder, record).unlink()
    found = inspect_store(store)
    repair_store(found, store, cache, Fingerprint(components={"torch": "3"}))
    assert found.repaired == []
    assert len(inspect_store(store).damage) == 2


def test_targets_that_share_files_share_them_after_a_repair(
    store: ArtifactStore, folder: Path, cache: CacheDir, tmp_path: Path
) -> None:
    """The second leans on the pack that was made for the first."""
    record = publish(store, tmp_path, key="adopted-0")
    part = record.model_copy(
        update={"key": "adopted-1", "files": record.files[:2], "pack": None, "generation": 1}
    )
    store.publish(part, None)
    for one in (record, part):
        restore(cache, store, one)
    pack_file(folder, record).unlink()
    found = inspect_store(store)
    repair_store(found, store, cache, None)
    assert inspect_store(store, deep=True).damage == []
    assert len(list((folder / f"v1/{MARK.digest}/packs").iterdir())) == 1


def test_a_marked_pack_is_a_pack_of_another_name(tmp_path: Path) -> None:
    """Same files, other name; plain tools read it."""
    (tmp_path / "a").write_bytes(b"x" * 1000)
    plain = write_pack(tmp_path, ["a"], tmp_path / "plain")
    marked = write_pack(tmp_path, ["a"], tmp_path / "marked", mark=b"adopted 2")
    assert plain.sha256 != marked.sha256
    with (tmp_path / "marked").open("rb") as file:
        assert sha256_of(file) == marked.sha256
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    read = [zstd.decompress((tmp_path / name).read_bytes()) for name in ("plain", "marked")]
    assert read[0] == read[1]


# -- a cache root ---------------------------------------------------------------------------------


def test_damage_in_a_root_is_found(store: ArtifactStore, cache: CacheDir, tmp_path: Path) -> None:
    """Missing files and other sizes at once, other bytes by reading, records that are none."""
    record = publish(store, tmp_path)
    restore(cache, store, record)
    assert inspect_root(cache, deep=True).findings == []
    flip(cache.root / record.files[0].path)
    assert [f.what for f in inspect_root(cache, deep=True).damage if f.key] == [
        f"{record.files[0].path}: content differs"
    ]
    (cache.root / record.files[1].path).unlink()
    assert [f.what for f in inspect_root(cache).damage if f.key] == [
        f"{record.files[1].path}: missing"
    ]
    broken = cache.root / f".compilecache/records/{MARK.digest}/adopted-9.json"
    broken.write_bytes(b"{}")
    assert "record" in [f.kind for f in inspect_root(cache).damage]


def test_a_root_gets_back_what_it_lacks(
    store: ArtifactStore, cache: CacheDir, tmp_path: Path
) -> None:
    """Missing files come from the store; a file with other bytes is not touched."""
    record = publish(store, tmp_path)
    restore(cache, store, record)
    (cache.root / record.files[1].path).unlink()
    flip(cache.root / record.files[0].path)
    kept = (cache.root / record.files[0].path).read_bytes()
    found = inspect_root(cache)
    repair_root(found, cache, store)
    assert found.repaired == [f"{MARK.digest[:12]} adopted: 1 files from the store"]
    assert (cache.root / record.files[0].path).read_bytes() == kept
    faults = cache.damaged(record.files)
    assert faults == (f"{record.files[0].path}: content differs",)


# -- the command ----------------------------------------------------------------------------------


def test_the_command(store: ArtifactStore, folder: Path, cache: CacheDir, tmp_path: Path) -> None:
    """0 when clean, 4 when damaged, and --repair leads from one to the other."""
    record = publish(store, tmp_path)
    restore(cache, store, record)
    runner = CliRunner(env={"COLUMNS": "80"})
    clean = runner.invoke(command.fsck, ["--store", str(folder)])
    assert clean.exit_code == 0, clean.output
    assert "1 fingerprint, 1 record, 1 pack" in clean.output.replace("\n", "")
    pack_file(folder, record).unlink()
    broken = runner.invoke(command.fsck, ["--store", str(folder)])
    assert broken.exit_code == 4
    assert max(map(len, broken.output.splitlines()[1:])) <= 80
    words = ["--store", str(folder), "--root", str(cache.root), "--remote", "--repair", "--json"]
    mended = runner.invoke(command.fsck, words)
    assert mended.exit_code == 0, mended.output
    data = json.loads(mended.stdout)["store"]
    assert data["repaired"] == [f"{MARK.digest[:12]} adopted: generation 2 from the root"]
    assert [f["harmless"] for f in data["findings"]] == [True]
