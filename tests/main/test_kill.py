"""Processes that die in the middle, and processes that start at once: nothing is half there."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
from places import Cold, Place
from processes import Running, Template
from workloads import plan

from compilecache.artifact import Record, check_files
from compilecache.cachedir import CacheDir
from compilecache.errors import UnsafePath
from compilecache.fetch import fetch_packs
from compilecache.remains import sweep, unfinished
from compilecache.rootfolder import OWN
from compilecache.store import ArtifactStore

KILLS = 12


def store_records(store: Path) -> list[Record]:
    """Every record of a store; one that cannot be read fails the test."""
    return [Record.parse(path.read_bytes()) for path in sorted(store.glob("v1/*/artifacts/*/*"))]


def assert_whole(place: Place, scratch: Path) -> None:
    """What the root and the store call complete is, to the last byte."""
    for path in place.root.glob(f"{OWN}/records/*/*.json"):
        record = Record.parse(path.read_bytes())
        assert check_files(place.root, record.files) == (), record.key
    store = ArtifactStore.open(place.store)
    for record in store_records(place.store):
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        fetch_packs(store, record.fingerprint, record.files, scratch)
        assert check_files(scratch, record.files) == (), record.key


def until_said(process: Running, word: str) -> None:
    """Waits until the process has written a word to standard error, or has ended."""
    while process.running and word not in process.err:
        time.sleep(0.005)


def test_killed_at_any_moment(fresh: Template, cold: Cold, place: Place, tmp_path: Path) -> None:
    """SIGKILL of a warm-up, or of all its processes, a dozen times; then one that goes on."""
    chance = random.Random(7)
    place.write(plan("product", list(range(2, 16))))
    cold.seed(place.root)
    for number in range(KILLS):
        # Alone: a root that is gone takes the name of its lock along, and its claims would be waited for.
        process = fresh.begin("warm", *place.words, "--no-share")
        until_said(process, "targets")
        time.sleep(chance.uniform(0, 1.2))
        if number % 2:
            process.kill(signal.SIGKILL)
        else:
            process.kill_all()
        process.wait()
        assert_whole(place, tmp_path / "scratch")
        if number % 4 == 3:
            shutil.rmtree(place.root)
            cold.seed(place.root)
    known = {record.key for record in store_records(place.store)}
    last = fresh.command("warm", *place.words, "--json")
    assert last.code == 0, last.err
    compiled = {row["key"] for row in last.json["targets"] if row["status"] == "compiled"}
    assert compiled <= {row["key"] for row in last.json["targets"]} - known
    assert last.json["gave_up"] == []
    assert len(store_records(place.store)) == 14
    assert_whole(place, tmp_path / "scratch")


def test_terminated(fresh: Template, cold: Cold, place: Place) -> None:
    """SIGTERM: one line, exit code 143, the lock is free, finished targets are kept."""
    place.write(plan("product", list(range(2, 40))))
    cold.seed(place.root)
    process = fresh.begin("warm", *place.words)
    until_said(process, "] compiled")
    process.kill(signal.SIGTERM)
    ended = process.wait()
    assert ended.code == 143
    assert ended.err.splitlines()[-1].startswith("error: terminated; finished targets are kept")
    assert "Traceback" not in ended.err
    with CacheDir(place.root).lock("mine", timeout=0):
        assert store_records(place.store)


def test_killed_while_it_is_put_in_place(fresh: Template, warmed: Place, tmp_path: Path) -> None:
    """SIGKILL during restores: no record without its files, and nothing left in staging later.

    fsd#74: a download that went to its final name was taken for a whole one.
    """
    chance = random.Random(3)
    for _ in range(6):
        shutil.rmtree(warmed.root)
        process = fresh.begin("restore", *warmed.words)
        while process.running and not (warmed.root / OWN / "staging").exists():
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.03))
        process.kill(signal.SIGKILL)
        process.wait()
        assert_whole(warmed, tmp_path / "scratch")
    ended = fresh.command("restore", *warmed.words, "--json")
    assert ended.code == 0, ended.err
    assert ended.json["missing"] == []
    assert list((warmed.root / OWN / "staging").iterdir()) == []


def test_half_a_library_is_moved_aside(fresh: Template, warmed: Place) -> None:
    """A killed linker leaves one, and loading it would end every later start with SIGBUS."""
    shutil.rmtree(warmed.store)
    shutil.rmtree(warmed.root / OWN)
    halves = sorted(warmed.root.glob("??/*.main.so"))[:2]
    for path in halves:
        os.truncate(path, 5000)
    ended = fresh.command("warm", *warmed.words, "--json")
    assert ended.code == 0, ended.err
    for path in halves:
        assert any(path.name in text for text in ended.json["gave_up"])
    assert fresh.command("verify", *warmed.words[:-2]).code == 0


@pytest.mark.parametrize("data", [b"", b"\x7fELF", b"\0" * 5000])
def test_what_no_linker_finished(tmp_path: Path, data: bytes) -> None:
    """Empty, a header's beginning, a hole: none is a library. Whole ones and other files are left."""
    cache = CacheDir(tmp_path)
    cache.prepare()
    (tmp_path / "ab").mkdir()
    whole = Path(os.__file__).parent / "lib-dynload"
    shutil.copyfile(next(whole.glob("*.so")), tmp_path / "ab" / "whole.so")
    (tmp_path / "ab" / "source.cpp").write_text("int main;")
    (tmp_path / "ab" / "empty.py").touch()
    (tmp_path / "ab" / "half.so").write_bytes(data)
    assert unfinished(cache) == ["ab/empty.py", "ab/half.so"]
    assert sweep(cache) == ["ab/empty.py", "ab/half.so"]
    assert unfinished(cache) == []
    assert sorted(cache.files()) == ["ab/source.cpp", "ab/whole.so"]


def test_starts_at_once_compile_each_target_once(fresh: Template, cold: Cold, place: Place) -> None:
    """vllm#24601: three pods start on one directory; one compiles, the others wait and load (vllm#18851)."""
    place.write(plan("product", [2, 3, 4]))
    cold.seed(place.root)
    processes = [fresh.begin("warm", *place.words, "--json") for _ in range(3)]
    ended = [process.wait() for process in processes]
    assert [one.code for one in ended] == [0, 0, 0], ended[0].err
    by_target = list(zip(*(one.json["targets"] for one in ended), strict=True))
    for rows in by_target:
        assert [row["status"] for row in rows].count("compiled") == 1
        assert sum(bool(row["evidence"]["misses"]) for row in rows) == 1
    assert {record.generation for record in store_records(place.store)} == {1}


def test_one_writer_among_many_threads_of_readers(warmed: Place) -> None:
    """Readers that look while a writer activates see whole targets or none."""
    store, root = ArtifactStore.open(warmed.store), warmed.folder / "other"
    cache = CacheDir(root)
    cache.prepare()
    records = store_records(warmed.store)
    faults: list[str] = []
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            for record in cache.records(records[0].fingerprint).values():
                faults.extend(cache.damaged(record.files))

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    try:
        for record in records:
            with cache.lock("writing", timeout=60), cache.staging() as staged:
                absent = [e for e in record.files if not (root / e.path).exists()]
                fetch_packs(store, record.fingerprint, absent, staged)
                cache.activate(staged, absent)
                cache.keep_record(record, published=True)
    finally:
        stop.set()
        for reader in readers:
            reader.join()
    assert faults == []
    assert len(cache.records(records[0].fingerprint)) == len(records)


def test_a_link_in_a_cache_is_never_followed(warmed: Place) -> None:
    """A proof copies regular files only; a link is named."""
    from compilecache.proof import copy_of

    (warmed.root / "ab").mkdir(exist_ok=True)
    (warmed.root / "ab" / "link.so").symlink_to("/etc/passwd")
    with pytest.raises(UnsafePath, match="is a link"), copy_of(warmed.root, ["ab/link.so"]):
        pass
