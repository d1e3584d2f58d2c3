"""What goes to a store and comes from it: in little memory, going on where it stopped, and shown."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from botocore.utils import parse_timestamp
from sick_server import SickServer, sick_server
from store_samples import FINGERPRINT, harvest, packed, sample
from stores import Place

from compilecache.artifact import Record, check_files
from compilecache.cachedir import CacheDir
from compilecache.errors import StoreUnavailable
from compilecache.exchange import Exchange
from compilecache.fetch import fetch_packs
from compilecache.fingerprint import Fingerprint
from compilecache.progress import SAID_EVERY, BarProgress, LineProgress, Pace
from compilecache.s3 import PART_BYTES
from compilecache.s3client import moment
from compilecache.store import ArtifactStore

MARK = Fingerprint({"torch": "2.13.0"})
HERE = Path(__file__).parent
MEGABYTE = 1 << 20


@pytest.fixture
def server() -> Iterator[SickServer]:
    """A server that does what a test tells it."""
    with sick_server() as running:
        yield running


def opened(server: SickServer, budget_seconds: float = 20, **options: object) -> ArtifactStore:
    """A store on the sick server."""
    return ArtifactStore.open(
        "s3://b/p", budget_seconds=budget_seconds, storage_options={**server.options, **options}
    )


def asked(server: SickServer, words: str) -> list[str]:
    """The requests that have these words, in order."""
    return [request for request in server.requests if re.search(words, request)]


# -- memory ---------------------------------------------------------------------------------------

WEIGH = """
import json, random, sys
from pathlib import Path
from store_samples import FINGERPRINT, sample
from compilecache.fetch import fetch_packs
from compilecache.store import ArtifactStore

def memory(name):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024

def peak(act):
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    act()
    return memory("VmHWM") - before

url, options, folder = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
store = ArtifactStore.open(url, storage_options=options)
store.publish(*sample(folder, 1, key="adopted-1"))
record, pack = sample(folder, size=int(sys.argv[4]))
published = peak(lambda: store.publish(record, pack))
(folder / "out").mkdir()
restored = peak(lambda: fetch_packs(store, FINGERPRINT, record.files, folder / "out"))
print(json.dumps([published, restored, pack.stat().st_size]))
"""


def test_memory_does_not_grow_with_the_pack(s3_place: Place, tmp_path: Path) -> None:
    """A pack of 100 MB goes up and comes back in a fresh process within 64 MiB and one part."""
    arguments = [s3_place.url, json.dumps(dict(s3_place.options)), tmp_path, 34 * MEGABYTE]
    run = subprocess.run(
        [sys.executable, "-c", WEIGH, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (HERE.parents[1], HERE)))},
        capture_output=True,
        check=True,
        text=True,
    )
    published, restored, size = json.loads(run.stdout)
    assert size > 100_000_000
    assert published < 64 * MEGABYTE + PART_BYTES
    assert restored < 64 * MEGABYTE + PART_BYTES


# -- going on where it stopped --------------------------------------------------------------------


def test_a_download_goes_on_at_its_place(server: SickServer, tmp_path: Path) -> None:
    """What follows a broken answer is asked for from the byte where it broke, and nothing twice."""
    store = opened(server)
    record, pack = sample(tmp_path, size=400_000)
    store.publish(record, pack)
    server.requests.clear()
    server.headers.clear()
    server.moods = ["cut", "cut"]
    (tmp_path / "out").mkdir()
    fetch_packs(store, FINGERPRINT, record.files, tmp_path / "out")
    assert check_files(tmp_path / "out", record.files) == ()
    half = pack.stat().st_size // 2
    places = [headers.get("range") for headers in server.headers]
    assert places == [None, f"bytes={half}-", f"bytes={half + (pack.stat().st_size - half) // 2}-"]


def test_an_upload_goes_on_with_the_parts_that_lack(server: SickServer, tmp_path: Path) -> None:
    """Of a pack in several parts only those that failed are sent again, in the same upload."""
    store = opened(server)
    record, pack = sample(tmp_path, size=3 * PART_BYTES // 2)
    lookups_and_beginning = ["ok"] * 2
    server.moods = [*lookups_and_beginning, "ok", "SlowDown", "hang up", "ok"]
    store.publish(record, pack)
    assert server.objects[next(name for name in server.objects if "/packs/" in name)] == (
        pack.read_bytes()
    )
    assert len(asked(server, r"POST .*\?uploads")) == 1
    parts = -(-pack.stat().st_size // PART_BYTES)
    assert parts == 5
    assert len(asked(server, "PUT .*partNumber")) == parts + 2


def test_what_is_there_is_not_sent_again(server: SickServer, tmp_path: Path) -> None:
    """A pack that the store holds is compared, and its bytes stay where they are."""
    record, pack = sample(tmp_path)
    for _ in range(2):
        assert opened(server).publish(record, pack) == record
    assert len(asked(server, "PUT .*/packs/")) == 1


def different(store: ArtifactStore, folder: Path, count: int) -> list[Record]:
    """Targets whose files lie beside each other in one root."""
    made = []
    for seed in range(count):
        files = {f"{seed:02d}/kernel{n}.cubin": os.urandom(20_000) for n in range(3)}
        pack, entries, info = packed(folder / str(seed), files)
        record = Record(
            fingerprint=MARK.digest,
            target=None,
            key=f"adopted-{seed}",
            files=tuple(entries.values()),
            pack=info,
        )
        made.append(store.publish(record, pack))
    return made


RESTORE = """
import json, sys
from pathlib import Path
from test_transfers import restored
from compilecache.store import ArtifactStore
restored(ArtifactStore.open("s3://b/p", storage_options=json.loads(sys.argv[1])), Path(sys.argv[2]))
"""


def restored(store: ArtifactStore, root: Path) -> Exchange:
    """An exchange that has brought what the store holds into a root."""
    cache = CacheDir(root)
    cache.create()
    exchange = Exchange(cache, store, MARK, [f"adopted-{number}" for number in range(6)])
    exchange.look()
    exchange.restore()
    return exchange


def killed(server: SickServer, root: Path) -> None:
    """A process that restores and is killed when half of the packs have come."""
    process = subprocess.Popen(
        [sys.executable, "-c", RESTORE, json.dumps(server.options), root],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (HERE.parents[1], HERE)))},
    )
    deadline = time.monotonic() + 60
    while len(list(root.rglob("arrivals/*/*.cubin"))) < 9 and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()


def cut_off(server: SickServer, root: Path) -> None:
    """A restore whose store falls silent when half of the packs have come."""
    with pytest.raises(StoreUnavailable):
        restored(opened(server, budget_seconds=1), root)


@pytest.mark.parametrize("interrupted", [killed, cut_off])
def test_a_restore_goes_on_with_the_packs_that_lack(
    server: SickServer, tmp_path: Path, interrupted: Callable[[SickServer, Path], None]
) -> None:
    """After a kill or a store that failed, packs that had come whole are not fetched again."""
    records = different(opened(server), tmp_path, 6)
    server.allowed = 3
    interrupted(server, tmp_path / "root")
    assert not (tmp_path / "root" / "00").exists()
    server.allowed = None
    server.requests.clear()
    exchange = restored(opened(server), tmp_path / "root")
    assert exchange.missing == frozenset()
    assert len(asked(server, "GET .*/packs/")) == 3
    assert all(check_files(tmp_path / "root", record.files) == () for record in records)
    assert list((tmp_path / "root/.compilecache/staging").iterdir()) == []


def test_what_arrived_damaged_is_fetched_again(tmp_path: Path) -> None:
    """Bytes that an interrupted restore has left count by their digest only."""
    store = ArtifactStore.open(tmp_path / "store")
    record, pack = sample(tmp_path)
    store.publish(record, pack)
    (tmp_path / "out").mkdir()
    fetch_packs(store, FINGERPRINT, record.files, tmp_path / "out")
    whole = harvest(tmp_path / "out")
    victim = tmp_path / "out" / record.files[1].path
    victim.write_bytes(victim.read_bytes()[:-1] + b"?")
    fetch_packs(store, FINGERPRINT, record.files, tmp_path / "out")
    assert harvest(tmp_path / "out") == whole


# -- options --------------------------------------------------------------------------------------


def sent(server: SickServer, name: str) -> set[str | None]:
    """What the requests that wrote something said under a header."""
    pairs = zip(server.requests, server.headers, strict=True)
    return {headers.get(name) for request, headers in pairs if request.startswith("PUT")}


def test_no_checksums_unless_asked_for(
    server: SickServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other stores than AWS's take a plain body (boto3#4392); a variable or an option adds checksums."""
    opened(server).publish(*sample(tmp_path))
    assert sent(server, "x-amz-checksum-crc32") == {None}
    assert sent(server, "content-encoding") == {None}
    for way in ("option", "variable"):
        server.objects.clear()
        server.requests.clear()
        server.headers.clear()
        wanted = {"request_checksum_calculation": "when_supported"}
        options: dict[str, object] = {"config_kwargs": wanted} if way == "option" else {}
        if way == "variable":
            monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_supported")
        opened(server, **options).publish(*sample(tmp_path))
        assert None not in sent(server, "x-amz-checksum-crc32")


def test_options_reach_the_requests_they_are_for(server: SickServer, tmp_path: Path) -> None:
    """Encryption goes with what is written, the payer with everything; others are refused by name."""
    store = opened(
        server,
        s3_additional_kwargs={"ServerSideEncryption": "aws:kms"},
        requester_pays=True,
        client_kwargs={"region_name": "eu-west-1"},
    )
    store.publish(*sample(tmp_path))
    assert sent(server, "x-amz-server-side-encryption") == {"aws:kms"}
    read = [h for r, h in zip(server.requests, server.headers, strict=True) if r.startswith("GET")]
    assert {h.get("x-amz-request-payer") for h in read} == {"requester"}
    assert {h.get("x-amz-server-side-encryption") for h in read} == {None}
    assert all("/eu-west-1/s3/" in headers["authorization"] for headers in server.headers)
    with pytest.raises(StoreUnavailable, match=r"no option 'secrt'.*secret"):
        opened(server, secrt="x")


def test_nobody_signs_for_an_open_bucket(server: SickServer, tmp_path: Path) -> None:
    """``anon``: no credentials are looked for, and none are sent."""
    opened(server, anon=True).publish(*sample(tmp_path))
    assert not any("authorization" in headers for headers in server.headers)


@pytest.mark.parametrize(
    "options", [{"profile": "nobody"}, {"endpoint_url": "nowhere"}, {"config_kwargs": {"x": 1}}]
)
def test_options_that_are_wrong_are_said_at_once(
    server: SickServer, options: dict[str, object]
) -> None:
    """One that no client can be made with is no store that is down."""
    with pytest.raises(StoreUnavailable, match="Mend the option"):
        opened(server, **options).fingerprints()


# -- progress -------------------------------------------------------------------------------------


def test_both_ways_say_how_far_they_are(place: Place, tmp_path: Path) -> None:
    """On every kind of store: bytes of packs while publishing, of files while restoring, to the end."""
    heard: list[tuple[str, int, int]] = []
    store = place.open()
    store.listener = lambda *told: heard.append(told)
    record, pack = sample(tmp_path, size=4_000_000)
    store.publish(record, pack)
    (tmp_path / "out").mkdir()
    fetch_packs(store, FINGERPRINT, record.files, tmp_path / "out")
    ends = {phase: (done, total) for phase, done, total in heard}
    assert ends == {
        "publishing": (pack.stat().st_size,) * 2,
        "restoring": (12_000_000, 12_000_000),
    }
    for phase in ends:
        steps = [done for told, done, _ in heard if told == phase]
        assert steps == sorted(steps)


def test_lines_say_bytes_rate_and_what_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal: a line now and then, none for what is done at once."""
    times = iter([0.0, 5.0, SAID_EVERY, SAID_EVERY + 1, 2 * SAID_EVERY, 21.0, 40.0, 41.0])
    lines = LineProgress()
    lines._pace = Pace(lambda: next(times))
    for done in (0, 50, 100, 110, 400):
        lines.moving("restoring", done * 1_000_000, 500_000_000)
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "restoring: 100.0 of 500.0 MB, 10.0 MB/s, about 40 s left",
        "restoring: 400.0 of 500.0 MB, 20.0 MB/s, about 5 s left",
    ]
    lines.moving("restoring", 500_000_000, 500_000_000)
    lines.moving("publishing", 10_000_000, 20_000_000)  # another transfer begins at its own place
    lines.moving("publishing", 20_000_000, 20_000_000)
    assert capsys.readouterr().err == ""


def test_a_terminal_shows_bytes_and_rate(capsys: pytest.CaptureFixture[str]) -> None:
    """A bar below the one of the targets, within 80 columns, gone when the transfer has ended."""
    with BarProgress() as bar:
        bar.begin(12)
        bar.doing("restoring", "from s3://some-bucket/with/a/rather/long/prefix/that/is/cut")
        bar.moving("restoring", 0, 500_000_000)
        bar.moving("restoring", 120_000_000, 500_000_000)
        shown = bar.text(80)
        bar.moving("restoring", 500_000_000, 500_000_000)
        after = bar.text(80)
    assert "120.0/500.0 MB" in shown
    assert "/s" in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert "MB" not in after
    assert "0/12" in after
    capsys.readouterr()


@pytest.mark.parametrize(
    "text",
    [
        "2026-11-30T12:00:00.000Z",
        "2026-11-30T12:00:00+00:00",
        "Mon, 30 Nov 2026 12:00:00 GMT",
        "1796040000",
        1796040000,
    ],
)
def test_times_are_read_as_botocore_reads_them(text: object) -> None:
    """In every form that a server may write."""
    assert moment(text) == parse_timestamp(text)


def test_what_is_no_time_is_no_time() -> None:
    """As it was without us."""
    with pytest.raises(ValueError, match="Invalid timestamp"):
        moment("yesterday")
