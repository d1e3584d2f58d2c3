"""The files of deploy/ agree with the commands and with each other, and say what they are."""

from __future__ import annotations

import json
import re
from pathlib import Path

import click
import pytest
from deployed import (
    BASE,
    DEPLOY,
    DOCKERFILES,
    FILES,
    OVERLAY,
    YAML,
    Line,
    Node,
    command_lines,
    containers,
    manifests,
    named,
    patched,
    pods,
    read,
)
from processes import ROOT

from compilecache.cli import group
from compilecache.gpuprofile import GpuProfile
from compilecache.shapes import ShapePlan
from warmup.cli import group as warmup_group

OFFLINE = DEPLOY / "image/offline.Dockerfile"
WARM_UP = ("Job", "compilecache-warm-up")


# -- commands ----------------------------------------------------------------------------------------


def test_command_lines_are_found_in_every_kind_of_file() -> None:
    """What the next test looks at is not nothing."""
    files = {line.file for line in command_lines()}
    assert files >= {
        "Dockerfile",
        "compilecache-warmup.service",
        "deploy.md",
        "offline.Dockerfile",
        "service.yaml",
        "trainer.yaml",
        "warm-array.sbatch",
        "warm-cache.gitlab-ci.yml",
        "warm-cache.yml",
        "warm-up.yaml",
    }


@pytest.mark.parametrize("line", command_lines(), ids=str)
def test_command_lines_use_options_that_exist(line: Line) -> None:
    """Click itself takes them: no option that is unknown, or lacks its value."""
    commands = warmup_group if line.program == "warmup" else group
    command = commands.get_command(click.Context(commands), line.words[0])
    assert command is not None, f"there is no '{line.program} {line.words[0]}'"
    context = click.Context(command, info_name=line.words[0])
    values, left, _ = command.make_parser(context).parse_args(list(line.words[1:]))
    assert left == [], line
    arguments = [param for param in command.params if isinstance(param, click.Argument)]
    assert all(values.get(str(param.name)) for param in arguments if param.required), line


@pytest.mark.parametrize("made", [list(manifests()), patched()], ids=["base", "overlay"])
def test_shards_are_as_many_as_completions(made: list[Node]) -> None:
    """Every part of the plan has a pod; the command gives up before Kubernetes ends it."""
    (job,) = (m["spec"] for m in made if (m["kind"], m["metadata"]["name"]) == WARM_UP)
    args = job["template"]["spec"]["containers"][0]["args"]
    shards = [text for text in args if text.startswith("--shard")]
    assert shards == [f"--shard=auto/{job['completions']}"]
    assert "--device=cuda:0" in args
    assert job["parallelism"] <= job["completions"]
    (timeout,) = (int(text.partition("=")[2]) for text in args if text.startswith("--timeout="))
    assert timeout < job["activeDeadlineSeconds"]


def test_other_schedulers_count_their_shards_alike() -> None:
    """GitHub's matrix, GitLab's variables and the plan's Job cut the plan as they say."""
    shard = {line.file: line.words[line.words.index("--shard") + 1] for line in command_lines()
             if "--shard" in line.words}  # fmt: skip
    matrix = read(DEPLOY / "github/warm-cache.yml")[0]["jobs"]["warm"]["strategy"]["matrix"]
    assert matrix["shard"] == list(range(1, int(shard["warm-cache.yml"].partition("/")[2]) + 1))
    assert shard["warm-cache.gitlab-ci.yml"] == "$CI_NODE_INDEX/$CI_NODE_TOTAL"
    assert shard["warm-array.sbatch"] == "auto"
    assert "#SBATCH --array=" in (DEPLOY / "slurm/warm-array.sbatch").read_text()


# -- files -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", FILES, ids=named)
def test_every_file_says_what_it_is_and_when_to_use_it(path: Path) -> None:
    """Two lines of comment at its top; a sentence in the dashboard, which can have none; a row in the page."""
    lines = path.read_text(encoding="utf-8").removeprefix("#!/bin/bash\n").splitlines()
    if path.suffix == ".json":
        assert "Use it where" in json.loads(path.read_text())["description"]
    else:
        assert [bool(re.match(r"# \S", line)) for line in lines[:2]] == [True, True]
    assert re.search(rf"\]\(\.\./deploy/{re.escape(named(path))}\)", (ROOT / "docs/deploy.md").read_text()) or (
        path.parent == OVERLAY or path.name.endswith(".dockerignore")
    )  # fmt: skip


@pytest.mark.parametrize("path", YAML, ids=named)
def test_every_yaml_file_can_be_read(path: Path) -> None:
    """Each document of it, and none is empty."""
    assert all(read(path))


def test_kustomizations_name_all_files_and_only_what_exists() -> None:
    """No manifest, patch or file for a ConfigMap is forgotten, none is missing."""
    used: set[Path] = set()
    for path in (DEPLOY / "kubernetes").rglob("kustomization.yaml"):
        (made,) = read(path)
        names = [*made.get("resources", []), *made.get("components", [])]
        names += [patch["path"] for patch in made.get("patches", [])]
        names += [name for one in made.get("configMapGenerator", []) for name in one["files"]]
        used |= {(path.parent / name).resolve() for name in names}
    assert [path for path in used if not path.exists()] == []
    files = set((DEPLOY / "kubernetes").rglob("*.yaml"))
    assert {path for path in files - used if path.name != "kustomization.yaml"} == set()


def test_the_plan_can_be_read_and_its_workload_is_allowed() -> None:
    """What the pods are warmed for is a plan, and the service beside them takes it."""
    plan = ShapePlan.load(BASE / "plan.yaml")
    assert plan.workload in read(BASE / "settings.yaml")[0]["workloads"]
    assert plan.engine == "program"


def test_images_have_a_tag() -> None:
    """Nothing is taken at its newest: what a pod runs is what was warmed."""
    images = [one["image"] for pod in pods(list(manifests())) for one in containers(pod)]
    images.append(read(DEPLOY / "gitlab/warm-cache.gitlab-ci.yml")[0]["warm-cache"]["image"])
    overlay = read(OVERLAY / "kustomization.yaml")[0]["images"]
    images += [f"{one['newName']}:{one['newTag']}" for one in overlay]
    for path in DOCKERFILES:
        stages = re.findall(r"^FROM (\S+)(?: AS (\w+))?$", path.read_text(), re.M)
        known = {name for _, name in stages} | {"scratch"}
        images += [image for image, _ in stages if image not in known]
    assert len(images) >= 10
    for image in images:
        assert re.fullmatch(r"[\w./-]+:(?!latest$)[\w.-]+", image), image
    assert {one["name"] for one in overlay} == {
        one["image"].partition(":")[0] for pod in pods(list(manifests())) for one in containers(pod)
    }


@pytest.mark.parametrize("path", DOCKERFILES, ids=named)
def test_the_image_holds_no_secret_and_runs_as_nobody_in_particular(path: Path) -> None:
    """Keys come as mounts; the last user is a number other than root's; the cache is named."""
    text = path.read_text()
    assert not re.search(r"^(?:ARG|ENV) .*(?:KEY|TOKEN|SECRET|PASSWORD)", text, re.M)
    assert not re.search(r"^COPY .*(?:\.key|\.aws|credentials)", text, re.M)
    assert text.count("--mount=type=secret") == 2
    final = text.partition(" AS base\n")[2].partition(" AS warm\n")[0]
    assert re.findall(r"^USER (\S+)$", final, re.M) == ["10001:10001"]
    assert "USER" not in text.partition(" AS final\n")[2]
    assert "ENV COMPILECACHE_BAKED=/opt/compilecache" in text.partition(" AS final\n")[2]


def test_the_image_for_an_absent_gpu_is_made_where_there_is_none() -> None:
    """An ordinary runner, no container with GPUs, a profile that is shipped, and the torch that it was recorded with."""
    (workflow,) = read(DEPLOY / "github/offline-image.yml")
    text, image = (DEPLOY / "github/offline-image.yml").read_text(), OFFLINE.read_text()
    assert [job["runs-on"] for job in workflow["jobs"].values()] == ["ubuntu-24.04"]
    assert not re.search(r"--gpus|self-hosted", text + image)
    assert f"--file deploy/{named(OFFLINE)}" in text
    assert {*re.findall(r"--build-arg (\w+)=", text)} <= {*re.findall(r"^ARG (\w+)", image, re.M)}
    (default,) = re.findall(r"^ARG GPU_PROFILE=(\S+)$", image, re.M)
    assert GpuProfile.load(default) == GpuProfile.load(workflow["env"]["GPU_PROFILE"])
    makefile = (ROOT / "Makefile").read_text()
    (checked,) = re.findall(r"^OFFLINE_TORCH \?= (\S+)$", makefile, re.M)
    assert re.findall(r"^ARG TORCH=(\S+)$", image, re.M) == [checked]


def test_every_image_is_built_from_the_same_files() -> None:
    """Each Dockerfile has a list beside it, and the lists are one."""
    lists = [path.with_name(f"{path.name}.dockerignore").read_text() for path in DOCKERFILES]
    assert len(lists) >= 2
    assert len({*lists}) == 1
