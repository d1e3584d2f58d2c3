"""``explain``: why a start would be warm or not; and what commands print of engine ``program``."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from places import Place
from processes import Ended, Template
from workloads import plan, product

from compilecache.cachedir import CacheDir
from compilecache.cli.explain import apart
from compilecache.exchange import Exchange
from compilecache.fingerprint import Fingerprint
from compilecache.search import Search
from compilecache.shapes import CompileTarget, EngineName, ShapePlan
from compilecache.store import ArtifactStore
from compilecache.weights import weight

MINE = """
import os

import helper
import torch
from torch import nn

from compilecache.examples import ExampleWorkload


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))
        self.twice = "TWICE" in os.environ

    def forward(self, x):
        y = helper.product(x, self.weight)
        return y @ self.weight if self.twice else y


class Breaking(Model):
    def forward(self, x):
        y = x @ self.weight
        torch._dynamo.graph_break()
        return y @ self.weight


fits = ExampleWorkload(build="mine:Model")
breaks = ExampleWorkload(build="mine:Breaking")
"""
"""A model that depends on what no fingerprint holds; no operation of it needs a C++ kernel."""


def by(engine: EngineName, workload: str, counts: list[int]) -> ShapePlan:
    """A plan for an engine."""
    return plan("product", counts).model_copy(update={"engine": engine, "workload": workload})


@pytest.fixture(scope="module")
def compiled(fresh: Template, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Two shapes of a matrix product as programs, in a root and a store."""
    place = Place(tmp_path_factory.mktemp("programs"))
    place.write(by("program", "workloads:product", [2, 3]))
    ended = fresh.command("warm", *place.words)
    assert ended.code == 0, ended.err
    return place


@pytest.fixture
def programs(compiled: Place, tmp_path: Path) -> Place:
    """A private copy of them."""
    shutil.copytree(compiled.folder, tmp_path, dirs_exist_ok=True)
    return Place(tmp_path)


@pytest.fixture
def mine(place: Place) -> Place:
    """A workload of one's own, with a file of its own that it imports."""
    (place.folder / "mine.py").write_text(MINE)
    (place.folder / "helper.py").write_text("def product(x, y):\n    return x @ y\n")
    place.write(by("program", "mine:fits", [2]))
    return place


def listing(place: Place) -> dict[str, str]:
    """Every file of root and store with its digest."""
    files = (path for path in sorted(place.folder.rglob("*")) if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def programs_of(place: Place) -> Iterator[Path]:
    """Files of programs in the root."""
    return place.root.glob("programs/*.program")


def assert_readable(ended: Ended, *words: str) -> None:
    """Within 80 columns, with these words in it, whatever was wrapped."""
    assert all(len(line) <= 80 for line in ended.out.splitlines())
    text = " ".join(ended.out.split())
    for word in words:
        assert word in text, ended.out


# -- explain ------------------------------------------------------------------------------------


def test_everything_is_there_and_fits(fresh: Template, programs: Place) -> None:
    """Exit code 0; where each target comes from and what its program depends on; nothing changes."""
    before = listing(programs)
    ended = fresh.command("explain", *programs.words, "--json")
    assert ended.code == 0, ended.err
    told = ended.json
    assert set(told) == {
        "warm", "fingerprint", "engine", "root", "store", "targets", "nearest", "adopted",
        "trouble", "untrusted", "next_step",
    }  # fmt: skip
    assert (told["warm"], told["engine"], told["nearest"]) == (True, "program", None)
    for row in told["targets"]:
        assert (row["state"], row["engine"], row["changed"]) == ("local", "program", {})
        assert (row["program"]["device"], row["program"]["hardware"]) == ("cpu", "cpu")
        assert row["program"]["conditions"] > 0
    people = fresh.command("explain", *programs.words)
    assert people.out.startswith(f"Fingerprint {told['fingerprint']}\n2 targets: 2 local\n")
    assert_readable(people, "2 programs compiled on cpu with torch", "Nothing to do;")
    assert listing(programs) == before


def test_what_the_store_has_is_not_missing(fresh: Template, programs: Place) -> None:
    """Without a root, a start would restore: exit code 0, and no root is made."""
    shutil.rmtree(programs.root)
    ended = fresh.command("explain", *programs.words)
    assert ended.code == 0, ended.err
    assert_readable(ended, "2 targets: 2 in store", "'compilecache restore'")
    assert not programs.root.exists()


def test_the_nearest_fingerprint(fresh: Template, programs: Place) -> None:
    """Another setting: every component that differs, as published and here; exit code 3 (dynamo#10695)."""
    env = {"TORCHINDUCTOR_COORDINATE_DESCENT_TUNING": "1"}
    published = fresh.command("explain", *programs.words, "--json").json["fingerprint"]
    ended = fresh.command("explain", *programs.words, "--json", env=env)
    assert ended.code == 3, ended.err
    told = ended.json
    assert [row["state"] for row in told["targets"]] == ["missing", "missing"]
    assert [row["engine"] for row in told["targets"]] == [None, None]
    near = told["nearest"]
    assert (near["digest"], near["targets"]) == (published, 2)
    assert next(iter(near["changed"])) == "env.TORCHINDUCTOR_COORDINATE_DESCENT_TUNING"
    assert near["changed"]["env.TORCHINDUCTOR_COORDINATE_DESCENT_TUNING"] == ["absent", "1"]
    weights = near["weights"]
    assert set(weights) == set(near["changed"])
    assert weights["env.TORCHINDUCTOR_COORDINATE_DESCENT_TUNING"]["matters"]
    people = fresh.command("explain", *programs.words, env=env)
    assert_readable(
        people, published[:12], "It differs in", "Known to matter", "env.TORCH",
        "which are in every key.", "'compilecache warm'",
    )  # fmt: skip
    assert "Only caution" not in people.out
    other = fresh.command("explain", *programs.words, "--engine", "trace", "--json").json
    assert other["nearest"]["changed"] == {"engine": ["program", "absent"]}


def test_what_is_only_caution(fresh: Template, programs: Place) -> None:
    """Two kinds of difference, apart: what enters torch's keys, and what does not."""
    mine = fresh.command("fingerprint", *programs.words[:3], "--engine", "program", "--json").json
    there = {**mine["components"], "python": "cpython 3.0", "torch": "1.0", "env.TRITON_X": "1"}
    mark = Fingerprint(there)
    shutil.rmtree(programs.root)
    shutil.rmtree(programs.store)
    ArtifactStore.open(programs.store).put_fingerprint(mark.digest, mark.dump())
    people = fresh.command("explain", *programs.words)
    assert people.code == 3, people.err
    heavy, _, light = people.out.partition("Only caution")
    assert "Known to matter" in heavy and "torch: Its version" in heavy
    assert "cpython 3.0" in light and "env.TRITON_X" in light
    assert_readable(people, "It differs in 3 components")


@pytest.mark.parametrize(
    ("component", "on_gpu", "on_cpu"),
    [
        ("torch", True, True),
        ("inductor.max_autotune", True, True),
        ("env.TORCHINDUCTOR_MAX_AUTOTUNE", True, True),
        ("triton", True, False),
        ("gpu", True, False),
        ("cpu.flags", False, True),
        ("driver", False, False),
        ("source.my_model", False, False),
        ("workload", False, False),
        ("what.nobody.knows", False, False),
    ],
)
def test_weights(component: str, on_gpu: bool, on_cpu: bool) -> None:
    """What enters torch's own keys, by the kind of device; each says why (triton#1323, vllm#41871)."""
    found = weight(component, "cuda"), weight(component, "cpu")
    assert tuple(one.matters for one in found) == (on_gpu, on_cpu)
    assert all(one.because for one in found)


def test_every_component_has_a_weight(fresh: Template, programs: Place) -> None:
    """None is unknown."""
    mine = fresh.command("fingerprint", *programs.words[:3], "--json").json
    unknown = weight("what.nobody.knows", "cpu")
    names = [*mine["components"], "gpu", "driver", "engine", "env.X", "inductor.x", "source.x"]
    assert not [name for name in names if weight(name, "cpu") == unknown]


def test_a_shape_that_is_new(fresh: Template, programs: Place) -> None:
    """The store has this very fingerprint, but not that shape."""
    programs.write(by("program", "workloads:product", [2, 7]))
    ended = fresh.command("explain", *programs.words)
    assert ended.code == 3, ended.err
    assert_readable(ended, "1 local, 1 missing", "2 targets of this very fingerprint")


def test_a_store_that_has_nothing_to_say(fresh: Template, place: Place) -> None:
    """Empty, none, and one that does not answer: each is said."""
    place.write(by("program", "workloads:product", [2]))
    occupied = place.folder / "occupied"
    occupied.touch()
    for store, word in (
        (place.store, "Nothing is published in"),
        ("none", "No store was asked"),
        (occupied, "The store could not be asked"),
    ):
        ended = fresh.command("explain", *place.words[:-1], store)
        assert ended.code == 3, ended.err
        assert_readable(ended, "1 target: 1 missing", word)
    assert "Make the store answer" in ended.out
    assert not place.root.exists()
    assert not place.store.exists()


def test_a_program_that_no_longer_fits(fresh: Template, mine: Place) -> None:
    """An attribute and a file that no fingerprint holds: named, with both values; exit code 3."""
    assert fresh.command("warm", *mine.words, cwd=mine.folder).code == 0
    assert fresh.command("explain", *mine.words, cwd=mine.folder).code == 0
    (mine.folder / "helper.py").write_text("def product(x, y):\n    return (x @ y) @ y\n")
    before = listing(mine)
    ended = fresh.command("explain", *mine.words, "--json", cwd=mine.folder, env={"TWICE": "1"})
    assert ended.code == 3, ended.err
    (row,) = ended.json["targets"]
    assert row["state"] == "local"
    assert {"source.helper", "self.twice"} <= set(row["changed"])
    assert row["changed"]["self.twice"] == ["bool False", "bool True"]
    people = fresh.command("explain", *mine.words, cwd=mine.folder, env={"TWICE": "1"})
    assert_readable(
        people, "1 program does not fit", "Does not fit: forward train", "bool True",
        "it compiles anew what does not fit",
    )  # fmt: skip
    assert {name: text for name, text in listing(mine).items() if "pycache" not in name} == {
        name: text for name, text in before.items() if "pycache" not in name
    }


def test_a_damaged_program(fresh: Template, programs: Place) -> None:
    """Cut short: exit code 4, the file named; the store would mend it."""
    path = next(programs_of(programs))
    path.write_bytes(path.read_bytes()[:-1])
    ended = fresh.command("explain", *programs.words, "--json")
    assert ended.code == 4, ended.err
    rows = {row["state"]: row for row in ended.json["targets"]}
    assert set(rows) == {"local", "damaged"}
    assert path.name in " ".join(rows["damaged"]["faults"])
    people = fresh.command("explain", *programs.words)
    assert_readable(people, "1 local, 1 damaged", "damaged: programs/", "'compilecache warm'")


def test_a_program_of_another_gpu(place: Place) -> None:
    """Found where a start would find it; not for engine trace, and not when it went by trace."""
    spec = by("program", "workloads:product", [2]).specs[0]
    there, here = CompileTarget(spec, "cuda:0"), CompileTarget(spec, "cuda:1")
    mark = Fingerprint({"workload": "test"})
    store = ArtifactStore.open(place.store)
    made, empty = CacheDir(place.root), CacheDir(place.folder / "empty")
    made.prepare()
    for path, expected in (("ab/kernel.py", None), ("programs/ab.program", "cuda:0")):
        (made.root / path).parent.mkdir()
        (made.root / path).write_text("whatever")
        Exchange(made, store, mark, [there.key]).publish(there, [path], None)
        search = Search(empty, store, mark, rewriting=True)
        search.look([here])
        found = search.finding(here, product, product.build("cpu"))
        assert (found.origin, found.state) == (
            expected, "by rewriting" if expected else "missing",
        )  # fmt: skip
    search = Search(empty, store, mark, rewriting=False)
    search.look([here])
    assert search.finding(here, product, product.build("cpu")).state == "missing"


def test_long_values_are_shown_where_they_differ() -> None:
    """Short ones whole."""
    assert apart("2.12", "2.13") == ("2.12", "2.13")
    then, now = apart("avx2 " * 40 + "fma", "avx2 " * 40 + "amx " + "x" * 200)
    assert then.startswith("…") and then.endswith("fma")
    assert now.endswith("…") and "amx" in now and len(now) < 80


# -- warm and verify ------------------------------------------------------------------------------


def test_warm_and_verify_show_the_engine(fresh: Template, programs: Place) -> None:
    """A column of the table, and a field of the JSON; verify proves programs in a fresh process."""
    ended = fresh.command("warm", *programs.words, "--engine", "program")
    assert ended.code == 0, ended.err
    assert_readable(ended, "2 targets: 2 local", "engine", "local program hit")
    proven = fresh.command("verify", *programs.words[:-2], "--engine", "program", "--json")
    assert proven.code == 0, proven.err
    for row in proven.json["targets"]:
        assert (row["engine"], row["warm"], row["notes"]) == ("program", True, [])


def test_verify_says_of_a_missing_program_that_it_is_missing(
    fresh: Template, programs: Place
) -> None:
    """Not that somebody published it otherwise."""
    programs.write(by("program", "workloads:product", [2, 7]))
    ended = fresh.command("verify", *programs.words[:-2])
    assert ended.code == 3, ended.err
    assert_readable(
        ended, "1 of 2 targets are warm", "yes program 1 hits", "NO trace 0 hits",
        "note: no program: the cache root has no record of the target",
    )  # fmt: skip


def test_verify_says_why_a_program_was_not_used(fresh: Template, mine: Place) -> None:
    """One note for all targets that share it."""
    mine.write(by("program", "mine:fits", [2, 3]))
    assert fresh.command("warm", *mine.words, cwd=mine.folder).code == 0
    words = (*mine.words[:-2], "--timeout", "60")
    ended = fresh.command("verify", *words, cwd=mine.folder, env={"TWICE": "1"})
    assert ended.code == 3, ended.err
    assert_readable(ended, "0 of 2 targets are warm", "self.twice = bool False", "(2 targets)")
    assert ended.out.count("note:") == 1


def test_what_cannot_be_a_program_says_so(fresh: Template, mine: Place) -> None:
    """By trace, with the reason under the table and in the JSON; explain counts it."""
    mine.write(by("program", "mine:breaks", [2]))
    ended = fresh.command("warm", *mine.words, cwd=mine.folder)
    assert ended.code == 0, ended.err
    assert_readable(ended, "note: no program:", "graph_break")
    told = fresh.command("warm", *mine.words, "--json", cwd=mine.folder).json["targets"][0]
    assert told["engine"] == "trace"
    assert told["notes"]
    explained = fresh.command("explain", *mine.words, cwd=mine.folder)
    assert explained.code == 0, explained.err
    assert_readable(explained, "1 of the targets go by trace")
