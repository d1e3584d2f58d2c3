"""``warmup fleet``: real hosts of Ray, real claims, a real SIGKILL; and what is refused before any of it."""

from __future__ import annotations

import importlib.util
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from places import Place
from processes import Template, environment, warmup
from workloads import plan

from compilecache import CompileCacheError, PlanError
from compilecache.evidence import Evidence
from compilecache.report import Report, TargetReport
from compilecache.store import ArtifactStore
from warmup.fleet import shared_store
from warmup.fleetreport import FleetReport
from warmup.hosts import News, Order, Ready, Result
from warmup.muster import Muster
from warmup.raycluster import Answer, Node
from warmup.service.settings import Settings

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed (extra 'fleet')"
)


@dataclass
class Hosts:
    """A cluster of three on this machine."""

    process: subprocess.Popen[str]
    address: str
    names: list[str]

    def kill(self, number: int) -> None:
        """SIGKILL for one host."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{number}\n")
        self.process.stdin.flush()


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    """The last of them hangs in the first target that it claims."""
    changes = {"ROOTS": str(tmp_path / "roots"), "SEEN": str(tmp_path / "seen")}
    process = subprocess.Popen(
        [sys.executable, Path(__file__).with_name("ray_hosts.py"), "3"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment(OMP_NUM_THREADS=None, CUDA_VISIBLE_DEVICES="5,7", **changes),
    )
    assert process.stdout is not None
    address, ids = json.loads(process.stdout.readline())
    yield Hosts(process, address, [id[:6] for id in ids])
    process.communicate(timeout=60)


@needs_ray
@pytest.mark.slow
def test_hosts_of_ray_compile_each_target_once_though_one_is_killed(
    fresh: Template, place: Place, hosts: Hosts
) -> None:
    """Two hosts share what is left; the target of the killed one is overtaken; all is published."""
    made = plan("product", [2, 3, 4, 5, 6])
    place.write(made.model_copy(update={"workload": "fleet_workloads:placed"}))
    words = ("fleet", place.plan_file, "--ray", hosts.address, "--device", "cpu")
    running = fresh.start(warmup, [str(word) for word in (*words, "--store", place.store)])
    until = time.monotonic() + 120
    while f"/{hosts.names[2]}: compiling" not in running.err:
        assert running.running and time.monotonic() < until, running.err
        time.sleep(0.05)
    hosts.kill(2)
    ended = running.wait()
    assert ended.code == 0, ended.err
    told = ended.json
    assert told["state"] == "warm"
    (lost,) = told["lost"]
    assert lost.endswith(hosts.names[2])
    assert (told["hosts"], told["targets"], told["published"], told["compiled"]) == (3, 5, 5, 5)
    assert [host["state"] for host in told["by_host"]].count("warm") == 2
    assert told["restored"] == 5
    (digest,) = told["fingerprints"]
    records = ArtifactStore.open(place.store).latest(digest).records
    assert sorted(records) == sorted(target.key for target in place.plan.targets(["cpu"]))
    seen = (place.folder / "seen").read_text().splitlines()
    assert set(seen) == {"CUDA_VISIBLE_DEVICES=5,7 OMP_NUM_THREADS=None"}
    assert not list(place.store.glob("fleet-*"))


# -- without Ray ---------------------------------------------------------------------------------


@dataclass
class Scripted:
    """Hosts that answer what the test says: by method, by host; the place of Ray's cluster."""

    nodes: list[Node]
    answers: dict[str, dict[str, object]]
    started: list[str] = field(default_factory=list)
    asked: list[tuple[str, str]] = field(default_factory=list)

    def start(self, node: Node) -> None:
        self.started.append(node.name)

    def ask(self, node: Node, method: object, *words: object, **more: object) -> object:
        name = method.__name__  # type: ignore[attr-defined]
        self.asked.append((node.name, name))
        return len(self.asked) - 1

    def next_answer(self, asked: dict, seconds: float | None = None):  # type: ignore[no-untyped-def, type-arg]
        reference = next(iter(asked))
        host, method = self.asked[reference]
        answer = self.answers.get(method, {}).get(host)
        return asked.pop(reference), answer if isinstance(answer, Answer) else Answer(answer)


PLAN = plan("product", [2, 3])
KEYS = [target.key for target in PLAN.targets(["cpu"])]
ORDER = Order(PLAN, (), Settings(store="s3://bucket/cache"), "probe")


def node(name: str, gpus: float = 0) -> Node:
    """A host."""
    return Node(name, name, gpus)


def ended(*statuses: str, published: bool = True) -> list[News]:
    """The last news of a host whose targets ended so."""
    rows = tuple(
        TargetReport.model_validate(
            {
                "key": key,
                "target": key,
                "device": "cpu",
                "status": status,
                "evidence": Evidence(
                    outcome="miss" if status == "compiled" else "hit",
                    hits=1,
                    misses=int(status == "compiled"),
                    bypasses=0,
                    launches=0,
                    seconds=1,
                    again_seconds=0,
                ),
            }
        )
        for key, status in zip(KEYS, statuses, strict=True)
    )
    report = Report(fingerprint="f", engine="trace", root="r", store="s", targets=rows)
    return [News("ended", result=Result(report, frozenset(KEYS if published else ())))]


def carried_out(hosts: Scripted, order: Order = ORDER) -> FleetReport:
    """What the fleet came to."""
    return Muster(hosts, order, lambda text: None).carry_out(None)  # type: ignore[arg-type]


READY = Ready(("cpu",))
LOST = Answer(fault="its node has died", lost=True)


def test_what_a_second_host_restored_is_proven() -> None:
    """Nobody is asked for a proof when each target was compiled on one host and found warm on another."""
    hosts = Scripted(
        [node("a"), node("b")],
        {
            "look": dict.fromkeys("ab", READY),
            "news": {"a": ended("compiled", "restored"), "b": ended("restored", "compiled")},
        },
    )
    report = carried_out(hosts)
    assert report.warm
    assert "prove" not in [method for _, method in hosts.asked]
    told = report.as_json()
    assert (told["compiled"], told["restored"], told["published"]) == (2, 2, 2)


def test_the_only_survivor_proves_what_it_compiled() -> None:
    """A fresh process there has the word; what it compiles is named."""
    hosts = Scripted(
        [node("a"), node("b")],
        {
            "look": dict.fromkeys("ab", READY),
            "news": {"a": ended("compiled", "compiled"), "b": LOST},
            "prove": {"a": {KEYS[1]: "1 miss"}},
        },
    )
    report = carried_out(hosts)
    assert report.as_json()["lost"] == ["b"]
    assert report.not_proven == {f"a: {KEYS[1]}": "1 miss"}
    assert not report.warm
    hosts.answers["prove"]["a"] = {}
    assert carried_out(hosts).warm


def test_targets_that_only_a_lost_host_could_make_are_missed() -> None:
    """With devices of its own, nobody else compiles for them."""
    looks = {"a": READY, "b": Ready(("cpu", "cuda:0"))}
    news = {"a": ended("compiled", "compiled"), "b": LOST}
    hosts = Scripted([node("a"), node("b")], {"look": looks, "news": news, "prove": {"a": {}}})
    told = carried_out(hosts).as_json()
    assert (told["state"], told["targets"], told["published"]) == ("partly", 4, 2)


def test_what_did_not_reach_the_store_is_no_success() -> None:
    """Warm on the host that made it is not what a fleet is for."""
    news = {"a": ended("local", "local", published=False)}
    hosts = Scripted([node("a")], {"look": {"a": READY}, "news": news})
    assert not carried_out(hosts).warm


def test_a_host_that_fails_is_named() -> None:
    """With its own words; the others go on."""
    problem = [News("ended", result=Result(None, problem="workload 'x:y' cannot be imported."))]
    news = {"a": problem, "b": ended("restored", "restored")}
    hosts = Scripted([node("a"), node("b")], {"look": dict.fromkeys("ab", READY), "news": news})
    report = carried_out(hosts)
    assert not report.warm
    assert [(host.name, host.fault) for host in report.failed] == [
        ("a", "workload 'x:y' cannot be imported.")
    ]


def test_hosts_that_do_not_share_the_store_do_not_begin() -> None:
    """A folder that each has for itself would have every host compile everything."""
    looks = {"a": READY, "b": Ready(("cpu",), probed=False)}
    hosts = Scripted([node("a"), node("b")], {"look": looks})
    with pytest.raises(PlanError, match="host b does not see"):
        carried_out(hosts)
    assert "begin" not in [method for _, method in hosts.asked]
    assert ("a", "clear") in hosts.asked
    default = Order(PLAN, (), Settings(), "probe")
    with pytest.raises(PlanError, match="2 hosts, and no store that they share"):
        carried_out(hosts, default)


def test_hosts_with_gpus_come_before_those_without() -> None:
    """A head without a GPU would compile for the CPU, which nobody asked for; unless somebody does."""
    names = {"head": READY, "a": READY}
    news = dict.fromkeys(names, ended("restored", "restored"))
    nodes = [node("a", 8), node("head")]
    hosts = Scripted(nodes, {"look": names, "news": news})
    carried_out(hosts)
    assert hosts.started == ["a"]
    hosts.started.clear()
    carried_out(hosts, Order(PLAN, ("cpu",), ORDER.settings, "probe"))
    assert hosts.started == ["a", "head"]


def test_when_no_host_can_begin_the_error_names_them() -> None:
    """Each with its reason."""
    looks = {"a": Ready((), problem="store down."), "b": LOST}
    hosts = Scripted([node("a"), node("b")], {"look": looks})
    with pytest.raises(CompileCacheError, match=r"host a: store down.*host b: its node has died"):
        carried_out(hosts)


@pytest.mark.parametrize("store", ["none", "memory://x"])
def test_a_store_that_no_hosts_can_share_is_refused(store: str) -> None:
    """Before any host is asked."""
    with pytest.raises(PlanError, match="cannot share") as caught:
        shared_store(store)
    assert "s3://" in caught.value.next_step


def test_a_folder_is_named_in_full_for_other_hosts(tmp_path: Path) -> None:
    """They stand elsewhere."""
    assert shared_store("cache") == str(Path.cwd() / "cache")
    assert shared_store("s3://bucket/cache") == "s3://bucket/cache"


def test_without_ray_the_error_names_the_extra(fresh: Template, place: Place) -> None:
    """Exit code 2, one line."""
    place.write(PLAN)
    ended = fresh.call(without_ray, str(place.plan_file), str(place.store))
    assert ended == "Install it: pip install 'compilecache[fleet]'"


def without_ray(plan_file: str, store: str) -> str:
    """The next step that a machine without Ray is told; in a process of its own."""
    sys.modules["ray"] = None  # type: ignore[assignment]
    from warmup.fleet import fleet

    try:
        fleet.main([plan_file, "--ray", "auto", "--store", store], standalone_mode=False)
    except PlanError as error:
        return error.next_step
    return "no error"


@needs_ray
def test_an_address_where_nothing_listens_is_refused_at_once(fresh: Template, place: Place) -> None:
    """Ray itself would go on trying for minutes."""
    place.write(PLAN)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    ended = fresh.warmup("fleet", place.plan_file, "--ray", address, "--store", place.store)
    assert ended.code == 1
    assert f"no Ray cluster answers at '{address}'" in ended.err


def test_a_thread_count_of_the_engine_is_forgotten() -> None:
    """Ray sets OMP_NUM_THREADS in its processes; one that a host was given stays."""
    program = (
        "import os; from warmup.hosts import forget_thread_count as f;"
        "os.environ.setdefault('OMP_NUM_THREADS', '1'); f(); print(os.environ.get('OMP_NUM_THREADS'))"
    )
    for given, kept in ((None, "None"), ("3", "3")):
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=environment(OMP_NUM_THREADS=given),
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == kept
