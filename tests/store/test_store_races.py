"""Real processes that publish at once, die in the middle, or fork."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from pathlib import Path

import pytest
from store_samples import FINGERPRINT, sample
from stores import Place, Publishers

from compilecache.artifact import Record
from compilecache.pack import sha256_of
from compilecache.store import ArtifactStore


def race(place: Place, seeds: list[int], folder: Path) -> list[Record]:
    """What as many processes as seeds say after publishing under one key at the same moment."""
    tasks = [place.task([seed], key="adopted") for seed in seeds]
    with Publishers(tasks, folder) as publishers:
        for number in range(len(seeds)):
            publishers.start(number)
    return [Record.parse(line.encode()) for n in range(len(seeds)) for line in publishers.said(n)]


def place_of(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A store that several processes can reach."""
    if kind == "s3":
        place: Place = request.getfixturevalue("s3_place")
        return place
    return Place(str(tmp_path / "store"))


@pytest.mark.parametrize("kind", ["local", "s3"])
def test_of_eight_equal_publishers_one_wins_and_all_succeed(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """All eight report the same record, first generation, written by one of them."""
    place = place_of(kind, request, tmp_path)
    records = race(place, [0] * 8, tmp_path)
    assert len(records) == 8
    assert len({record.dump() for record in records}) == 1
    assert dict(place.open().latest(FINGERPRINT).records) == {"adopted": records[0]}
    assert records[0].generation == 1


@pytest.mark.parametrize("kind", ["local", "s3"])
def test_two_contents_become_two_generations(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Publishers of different files neither overwrite nor multiply each other."""
    place = place_of(kind, request, tmp_path)
    records = race(place, [0, 1] * 4, tmp_path)
    assert sorted({record.generation for record in records}) == [1, 2]
    assert len({record.dump() for record in records}) == 2
    assert all(not one.same_content(other) for one, other in itertools.pairwise(records))


def test_a_killed_publisher_leaves_nothing_half_visible(tmp_path: Path) -> None:
    """After 24 SIGKILLs at random moments every record is whole and so is its pack."""
    place = Place(str(tmp_path / "store"))
    moments = random.Random(7)
    tasks = [place.task([number, 100], size=3_000_000) for number in range(24)]
    with Publishers(tasks, tmp_path) as publishers:
        for number, pid in enumerate(publishers.pids):
            publishers.start(number)
            time.sleep(moments.uniform(0, 0.15))
            os.kill(pid, signal.SIGKILL)
            published = assert_whole(place.open())
    assert 0 < published < 25
    left, pack = sample(tmp_path, 100, key="adopted-100", size=3_000_000)
    assert place.open().publish(left, pack).same_content(left)


def assert_whole(store: ArtifactStore) -> int:
    """Checks every record and every pack of the store; returns how many records there are."""
    view = store.latest(FINGERPRINT)
    assert view.faults == ()
    for record in view.records.values():
        for sha256 in {entry.pack for entry in record.files}:
            with store.open_pack(FINGERPRINT, sha256) as stream:
                assert sha256_of(stream) == sha256
    return len(view.records)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_store_works_after_a_fork(s3_place: Place, tmp_path: Path) -> None:
    """A child that inherited a used client gets its own instead of hanging (s3fs#914, #889)."""
    store = s3_place.open()
    record, pack = sample(tmp_path)
    store.publish(record, pack)
    child = os.fork()
    if child == 0:
        try:
            same = dict(store.latest(FINGERPRINT).records) == {"adopted": record}
        finally:
            os._exit(0 if same else 1)
    deadline = time.monotonic() + 20
    done = (0, 0)
    while done == (0, 0) and time.monotonic() < deadline:
        done = os.waitpid(child, os.WNOHANG)
        time.sleep(0.02)
    if done == (0, 0):
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert done == (child, 0)
