"""Claims: one compiles, the others wait; the dead are overtaken; nothing is lost when it cannot work."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from pods import LIBRARY, MARK, Clock, Pod, targets, together
from sick_server import SickServer, sick_server
from store_samples import FINGERPRINT, sample
from stores import HERE, Place

from compilecache.budget import Budget
from compilecache.cachedir import CacheDir
from compilecache.claims import LEASE_SECONDS, Claims, Held
from compilecache.errors import StoreUnavailable
from compilecache.exchange import Exchange
from compilecache.storage import LocalStorage, MemoryStorage
from compilecache.store import ArtifactStore

KEY = "cpu-forward-train-1"


@pytest.fixture
def server() -> Iterator[SickServer]:
    """A server that does what a test tells it."""
    with sick_server() as running:
        yield running


class Counting(MemoryStorage):
    """Counts what is asked, and forbids listing."""

    def __init__(self) -> None:
        super().__init__(uuid.uuid4().hex)
        self.asked = 0

    def read(self, name: str, limit: int) -> bytes:
        self.asked += 1
        return super().read(name, limit)

    def create(self, name: str, data: bytes) -> bool:
        self.asked += 1
        return super().create(name, data)

    def walk(self, folder: str) -> dict[str, int]:
        raise AssertionError("claims list nothing")


@pytest.fixture
def counting() -> Counting:
    """A store in memory that counts requests."""
    return Counting()


@pytest.fixture
def chain(counting: Counting) -> ArtifactStore:
    """A client of it."""
    return ArtifactStore(counting, Budget("memory://", 5))


def claims(
    store: ArtifactStore,
    clock: Clock | None = None,
    *,
    fingerprint: str = FINGERPRINT,
    **more: object,
) -> Claims:
    """Another process, as far as the store can tell."""
    return Claims(store, fingerprint, clock=clock or Clock(), **more)  # type: ignore[arg-type]


def held(by: Claims, key: str = KEY) -> Held:
    """A claim that is free for the taking."""
    taken = by.take(key)
    assert taken is not None
    return taken


# -- chains ----------------------------------------------------------------------------------------


def test_of_many_claimers_one_wins(place: Place) -> None:
    """Eight threads with clients of their own on every kind of store: each target goes to one."""
    keys = [f"cpu-forward-train-{n}" for n in range(4)]
    won: list[str] = []
    start = threading.Barrier(8)

    def claim() -> None:
        own = claims(place.open())
        start.wait()
        won.extend(key for key in keys if own.take(key))

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == keys


def test_beats_keep_a_claim(chain: ArtifactStore) -> None:
    """However long it takes, and whatever the clocks of the two machines say."""
    ours, theirs = Clock(), Clock(start=1e9)
    holder, waiter = held(claims(chain, theirs)), claims(chain, ours)
    for _ in range(20):
        assert waiter.take(KEY) is None
        ours.now += LEASE_SECONDS - 1
        theirs.now -= 1e6
        assert holder.beat()
    assert waiter.seen(KEY)[1] == 19 * (LEASE_SECONDS - 1) + LEASE_SECONDS - 1


def test_a_dead_holder_is_overtaken_once(chain: ArtifactStore) -> None:
    """On the waiter's own clock, by one of two; the dead one learns of it should it live on."""
    clock = Clock()
    dead = held(claims(chain))
    dead.beat()
    first, second = claims(chain, clock), claims(chain, clock)
    assert first.take(KEY) is second.take(KEY) is None
    clock.now = LEASE_SECONDS - 0.1
    assert first.take(KEY) is None
    clock.now = LEASE_SECONDS
    taken = [one.take(KEY) for one in (first, second)]
    assert [one is not None for one in taken] == [True, False]
    assert not dead.beat()
    assert dead.overtaken
    dead.end("published")
    assert second.look(KEY).claim == first.look(KEY).claim
    assert first.look(KEY).claim.state == "held"


def test_a_holder_that_hangs_is_overtaken_too(chain: ArtifactStore) -> None:
    """It beats for ever and makes nothing: patience has an end."""
    clock = Clock()
    hung, waiter = held(claims(chain)), claims(chain, clock, patience=100)
    assert waiter.take(KEY) is None
    for _ in range(9):
        clock.now += 10
        hung.beat()
        assert waiter.take(KEY) is None
    clock.now += 10
    hung.beat()
    assert waiter.take(KEY) is not None


def test_who_fails_says_so(chain: ArtifactStore) -> None:
    """Nobody waits for the time-out; after two failures nobody waits for anybody."""
    held(claims(chain)).end("failed")
    other = claims(chain)
    held(other).end("failed")
    third = claims(chain)
    assert third.take(KEY) is None
    assert third.hopeless(KEY)
    assert not other.hopeless("cpu-forward-train-2")


def test_what_was_given_back_is_free(chain: ArtifactStore) -> None:
    """An interrupted warm-up did not fail."""
    held(claims(chain)).end("free")
    other = claims(chain)
    assert held(other).after == "free"
    assert other.look(KEY).claim.failures == 0


def test_the_holder_of_our_own_lock_is_dead(chain: ArtifactStore) -> None:
    """Killed and started again on its root, nobody waits: only one can have held that lock."""
    held(claims(chain, place="lock"))
    assert claims(chain, place="other").take(KEY) is None
    assert claims(chain).take(KEY) is None
    assert claims(chain, place="lock").take(KEY) is not None


def test_the_name_of_a_lock(tmp_path: Path) -> None:
    """The same as long as the lock is there, another for every root, none before there is one."""
    roots = [CacheDir(tmp_path / name) for name in "ab"]
    for root in roots:
        root.prepare()
    assert roots[0].lock_name() == ""
    with roots[0].lock("x"), roots[1].lock("x"):
        names = [root.lock_name() for root in (*roots, CacheDir(tmp_path / "a"))]
    assert names[0] == names[2] != names[1]


def test_the_end_of_a_long_chain_takes_few_requests(
    chain: ArtifactStore, counting: Counting
) -> None:
    """Ten minutes of beats cost a newcomer a dozen requests, and none is a listing."""
    holder = held(claims(chain))
    for _ in range(60):
        holder.beat()
    newcomer, counting.asked = claims(chain), 0
    assert newcomer.take(KEY) is None
    assert counting.asked <= 16
    assert newcomer.look(KEY).claim.beat == 60
    counting.asked = 0
    newcomer.take(KEY)
    assert counting.asked == 1


def test_what_cannot_be_read_is_a_holder(chain: ArtifactStore) -> None:
    """Garbage in a chain is waited for like anybody, then overtaken."""
    clock = Clock()
    chain.create(FINGERPRINT, f"claims/{KEY}/1.json", b"<html>")
    waiter = claims(chain, clock)
    assert waiter.take(KEY) is None
    assert str(waiter.seen(KEY)[0]) == "a process that has no name"
    clock.now = LEASE_SECONDS
    assert waiter.take(KEY) is not None


class Forgetful(LocalStorage):
    """Writes, and loses the answer."""

    loses = 1

    def create(self, name: str, data: bytes) -> bool:
        made = super().create(name, data)
        if self.loses:
            self.loses -= 1
            raise OSError(errno.EIO, "the connection was lost")
        return made


def test_a_lost_answer_is_no_lost_claim(tmp_path: Path) -> None:
    """What stands there is ours, so it was won."""
    store = ArtifactStore(Forgetful(tmp_path), Budget("x", 20))
    assert claims(store).take(KEY) is not None
    assert claims(store).take(KEY) is None


def test_beats_come_by_themselves(place: Place) -> None:
    """In a thread, until the claim ends."""
    holder, waiter = held(claims(place.open(), every=0.02)), claims(place.open())
    holder.start()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and (waiter.look(KEY).claim.beat < 3):
        time.sleep(0.02)
    holder.end("published")
    assert waiter.look(KEY).claim.beat >= 3
    assert waiter.look(KEY).claim.state == "published"


# -- stores that cannot ----------------------------------------------------------------------------


def test_every_kind_of_store_is_exclusive(place: Place) -> None:
    """The first who asks, and all who come later."""
    assert claims(place.open()).exclusive()
    assert claims(place.open()).exclusive()


def test_a_store_that_ignores_create_only_is_found_out(server: SickServer) -> None:
    """And asked once, not for every target."""
    server.honours_create = False
    store = Place("s3://b/p", server.options).open()
    assert not claims(store).exclusive()
    asked = len(server.requests)
    assert not claims(store).exclusive()
    assert len(server.requests) == asked


def test_a_store_that_does_not_know_create_only_loses_nothing(
    server: SickServer, tmp_path: Path
) -> None:
    """501: no claims, but records and packs are published all the same."""
    server.knows_create = False
    store = Place("s3://b/p", server.options).open()
    assert not claims(store).exclusive()
    record, pack = sample(tmp_path)
    assert store.publish(record, pack) == record
    assert dict(store.latest(FINGERPRINT).records) == {"adopted": record}


@pytest.mark.parametrize("how", ["honours_create", "knows_create"])
def test_without_create_only_everyone_compiles(
    server: SickServer, how: str, tmp_path: Path
) -> None:
    """Two pods that start cold at once each compile all; nothing is lost, and why is said."""
    setattr(server, how, False)
    place, wanted = Place("s3://b/p", server.options), targets(3)
    pods = [Pod(tmp_path / name, place.open(), seconds=0.05) for name in "ab"]
    together(pods, wanted)
    for pod in pods:
        assert pod.compiled == [target.key for target in wanted]
        assert len(pod.alone) == 1
        assert "share=False" in pod.alone[0]
        assert pod.damaged() == []
    later = Pod(tmp_path / "c", place.open())
    later.run(wanted)
    assert later.compiled == []
    assert later.alone == []


def test_a_store_that_refuses_claims(tmp_path: Path) -> None:
    """403 for that folder alone: said once, everything is compiled and published."""

    class Refusing(LocalStorage):
        def create(self, name: str, data: bytes) -> bool:
            if "/claims/" in name:
                raise PermissionError(errno.EACCES, "Access Denied")
            return super().create(name, data)

    store = ArtifactStore(Refusing(tmp_path / "store"), Budget("x", 5))
    pod = Pod(tmp_path / "a", store)
    pod.run(targets(3))
    assert len(pod.compiled) == 3
    assert len(pod.alone) == 1
    assert "permission denied" in pod.alone[0]
    assert len(store.latest(MARK.digest).records) == 3


def test_a_store_that_fails_in_the_middle(tmp_path: Path) -> None:
    """Down after the first claims: the rest is compiled without, once, and kept in the root."""

    class Failing(LocalStorage):
        left = 6

        def create(self, name: str, data: bytes) -> bool:
            self.left -= 1
            if self.left < 0:
                raise PermissionError(errno.EROFS, "Read-only file system")
            return super().create(name, data)

    pod = Pod(tmp_path / "a", ArtifactStore(Failing(tmp_path / "store"), Budget("x", 5)))
    pod.run(targets(5))
    assert sorted(pod.compiled) == sorted(target.key for target in targets(5))
    assert pod.damaged() == []
    again = Pod(tmp_path / "b", ArtifactStore.open(tmp_path / "store"))
    again.run(targets(5))
    assert len(again.restored.keys) + len(again.compiled) == 5
    assert again.restored.keys


# -- turns -----------------------------------------------------------------------------------------


def test_a_lone_pod_keeps_the_order_and_pays_little(counting: Counting, tmp_path: Path) -> None:
    """The plan's order; a few small requests for each target besides its publication."""
    wanted = targets(4)
    pods = []
    for share in (True, False):
        storage = Listing()
        pod = Pod(tmp_path / str(share), ArtifactStore(storage, Budget("x", 5)))
        if share:
            pod.run(wanted)
        else:
            pod.begin(wanted)
            for target in wanted:
                pod.compile(target)
        pods.append((pod, storage.asked))
    (pod, shared), (_, plain) = pods
    assert pod.order == pod.compiled == [target.key for target in wanted]
    assert pod.waited == []
    assert (shared - plain - 2) / len(wanted) <= 3


class Listing(Counting):
    """Counts listings too."""

    def walk(self, folder: str) -> dict[str, int]:
        self.asked += 1
        return MemoryStorage.walk(self, folder)


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_pods_divide_the_work(kind: str, tmp_path: Path) -> None:
    """Four pods, twelve targets: each compiled once, each pod has all, in about a quarter."""
    url = str(tmp_path / "store") if kind == "local" else f"memory://{uuid.uuid4().hex}"
    wanted = targets(12)
    pods = [Pod(tmp_path / name, ArtifactStore.open(url), seconds=0.15) for name in "abcd"]
    together(pods, wanted)
    compiled = [key for pod in pods for key in pod.compiled]
    assert sorted(compiled) == sorted(target.key for target in wanted)
    assert max(len(pod.compiled) for pod in pods) <= 6
    for pod in pods:
        assert sorted(pod.order) == sorted(compiled)
        assert pod.damaged() == []
        assert pod.alone == []
        assert pod.restored.faults == []
    for target in wanted:
        last = claims(ArtifactStore.open(url), fingerprint=MARK.digest).look(target.key)
        assert (last.claim.state, last.generation - last.claim.beat) == ("published", 2)


def test_a_record_that_is_gone_is_made_anew(tmp_path: Path) -> None:
    """Its chain still says that it was published; somebody has deleted the artifact since."""
    store, wanted, clock = ArtifactStore.open(tmp_path / "store"), targets(2), Clock()
    Pod(tmp_path / "one", store).run(wanted)
    shutil.rmtree(tmp_path / "store" / "v1" / MARK.digest / "artifacts" / wanted[0].key)
    other = Pod(tmp_path / "two", store, clock=clock)
    other.run(wanted)
    assert other.compiled == [wanted[0].key]
    assert clock.now < 2


@pytest.mark.parametrize("kind", ["local", "s3"])
def test_processes_divide_the_work(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """The same with real processes."""
    url = str(tmp_path / "store")
    if kind == "s3":
        place: Place = request.getfixturevalue("s3_place")
        url = f"{place.url} {place.options['endpoint_url']}"
    running = [begin(url, tmp_path / name, 6, 0.1) for name in "abc"]
    said = [process.communicate("\n", timeout=60)[0] for process in started(running)]
    compiled = [key for text in said for key in text.split()]
    assert sorted(compiled) == sorted(target.key for target in targets(6))


def begin(url: str, root: Path, count: int, seconds: float) -> subprocess.Popen[str]:
    """A pod in a process of its own, that waits for a line."""
    words = [sys.executable, HERE / "pods.py", url, root, str(count), str(seconds)]
    return subprocess.Popen(
        words,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(HERE.parents[1])},
    )


def started(pods: list[subprocess.Popen[str]]) -> list[subprocess.Popen[str]]:
    """Those pods, once all are ready, and running."""
    for process in pods:
        assert process.stdout.readline() == "ready\n"
    for process in pods:
        process.stdin.write("\n")
        process.stdin.flush()
    return pods


def test_a_killed_pod_is_overtaken(tmp_path: Path) -> None:
    """SIGKILL in the middle of a compile: the other one waits for a lease of its own, then does it."""
    url, wanted = str(tmp_path / "store"), targets(3)
    (dying,) = started([begin(url, tmp_path / "dying", 3, 60)])
    store = ArtifactStore.open(url)
    while store.read_small(MARK.digest, f"claims/{wanted[0].key}/1.json") is None:
        time.sleep(0.01)
    dying.send_signal(signal.SIGKILL)
    dying.communicate()
    clock = Clock()
    pod = Pod(tmp_path / "living", store, clock=clock)
    pod.run(wanted)
    assert sorted(pod.compiled) == sorted(target.key for target in wanted)
    assert pod.order[-1] == wanted[0].key
    assert LEASE_SECONDS <= clock.now < LEASE_SECONDS + 6
    assert f"process {dying.pid} on " in pod.waited[0]
    assert str(wanted[0]) in pod.waited[0]
    assert pod.damaged() == []


def test_who_waits_takes_it_as_soon_as_it_is_there(tmp_path: Path) -> None:
    """The holder publishes and ends its claim while the other one sleeps."""
    store, wanted = ArtifactStore.open(tmp_path / "store"), targets(2)
    slow = Pod(tmp_path / "slow", store, clock=Clock())
    turns = slow.begin(wanted).turns(wanted)
    first = next(turns)

    def meanwhile() -> None:
        if not slow.compiled and clock.now > 3:
            slow.compile(first)

    clock = Clock(meanwhile=meanwhile)
    quick = Pod(tmp_path / "quick", store, clock=clock)
    quick.run(wanted)
    assert quick.compiled == [wanted[1].key]
    assert quick.restored.keys == [first.key]
    assert clock.now < 10
    assert [target.key for target in turns] == [wanted[1].key]
    assert slow.compiled == [first.key]
    assert slow.restored.keys == [wanted[1].key]


def test_a_late_artifact_of_an_overtaken_holder_does_no_harm(tmp_path: Path) -> None:
    """Both publish; every root is whole, and whoever comes later restores and compiles nothing."""
    store, wanted = ArtifactStore.open(tmp_path / "store"), targets(2)
    late = Pod(tmp_path / "late", store, clock=Clock())
    turns = late.begin(wanted).turns(wanted)
    first = next(turns)
    quick = Pod(tmp_path / "quick", store, clock=Clock())
    quick.run(wanted)
    assert sorted(quick.compiled) == sorted(target.key for target in wanted)
    late.compile(first)
    assert [target.key for target in turns] == [wanted[1].key]
    assert late.compiled == [first.key]
    assert {r.generation for r in store.latest(MARK.digest).records.values()} == {1, 2}
    later = Pod(tmp_path / "later", store, clock=Clock())
    later.run(wanted)
    assert later.compiled == []
    assert [pod.damaged() for pod in (late, quick, later)] == [[], [], []]


def test_a_failing_target_is_tried_by_all_and_waited_for_by_none(tmp_path: Path) -> None:
    """jax#12582: it fails wherever it is tried; the others are compiled once."""
    store, wanted = ArtifactStore.open(tmp_path / "store"), targets(3)
    bad = wanted[1].key
    clock = Clock()
    pods = [Pod(tmp_path / name, store, clock=clock) for name in "abcd"]
    for pod in pods:
        pod.run(wanted, fails=[bad])
    assert [pod.compiled.count(bad) for pod in pods] == [1, 1, 1, 1]
    assert sum(len(pod.compiled) for pod in pods) == 4 + 2
    assert clock.now == 0


def test_who_is_interrupted_gives_back(tmp_path: Path) -> None:
    """Ctrl-C in a compile: the next pod has it at once."""
    store, wanted, clock = ArtifactStore.open(tmp_path / "store"), targets(1), Clock()
    stopped = Pod(tmp_path / "a", store, clock=Clock())
    sharing = stopped.begin(wanted)
    next(sharing.turns(wanted))
    sharing.close()
    other = Pod(tmp_path / "b", store, clock=clock)
    other.run(wanted)
    assert other.compiled == [wanted[0].key]
    assert clock.now == 0


def test_a_damaged_artifact_is_mended_by_one(tmp_path: Path) -> None:
    """A truncated pack is no artifact: one pod compiles the target again, the others wait for it."""
    store, wanted = ArtifactStore.open(tmp_path / "store"), targets(1)
    Pod(tmp_path / "first", store).run(wanted)
    for path in (tmp_path / "store").glob("v1/*/packs/*"):
        path.write_bytes(path.read_bytes()[:-9])
    pods = [Pod(tmp_path / name, ArtifactStore.open(tmp_path / "store")) for name in "abc"]
    together(pods, wanted)
    assert sum(len(pod.compiled) for pod in pods) == 1
    assert all(pod.damaged() == [] for pod in pods)


def test_two_roots_built_the_same_library(tmp_path: Path) -> None:
    """Each keeps its own, in its own bytes; a third takes one of them; all are whole."""
    store, wanted = ArtifactStore.open(tmp_path / "store"), targets(2)
    one, two = Pod(tmp_path / "one", store), Pod(tmp_path / "two", store)
    for pod, target in zip((one, two), wanted, strict=True):
        pod.begin([target])
        pod.compile(target)
    third = Pod(tmp_path / "third", store)
    for pod in (one, two, third):
        pod.run(wanted)
        assert pod.restored.faults == []
        assert pod.damaged() == []
    texts = [(pod.cache.root / LIBRARY).read_text() for pod in (one, two, third)]
    assert texts[:2] == ["one", "two"]
    assert texts[2] in ("one", "two")
    assert third.compiled == []
    kept = Exchange(third.cache, None, MARK, [target.key for target in wanted])
    kept.look()
    assert kept.missing == frozenset()


def test_a_library_that_nobody_here_lists_is_still_a_conflict(tmp_path: Path) -> None:
    """What lies in the root for reasons unknown is neither overwritten nor taken for good."""
    store, wanted = ArtifactStore.open(tmp_path / "store"), targets(1)
    Pod(tmp_path / "one", store).run(wanted)
    other = Pod(tmp_path / "two", store)
    (other.cache.root / "ab").mkdir()
    (other.cache.root / LIBRARY).write_text("mine")
    other.begin(wanted)
    assert len(other.restored.faults) == 1
    assert (other.cache.root / LIBRARY).read_text() == "mine"


def test_claims_raise_what_they_are(server: SickServer) -> None:
    """A store that is refused is StoreUnavailable, at once."""
    server.mood = "AccessDenied"
    with pytest.raises(StoreUnavailable, match="permission denied"):
        claims(Place("s3://b/p", server.options).open()).take(KEY)
    assert len(server.requests) == 1
