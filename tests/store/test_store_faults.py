"""Stores that are down, slow, full, read-only, careless or something else altogether."""

from __future__ import annotations

import errno
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sick_server import SickServer, sick_server
from store_samples import FINGERPRINT, sample
from stores import Place, Publishers

from compilecache.artifact import check_files
from compilecache.budget import Budget
from compilecache.errors import ChecksumMismatch, StoreUnavailable
from compilecache.fetch import fetch_packs
from compilecache.store import ArtifactStore


@pytest.fixture
def server() -> Iterator[SickServer]:
    """A server that does what a test tells it."""
    with sick_server() as running:
        yield running


def opened(server: SickServer, budget_seconds: float = 20) -> ArtifactStore:
    """A store on the sick server."""
    return Place("s3://b/p", server.options).open(budget_seconds)


def fails(act: Callable[[], object], said: str) -> str:
    """What the StoreUnavailable that ``act`` raises says; these words are in it."""
    with pytest.raises(StoreUnavailable, match=said) as caught:
        act()
    assert str(caught.value).endswith(".")
    return str(caught.value)


def test_a_burst_of_errors_is_survived(server: SickServer, tmp_path: Path) -> None:
    """s3fs#484: SlowDown, 500s and hang-ups between good answers cost time only."""
    store = opened(server)
    record, pack = sample(tmp_path)
    server.moods = ["SlowDown", "ok", "InternalError", "hang up", "ok", "SlowDown"]
    assert store.publish(record, pack) == record
    server.moods = ["hang up", "ok", "SlowDown"]
    assert dict(store.latest(FINGERPRINT).records) == {"adopted": record}


def test_a_transfer_that_breaks_goes_on(server: SickServer, tmp_path: Path) -> None:
    """A pack whose download is cut is read again, and every digest holds."""
    store = opened(server)
    record, pack = sample(tmp_path)
    store.publish(record, pack)
    server.moods = ["ok", "cut", "cut"]
    (tmp_path / "out").mkdir()
    fetch_packs(store, FINGERPRINT, record.files, tmp_path / "out")
    assert check_files(tmp_path / "out", record.files) == ()


@pytest.mark.parametrize("mood", ["SlowDown", "InternalError", "stall", "hang up", "html"])
def test_a_sick_store_costs_its_budget_once(server: SickServer, mood: str) -> None:
    """sccache#2820: whatever the sickness, once the budget is spent no call asks the store again."""
    server.mood = mood
    store = opened(server, budget_seconds=1.5)
    while "not tried" not in fails(lambda: store.latest(FINGERPRINT), "s3://b/p"):
        assert len(server.requests) < 40
    spent = len(server.requests)
    for _ in range(20):
        fails(lambda: store.latest(FINGERPRINT), "not tried")
        fails(lambda: store.fingerprints(), "not tried")
    assert len(server.requests) == spent


def test_a_store_that_is_down_is_said(tmp_path: Path) -> None:
    """Nothing listens: the address and the next step are in the error."""
    with sick_server() as server:
        store = opened(server, budget_seconds=1)
    fails(lambda: store.publish(*sample(tmp_path)), r"s3://b/p.*Check that")


def test_a_refusal_is_not_tried_again(server: SickServer, tmp_path: Path) -> None:
    """Access denied is said at once, after one request."""
    server.mood = "AccessDenied"
    store = opened(server)
    fails(lambda: store.latest(FINGERPRINT), r"permission denied.*rights")
    assert len(server.requests) == 1


def test_expired_credentials_are_fetched_anew_once(server: SickServer) -> None:
    """s3fs#500: one rebuilt client for an expired token; if that fails too, an error, no retries."""
    store = opened(server)
    server.moods = ["ExpiredToken"]
    assert store.entries(FINGERPRINT) == ()
    server.mood = "ExpiredToken"
    before = len(server.requests)
    fails(lambda: store.entries(FINGERPRINT), "expired")
    assert len(server.requests) == before + 2


def test_a_web_page_instead_of_a_record_is_a_fault(server: SickServer, tmp_path: Path) -> None:
    """The listing is right, the record is HTML: it is named, nothing crashes."""
    store = opened(server)
    store.publish(*sample(tmp_path))
    server.moods = ["ok", "html"]
    view = store.latest(FINGERPRINT)
    assert dict(view.records) == {}
    assert "not JSON" in view.faults[0]


def test_a_web_page_instead_of_a_pack_is_refused(server: SickServer, tmp_path: Path) -> None:
    """A pack that is something else leaves no file."""
    record, pack = sample(tmp_path)
    opened(server).publish(record, pack)
    store = opened(server, budget_seconds=1)
    (tmp_path / "out").mkdir()
    server.mood = "html"
    with pytest.raises((StoreUnavailable, ChecksumMismatch)):
        fetch_packs(store, FINGERPRINT, record.files, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_store_that_ignores_create_only_loses_nothing(server: SickServer, tmp_path: Path) -> None:
    """Where "only if absent" is ignored, what is there is still found first (s3fs#973)."""
    server.honours_create = False
    first, pack = sample(tmp_path, 1)
    second, other = sample(tmp_path, 2)
    opened(server).publish(first, pack)
    assert opened(server).publish(second, other).generation == 2
    assert opened(server).publish(first, pack) == first


def test_a_store_that_alters_bodies_is_found_out(server: SickServer, tmp_path: Path) -> None:
    """What reads back as other bytes was not published (boto3#4435)."""
    server.alters_bodies = True
    fails(lambda: opened(server).publish(*sample(tmp_path)), "does not give back")


def test_no_checksums_that_other_stores_do_not_know(server: SickServer, tmp_path: Path) -> None:
    """boto3#4392: none of botocore's own by default, since they break other stores; by option they come."""

    def checksums(place: Place) -> set[str]:
        server.headers.clear()
        place.open().publish(
            *sample(tmp_path, len(server.objects), key=f"adopted-{len(server.objects)}")
        )
        return {name for sent in server.headers for name in sent if "checksum" in name}

    assert checksums(Place("s3://b/p", server.options)) == set()
    chosen = {"request_checksum_calculation": "when_supported"}
    assert checksums(Place("s3://b/p", {**server.options, "config_kwargs": chosen}))


def test_an_answer_that_was_lost_is_not_a_conflict(server: SickServer, tmp_path: Path) -> None:
    """A record that arrived although its answer did not is recognised as our own."""
    store = opened(server)
    record, pack = sample(tmp_path)
    store.publish(record, pack)
    del server.objects[next(name for name in server.objects if name.endswith("/1.json"))]
    server.moods = ["ok", "ok", "ok", "cut"]
    assert store.publish(record, pack) == record


def test_a_missing_bucket_is_said(s3_endpoint: dict[str, str], tmp_path: Path) -> None:
    """A wrong address is no miss: it would be compiled for, for ever."""
    store = Place("s3://no-such-bucket/x", s3_endpoint).open()
    fails(lambda: store.latest(FINGERPRINT), "does not exist. Create the bucket")
    fails(lambda: store.publish(*sample(tmp_path)), "no-such-bucket")


def test_missing_credentials_are_said(
    server: SickServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No keys anywhere: the variables to set are named."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    place = Place("s3://b/p", {"endpoint_url": server.options["endpoint_url"]})
    fails(lambda: place.open().fingerprints(), "no credentials.*AWS_ACCESS_KEY_ID")


def test_a_file_in_the_place_of_a_store_is_said(tmp_path: Path) -> None:
    """A local store below a plain file is an error at once, not a miss."""
    (tmp_path / "file").write_text("x")
    store = ArtifactStore.open(tmp_path / "file")
    fails(lambda: store.latest(FINGERPRINT), "(?i)not a directory")
    fails(lambda: store.publish(*sample(tmp_path)), "(?i)not a directory")


def test_a_read_only_directory_is_said_and_still_read(tmp_path: Path) -> None:
    """Publishing says permission denied at once; reading goes on."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "store")
        record, pack = sample(tmp_path)
        ArtifactStore.open(root).publish(record, pack)
        for path in (root, *root.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        Path(folder).chmod(0o755)
        task = Place(str(root)).task([0, 1], key="adopted")
        if os.getuid() == 0:
            task["user"] = 65534
        with Publishers([task], Path(folder)) as publishers:
            publishers.start(0)
        for path in (root, *root.rglob("*")):
            path.chmod(0o700)
        same, other = map(json.loads, publishers.said(0))
        assert same["generation"] == 1
        assert "permission denied" in other["error"].lower()


def test_a_full_disk_is_said_at_once() -> None:
    """No space: one attempt, and the remedy."""
    tried = []

    def write() -> None:
        tried.append(1)
        raise OSError(errno.ENOSPC, "No space left on device")

    fails(lambda: Budget("/store", 60).call("record", write), "full.*Free space")
    assert len(tried) == 1


def test_only_lost_time_counts() -> None:
    """Slow answers that succeed do not use up the budget; failures and waits do."""
    budget = Budget("/store", 5)
    budget.call("slow", lambda: time.sleep(0.2))
    assert budget.left == 5
    answers = iter([OSError(errno.EIO, "flaky"), OSError(errno.EIO, "flaky"), None])

    def flaky() -> str:
        if error := next(answers):
            raise error
        return "at last"

    assert budget.call("flaky", flaky) == "at last"
    assert 2 < budget.left < 4.95
