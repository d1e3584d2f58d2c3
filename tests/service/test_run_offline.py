"""``warmup run --gpu-profile`` for real: needs a CUDA build of torch, and no GPU."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from places import Place
from processes import Template
from test_run import run

from compilecache.engines.programfile import read_header
from compilecache.gpuprofile import GpuProfile, versions

pytestmark = [
    pytest.mark.offline,
    pytest.mark.skipif(torch.version.cuda is None, reason="this torch is a CPU build"),
]
INDICES = "cuda:0,cuda:1,cuda:7"


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """A plan of two specs, by programs."""
    from workloads import plan

    made = Place(tmp_path)
    made.write(plan("two_layer", [4, 8]).model_copy(update={"engine": "program"}))
    profile = GpuProfile.load("h200").model_copy(update=versions())  # of whatever torch is here
    profile_of(made).write_text(profile.dump())
    return made


def profile_of(place: Place) -> Path:
    """Of an H200."""
    return place.folder / "gpu.json"


def words(place: Place, root: str) -> tuple[object, ...]:
    """The plan, compiled for an H200 into this root, without a store."""
    where = ("--root", place.folder / root, "--store", "none")
    return (place.plan_file, *where, "--gpu-profile", profile_of(place))


def test_it_bakes_programs_that_every_index_finds(fresh: Template, place: Place) -> None:
    """Compiled without a GPU, laid into a folder, and pulled from there without torch; the headers
    say that nobody has run them."""
    image, root = place.folder / "image", place.folder / "pulled"
    junit = place.folder / "junit.xml"
    ended = run(fresh, *words(place, "root"), "--bake", image, "--junit", junit).wait()
    assert ended.code == 0, ended.err
    line = ended.json
    assert (line["state"], line["compiled"], line["baked"]) == ("warm", 2, 2)
    assert (line["gpu_profile"], line["not_proven"]) == ("NVIDIA H200", [])
    assert "experimental" in ended.err.splitlines()[0]
    assert junit.read_text().count("compiled by program, not run here: it is for NVIDIA H200") == 2
    more = ("--device", INDICES, "--fingerprint", line["fingerprint"], "--root", root)
    pulled = fresh.warmup("pull", place.plan_file, "--baked", image, "--store", "none", *more)
    assert pulled.code == 0, pulled.err
    assert (pulled.json["targets"], pulled.json["missing"]) == (6, [])
    profiles = [read_header(path).profile for path in root.rglob("*.program")]
    assert [profile.name for profile in profiles if profile] == ["NVIDIA H200"] * 2
    again = run(fresh, *words(place, "again"), "--baked", image).wait()
    assert (again.json["restored"], again.json["compiled"]) == (2, 0)


def test_ended_by_the_scheduler_it_leaves_no_process(fresh: Template, place: Place) -> None:
    """Its forked compile workers are of the worker's session, and end with it."""
    started = run(fresh, *words(place, "root"))
    while "compiling forward" not in started.err and started.running:
        time.sleep(0.05)
    assert workers_of(place.root)
    started.kill(signal.SIGTERM)
    ended = started.wait()
    assert (ended.code, ended.json["state"]) == (1, "partly")
    assert "interrupted" in ended.err
    assert workers_of(place.root) == []


def workers_of(root: Path) -> list[str]:
    """Processes that were started to compile into this root."""
    wanted, found = f"TORCHINDUCTOR_CACHE_DIR={root}".encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if wanted in path.read_bytes().split(b"\0"):
                found.append(os.fspath(path))
        except OSError:
            continue
    return found
