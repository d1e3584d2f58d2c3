"""``doctor`` and stores: what a store does that it should not, seen by writing one object twice."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sick_server import SickServer, sick_server

from compilecache.doctor.finding import Finding, Level, worst
from compilecache.doctor.store import check_store
from compilecache.storage import LocalStorage, MemoryStorage, Storage, Stored, open_storage


def said(findings: list[Finding], level: Level, words: str) -> Finding:
    """The one finding of a level that has these words."""
    (found,) = [f for f in findings if f.level == level and words in f.what]
    assert found.why.endswith(".")
    return found


def test_a_store_that_is_fine(place: object) -> None:
    """Each kind: it answers, creates once, tells the time, and keeps nothing of the visit."""
    storage = open_storage(place.url, patience=10, options=place.options)
    found = list(check_store(storage))
    assert [f.level for f in found] == ["ok", "ok", "ok"]
    assert storage.walk("probes") == {}


@pytest.fixture
def server() -> Iterator[SickServer]:
    """An S3 server that misbehaves on request."""
    with sick_server() as running:
        yield running


def bucket(server: SickServer) -> Storage:
    """Its bucket."""
    return open_storage("s3://b/p", patience=5, options=server.options)


def test_a_store_that_overwrites(server: SickServer) -> None:
    """It ignores "only if absent": said, with what follows from it. It tells no time."""
    server.honours_create = False
    found = list(check_store(bucket(server)))
    assert "at once" in said(found, "note", "overwrites").why
    assert not [f for f in found if "clock" in f.what]


def test_a_store_that_alters_bodies(server: SickServer) -> None:
    """Broken, whatever else it can do."""
    server.alters_bodies = True
    said(list(check_store(bucket(server))), "error", "other bytes")


def test_a_store_that_does_not_answer(server: SickServer) -> None:
    """Refused, or silent: one error with the next step, within the budget."""
    server.mood = "AccessDenied"
    assert said(list(check_store(bucket(server))), "error", "listing").fix
    server.mood = "stall"
    began = time.monotonic()
    storage = open_storage("s3://b/p", patience=0.5, options=server.options)
    said(list(check_store(storage, budget_seconds=0.5)), "error", "listing")
    assert time.monotonic() - began < 5


def test_a_store_that_can_only_be_read(server: SickServer) -> None:
    """A note: trainers need no more."""
    server.moods = ["ok", "AccessDenied"]
    found = list(check_store(bucket(server)))
    assert "only restores" in said(found, "note", "a probe").why
    # A busy machine may be slow to answer, and that is said as well.
    assert worst([one for one in found if "answer" not in one.what]) == "note"


class Full(LocalStorage):
    """A store without room."""

    def create(self, name: str, data: bytes) -> bool:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_store(tmp_path: Path) -> None:
    """No right thing for anybody: a warning."""
    said(list(check_store(Full(tmp_path))), "warning", "it is full")


def test_a_probe_that_stays(server: SickServer) -> None:
    """Who warms needs no right to delete: the server knows no DELETE."""
    found = list(check_store(bucket(server)))
    assert "nothing reads" in said(found, "note", "stays").why
    assert len(server.objects) == 1


class Shifted(LocalStorage):
    """A store whose clock goes wrong."""

    seconds = 0.0

    def survey(self, folder: str) -> dict[str, Stored]:
        found = super().survey(folder)
        return {name: Stored(s.size, s.modified + self.seconds) for name, s in found.items()}


@pytest.mark.parametrize(("seconds", "words"), [(3600.0, "behind"), (-3600.0, "ahead of")])
def test_clocks_that_differ(tmp_path: Path, seconds: float, words: str) -> None:
    """By how much, and which is ahead."""
    storage = Shifted(tmp_path)
    storage.seconds = seconds
    found = said(list(check_store(storage)), "warning", words)
    assert "3599 s" in found.what or "3600 s" in found.what
    storage.seconds = 10.0
    assert worst(check_store(storage)) == "ok"


class Slow(MemoryStorage):
    """A store that takes its time."""

    def folders(self, folder: str) -> list[str]:
        time.sleep(0.05)
        return super().folders(folder)


def test_a_slow_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning with the time."""
    monkeypatch.setattr("compilecache.doctor.store.SLOW_SECONDS", 0.02)
    said(list(check_store(Slow("slow"))), "warning", "to answer")
