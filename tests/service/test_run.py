"""``warmup run``: deadlines, deaths, shards and reports; workers that compile nothing, then real ones."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from places import Place
from processes import Running, Template
from services import FAKE, plan_of_acts

from compilecache.gpuprofile import GpuProfile
from compilecache.progress import LogProgress
from compilecache.report import Report, TargetReport
from compilecache.shapes import ShapePlan
from warmup.oneshot import JobFailed, carry_out
from warmup.service.queue import Request
from warmup.service.settings import Settings


class Heard(LogProgress):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[TargetReport] = []
        self.troubles: list[str] = []

    def done(self, row: TargetReport) -> None:
        super().done(row)
        self.rows.append(row)

    def trouble(self, text: str) -> None:
        self.troubles.append(text)


def carried_out(tmp_path: Path, *acts: str, **settings: object) -> tuple[Report, Heard]:
    """What the fake worker makes of a target for each act."""
    heard = Heard()
    request = Request(ShapePlan.parse(plan_of_acts(*acts)), ("cpu",))
    given = Settings.model_validate({"root": tmp_path, "store": "none", **settings})
    return carry_out(request, given, heard, command=FAKE).report, heard


def test_every_target_has_a_row_and_is_told_of(tmp_path: Path) -> None:
    """In the plan's order, with what it cost; the same rows that the progress heard."""
    report, heard = carried_out(tmp_path, "quick", "bypass", "quick")
    assert [row.status for row in report.targets] == ["compiled"] * 3
    assert list(report.targets) == heard.rows
    assert report.warm
    assert report.fingerprint == "fe" * 16


def test_a_target_that_hangs_is_ended_and_the_others_go_on(tmp_path: Path) -> None:
    """189290: pools of compilers hang; the row says which deadline ended it."""
    report, heard = carried_out(tmp_path, "quick", "hang", "quick", target_deadline=1)
    assert [row.status for row in report.targets] == ["compiled", "failed", "compiled"]
    assert "deadline of 1 s" in str(report.targets[1].error)
    assert any("deadline of 1 s" in text for text in heard.troubles)


def test_a_target_that_kills_its_process_is_tried_twice(tmp_path: Path) -> None:
    """The row and the log have its last words, and the others go on."""
    report, heard = carried_out(tmp_path, "crash", "quick")
    assert [row.status for row in report.targets] == ["failed", "compiled"]
    assert "signal 11" in str(report.targets[0].error)
    assert "the compiler has eaten itself" in heard.troubles[-1]


def test_the_whole_is_ended_by_its_own_deadline(tmp_path: Path) -> None:
    """What was finished is in the report; the rest says that the job ended."""
    with pytest.raises(JobFailed, match="deadline of 2 s") as caught:
        carried_out(tmp_path, "quick", "hang", "quick", job_deadline=2)
    rows = caught.value.report.targets
    assert [row.status for row in rows] == ["compiled", "failed", "failed"]
    assert rows[2].error


def test_workers_for_a_gpu_that_is_not_there_see_none(tmp_path: Path) -> None:
    """Each of them, also the one that follows a death, has the profile and no GPU in sight."""
    heard = Heard()
    request = Request(ShapePlan.parse(plan_of_acts("crash", "quick")), ("cuda:0",))
    settings = Settings(root=tmp_path, store="none")
    profile = GpuProfile.load("h200")
    done = carry_out(request, settings, heard, command=FAKE, profile=profile)
    assert [row.status for row in done.report.targets] == ["failed", "compiled"]
    told = [text for text in heard.troubles if text.startswith("for ")]
    assert told == ["for NVIDIA H200, GPUs in sight: none"] * 3


# -- as a person types it -----------------------------------------------------------------------


def run(fresh: Template, *words: object, **keywords: object) -> Running:
    """``warmup run``, started."""
    return fresh.start(_run, [str(word) for word in words], **keywords)  # type: ignore[arg-type]


def _run(words: list[str]) -> None:
    from processes import warmup

    warmup(["run", *words])


def test_it_reports_as_ci_wants_it_and_bakes_what_is_proven(
    fresh: Template, warmed: Place, tmp_path: Path
) -> None:
    """From a store that has everything: proven, laid out, nothing compiled; and both files."""
    shutil.rmtree(warmed.root)
    junit, report, image = tmp_path / "junit.xml", tmp_path / "report.json", tmp_path / "image"
    files = ("--junit", junit, "--report", report, "--bake", image)
    ended = run(fresh, *warmed.words, *files).wait()
    assert ended.code == 0, ended.err
    line = ended.json
    assert (line["state"], line["restored"], line["baked"]) == ("warm", 3, 3)
    suite = ElementTree.parse(junit).getroot()[0]
    assert (suite.attrib["tests"], suite.attrib["failures"]) == ("3", "0")
    assert Report.model_validate_json(report.read_bytes()).count("restored") == 3
    assert len([*image.rglob("*.tar.zst")]) == 3
    assert fresh.command("report", report).code == 0


def test_a_cache_that_cannot_be_baked_loses_no_report(
    fresh: Template, warmed: Place, tmp_path: Path
) -> None:
    """The line and the files say what is warm; the error says what is not laid."""
    (tmp_path / "image").write_text("in the way")
    junit = tmp_path / "junit.xml"
    files = ("--junit", junit, "--bake", tmp_path / "image" / "cache")
    ended = run(fresh, *warmed.words, *files).wait()
    assert ended.code == 1
    assert "cannot be written" in ended.err
    assert ended.json["state"] == "warm"
    assert junit.is_file()


@pytest.mark.parametrize("option", ["--junit", "--report"])
def test_a_report_that_could_not_be_written_is_refused_first(
    option: str, fresh: Template, warmed: Place, tmp_path: Path
) -> None:
    """Not after hours, when there is something to report."""
    ended = run(fresh, *warmed.words, option, tmp_path / "gone" / "report").wait()
    assert (ended.code, ended.out) == (1, "")
    assert "cannot be written: No such file or directory" in ended.err
    assert len(ended.err.splitlines()) == 1


def test_shards_take_what_is_theirs(fresh: Template, warmed: Place) -> None:
    """The index of the scheduler; more shards than specs leave some with nothing to do."""
    env = {"JOB_COMPLETION_INDEX": "1"}
    ended = run(fresh, *warmed.words, "--shard", "auto/2", env=env).wait()
    assert ended.code == 0, ended.err
    assert ended.json["targets"] == 1
    idle = run(fresh, *warmed.words, "--shard", "5/5").wait()
    assert (idle.code, idle.json["targets"]) == (0, 0)
    assert run(fresh, *warmed.words, "--shard", "auto").wait().code == 2


BAD_PROFILES: list[tuple[dict[str, object], str]] = [
    ({"vendor": "amd"}, "field 'vendor'"),
    ({"multi_processor_count": -1}, "field 'multi_processor_count'"),
    ({"triton": "0.0.1"}, "triton" if torch.version.cuda else "this torch has no CUDA"),
    ({"wavefront": 64}, "field 'wavefront'"),
]


@pytest.mark.parametrize(("changes", "said"), BAD_PROFILES, ids=lambda value: str(value)[:30])
def test_a_profile_that_cannot_be_used_is_refused_before_anything_is_compiled(
    changes: dict[str, object], said: str, fresh: Template, tmp_path: Path
) -> None:
    """One line that names the field, exit code 2, and neither a root nor a report was begun."""
    from workloads import plan

    place, profile = Place(tmp_path), tmp_path / "gpu.json"
    place.write(plan("two_layer", [2]).model_copy(update={"engine": "program"}))
    known = json.loads(GpuProfile.load("h200").dump())
    profile.write_text(json.dumps(known | changes))
    words = (place.plan_file, "--root", place.root, "--store", "none", "--gpu-profile", profile)
    ended = run(fresh, *words, "--report", tmp_path / "report.json").wait()
    assert (ended.code, ended.out) == (2, "")
    assert said in ended.err
    assert len(ended.err.splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpu.json", "plan.yaml"]


@pytest.mark.parametrize(
    ("engine", "more", "said"),
    [
        ("trace", (), "engine 'trace'"),
        ("program", ("--device", "cuda:1"), "--device"),
        ("program", ("--extra-root", "triton"), "--extra-root"),
    ],
    ids=["trace", "device", "extra root"],
)
def test_what_cannot_go_with_a_profile_is_refused(
    engine: str, more: tuple[str, ...], said: str, fresh: Template, tmp_path: Path
) -> None:
    """A plan that must run what it compiles, a choice among devices that are not there, other caches."""
    from workloads import plan

    place = Place(tmp_path)
    place.write(plan("two_layer", [2]).model_copy(update={"engine": engine}))
    words = (place.plan_file, "--root", place.root, "--store", "none", "--gpu-profile", "h200")
    ended = run(fresh, *words, *more).wait()
    assert ended.code == 2
    assert said in ended.err
    assert not place.root.exists()


@pytest.mark.slow
def test_ended_by_the_scheduler_it_goes_on_where_it_stopped(
    fresh: Template, seeded: Place, tmp_path: Path
) -> None:
    """SIGTERM in the middle, no process left behind; the next run compiles only what is missing."""
    from workloads import plan

    seeded.write(plan("two_layer", [2, 3]))
    first = run(fresh, *seeded.words)
    while "compiled forward" not in first.err and first.running:
        time.sleep(0.05)
    first.kill(signal.SIGTERM)
    ended = first.wait()
    assert ended.code == 1
    assert "interrupted" in ended.err
    assert ended.json["state"] == "partly"
    again = run(fresh, *seeded.words).wait()
    assert again.code == 0, again.err
    told = again.json
    assert (told["state"], told["targets"], told["not_proven"]) == ("warm", 2, [])
    assert told["compiled"] < 2, json.dumps(told)
    assert not _children_of(first.pid)


def _children_of(pid: int) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/status"):
        try:
            text = path.read_text()
        except OSError:
            continue
        if f"\nPPid:\t{pid}\n" in text:
            found.append(os.fspath(path))
    return found
