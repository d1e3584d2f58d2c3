"""Back to a state that is known to work: tagged, lost, brought back, and what has changed since."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import training
from places import Place
from processes import Ended, Template

from compilecache.cachedir import CacheDir
from compilecache.ensure import ensure_warm
from compilecache.errors import PlanError
from compilecache.exchange import Exchange
from compilecache.replicas import fingerprint_for
from compilecache.shapes import InputSpec, ShapePlan, plan_of
from compilecache.store import ArtifactStore

WORKLOAD = '''"""A workload whose model is never compiled here."""

import torch

from compilecache.workload import Workload


class Model(torch.nn.Linear):
    """One layer."""

    def forward(self, x):
        return super().forward(x) * {factor}


class Line(Workload):
    """Of that model."""

    def build(self, device):
        return Model(2, 2).to(device)

    def make_inputs(self, spec, module, device):
        return {{"x": torch.ones(2, 2)}}
'''
PLAN = plan_of([InputSpec(dims={"batch": size}) for size in (1, 2)], workload="line:Line")


def publish_as_if_compiled(plan: ShapePlan, root: Path, store: Path) -> str:
    """Artifacts of files that nobody compiled, under the fingerprint of the plan here."""
    sys.path.insert(0, "")  # as the command line does
    mark = fingerprint_for(plan, "cpu")
    cache = CacheDir(root)
    cache.prepare()
    exchange = Exchange(cache, ArtifactStore.open(store), mark, [])
    for number, target in enumerate(plan.targets(["cpu"])):
        name = f"fxgraph/ab/k/{number}"
        (cache.root / name).parent.mkdir(parents=True, exist_ok=True)
        (cache.root / name).write_bytes(b"entry %d" % number)
        exchange.publish(target, [name], None)
    return mark.digest


class Project:
    """A folder with a workload under git, and distributions that are installed beside it."""

    def __init__(self, fresh: Template, folder: Path) -> None:
        self._fresh = fresh
        self.folder = folder / "project"
        self.folder.mkdir()
        self.plan = self.folder / "plan.yaml"
        self.plan.write_text(PLAN.dump())
        self.write(2)
        for words in (["init", "-q"], ["add", "line.py"], ["commit", "-q", "-m", "first"]):
            self.git(*words)
        self.install("neighbour", "1.0")
        self.root, self.store = folder / "root", folder / "store"

    def git(self, *words: str) -> str:
        """What git says here."""
        who = ("-c", "user.name=Somebody", "-c", "user.email=somebody@example.org")
        done = subprocess.run(
            ["git", "-C", self.folder, *who, *words], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    def write(self, factor: int) -> None:
        """The workload, with another number in its model."""
        (self.folder / "line.py").write_text(WORKLOAD.format(factor=factor))

    def install(self, name: str, version: str) -> None:
        """As pip leaves it behind."""
        for old in self.folder.glob(f"{name}-*.dist-info"):
            shutil.rmtree(old)
        info = self.folder / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    def run(self, *words: object, **env: str) -> Ended:
        """A command, from the folder."""
        return self._fresh.command(*words, cwd=self.folder, env=env)

    def explain(self, *words: object, **env: str) -> dict[str, object]:
        """What has changed since the tag."""
        ended = self.run("explain", "--tag", "good", "--store", self.store, "--json", *words, **env)
        data = ended.json
        assert ended.code == (3 if data["changed"] else 0), ended.err
        return data


@pytest.fixture
def project(fresh: Template, tmp_path: Path) -> Project:
    """A tagged state."""
    made = Project(fresh, tmp_path)
    fresh.start(publish_as_if_compiled, PLAN, made.root, made.store, cwd=made.folder).result()
    ended = made.run(
        *("tag", "good", made.plan, "--device", "cpu", "--root", made.root, "--store", made.store),
        *("--tokens-per-second", "21500", "--note", "before the upgrade"),
        OMP_NUM_THREADS="2",
    )
    assert ended.code == 0, ended.err
    assert ended.out.splitlines()[-1] == "Back to it: compilecache restore --tag good@1"
    return made


def named(data: dict[str, object]) -> dict[tuple[str, str], tuple[str, str]]:
    """Kind and name of each change → then, now."""
    changes = data["changes"]
    assert isinstance(changes, list)
    return {(c["kind"], c["what"]): (c["then"], c["now"]) for c in changes}


def test_nothing_has_changed_at_first(project: Project) -> None:
    """No change, exit code 0, and the command that brings the artifacts back."""
    data = project.explain(OMP_NUM_THREADS="2")
    assert (data["changes"], data["trouble"]) == ([], None)
    assert data["commands"] == [f"compilecache restore --tag good@1 --store {project.store}"]


def test_explain_names_what_has_changed_and_its_commands_undo_it(project: Project) -> None:
    """A package replaced, one added, variables, a source, a setting: each with then and now.

    The commands are run as they stand; afterwards what they can bring back is as it was.
    """
    project.write(3)
    project.install("neighbour", "2.0")
    project.install("intruder", "0.1")
    data = project.explain(TORCHINDUCTOR_MAX_AUTOTUNE="1", OMP_NUM_THREADS="1")
    found = named(data)
    assert found["package", "neighbour"] == ("1.0", "2.0")
    assert found["package", "intruder"] == ("absent", "0.1")
    assert found["variable", "TORCHINDUCTOR_MAX_AUTOTUNE"] == ("absent", "1")
    assert found["variable", "OMP_NUM_THREADS"] == ("2", "1")
    assert {kind for kind, what in found if what == "line"} == {"source"}
    commands = data["commands"]
    assert isinstance(commands, list)
    assert "pip uninstall --yes intruder" in commands
    assert "pip install -c good-constraints.txt neighbour==1.0" in commands
    assert "unset TORCHINDUCTOR_MAX_AUTOTUNE" in commands
    assert "export OMP_NUM_THREADS=2" in commands
    commit = project.git("rev-parse", "HEAD")
    (checkout,) = [line for line in commands if line.startswith("git ")]
    assert checkout == f"git -C {project.folder} checkout {commit} -- line.py"
    subprocess.run(checkout, shell=True, check=True, capture_output=True)
    left = named(project.explain(OMP_NUM_THREADS="2"))
    assert set(left) == {("package", "neighbour"), ("package", "intruder")}


def test_a_source_that_no_commit_holds_is_said(project: Project) -> None:
    """Tagging warns; explain does not pretend that the commit has it."""
    project.write(5)
    words = ("--device", "cpu", "--root", project.root, "--store", project.store)
    ended = project.run("tag", "good", "--fingerprint", "", *words[2:])
    assert ended.code == 0, ended.err
    assert "line.py has changes that commit" in ended.err
    project.write(6)
    data = project.explain()
    commands = data["commands"]
    assert isinstance(commands, list)
    assert any("line had changes that no commit holds" in line for line in commands)


def test_a_workload_that_cannot_be_built_hides_no_other_change(project: Project) -> None:
    """Its own error is said; packages and sources are compared all the same."""
    (project.folder / "line.py").write_text("import no_such_module\n")
    data = project.explain(OMP_NUM_THREADS="2")
    assert "no_such_module" in str(data["trouble"])
    assert set(named(data)) == {("source", "line")}


def test_restore_by_tag_says_what_is_not_as_it_was_and_restores_all_the_same(
    project: Project,
) -> None:
    """A line a change; with --strict the exit code is 3; the files are there both times."""
    project.install("neighbour", "2.0")
    fresh_root = project.folder.parent / "fresh"
    words = ("restore", "--tag", "good", "--root", fresh_root, "--store", project.store)
    ended = project.run(*words, OMP_NUM_THREADS="2")
    assert ended.code == 0, ended.err
    assert "2 restored" in ended.out
    assert "not as it was: package neighbour: 1.0 → 2.0" in ended.out
    assert (fresh_root / "fxgraph/ab/k/1").read_bytes() == b"entry 1"
    assert project.run(*words, "--strict", OMP_NUM_THREADS="2").code == 3
    assert project.run("restore", "--tag", "god", *words[3:]).code == 2
    assert "Did you mean good" in project.run("restore", "--tag", "god", *words[3:]).err


def test_what_a_tag_holds_can_be_listed_and_written(project: Project) -> None:
    """The plan as YAML, the packages as a constraints file, the list; released, it is gone."""
    store = ("--store", project.store)
    assert project.run("tag", "good", "--show", "plan", *store).out == PLAN.dump()
    lines = project.run("tag", "good", "--show", "constraints", *store).out.splitlines()
    assert "neighbour==1.0" in lines
    shown = json.loads(project.run("tag", "good", "--show", "all", *store).out)
    assert [source["path"] for source in shown["surroundings"]["sources"]] == ["line.py"]
    (row,) = project.run("tag", "--list", *store, "--json").json["tags"]  # type: ignore[misc]
    assert (row["tag"], row["tokens_per_second"], row["records"]) == ("good@1", 21500, 2)
    listed = project.run("tag", "--list", *store).out
    assert all(word in listed for word in ("good@1", "21,500", "before", "upgrade"))
    assert project.run("gc", *store).out.count("is kept by tag good@1") == 1
    assert project.run("tag", "good", "--release", *store).code == 0
    assert project.run("tag", "--list", *store, "--json").json["tags"] == []


def test_a_plan_that_differs_from_the_tag_s_is_compared(project: Project) -> None:
    """Shapes that were planned then, or are only now; and the command that writes the old plan."""
    other = plan_of([PLAN.specs[0], InputSpec(dims={"batch": 9})], workload="line:Line")
    project.plan.write_text(other.dump())
    data = project.explain(project.plan, OMP_NUM_THREADS="2")
    assert {kind for kind, _ in named(data)} == {"plan"}
    assert sorted(named(data).values()) == [
        ("not planned", "planned"),
        ("planned", "not planned"),
    ]
    command = f"compilecache tag good@1 --show plan --store {project.store} > plan.yaml"
    assert command in data["commands"]  # type: ignore[operator]


def tag_while_training(plan: Path, root: Path, store: Path) -> tuple[object, ...]:
    """Two good steps, and a thread that tags them."""
    model, made = training.model_of("TwoLayer"), []
    with ensure_warm(model, plan, root=root, store=store, workload="workloads:two_layer") as warm:
        training.train(model, (2, 3), warm.report)
        thread = threading.Thread(
            target=lambda: made.append(warm.tag("good", tokens_per_second=21500))
        )
        thread.start()
        thread.join()
        with pytest.raises(PlanError):
            warm.tag("../good")
        shutil.rmtree(store / "v1" / warm.report.fingerprint / "artifacts")
        made.append(warm.tag("good"))
        return (*made, warm.compiles_after_prime)


@pytest.mark.slow
def test_a_trainer_tags_itself_and_the_state_comes_back(fresh: Template, warmed: Place) -> None:
    """From a thread, without a compile; a store that lost its records costs the tag, not the run.

    With everything lost the tag brings back what a fresh process needs to compile nothing.
    """
    kept = warmed.folder / "kept"
    shutil.copytree(warmed.store, kept)
    said = fresh.call(tag_while_training, warmed.plan_file, warmed.root, warmed.store)
    assert said == ("good@1", None, 0)
    shutil.copytree(warmed.store / "v1" / "tags", kept / "v1" / "tags")
    shutil.rmtree(warmed.root)
    ended = fresh.command("restore", "--tag", "good", "--root", warmed.root, "--store", kept)
    assert (ended.code, "3 restored" in ended.out) == (0, True), ended.err + ended.out
    words = (warmed.plan_file, "--device", "cpu", "--root", warmed.root)
    assert fresh.command("verify", *words).code == 0


@pytest.mark.slow
def test_extra_roots_go_and_come_with_a_warm_up(fresh: Template, warmed: Place) -> None:
    """Two of them: published by one process, restored by another in other folders, and reported."""
    here = {name: warmed.folder / name for name in ("deepgemm", "own")}
    there = {name: warmed.folder / "there" / name for name in here}
    for name, folder in here.items():
        folder.mkdir(mode=0o700)
        (folder / "kernel.bin").write_text(name)
    options = [word for name in here for word in ("--extra-root", f"{name}={here[name]}")]
    ended = fresh.command("warm", *warmed.words, *options, "--json")
    rows = ended.json["extra_roots"]
    assert [(row["name"], row["published"]) for row in rows] == [("deepgemm", 1), ("own", 1)]  # type: ignore[union-attr]
    shutil.rmtree(warmed.root)
    named = ":".join(f"{name}={folder}" for name, folder in there.items())
    ended = fresh.command("restore", *warmed.words, env={"COMPILECACHE_EXTRA_ROOTS": named})
    assert (ended.code, "and 2 files of extra roots" in ended.out) == (0, True), ended.err
    assert {name: (there[name] / "kernel.bin").read_text() for name in there} == {
        name: name for name in there
    }
