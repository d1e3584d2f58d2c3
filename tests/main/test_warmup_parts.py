"""Shards of a plan, and reports as CI systems read them."""

from __future__ import annotations

from collections.abc import Mapping
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from workloads import plan

from compilecache import PlanError
from compilecache.evidence import Evidence
from compilecache.report import Report, TargetReport
from warmup.junit import junit
from warmup.shards import Shard, parse_shard

PLAN = plan("two_layer", list(range(2, 9)))


@given(st.integers(1, 12))
def test_shards_share_a_plan(count: int) -> None:
    """Every spec is in exactly one of them; what is left over is nobody's, and said so by None."""
    shares = [Shard(place, count).share(PLAN) for place in range(count)]
    specs = [spec for share in shares if share for spec in share.specs]
    assert sorted(map(str, specs)) == sorted(map(str, PLAN.specs))
    assert shares.count(None) == max(0, count - len(PLAN.specs))


@pytest.mark.parametrize(
    ("text", "environment", "shard"),
    [
        ("1/4", {}, Shard(0, 4)),
        ("4/4", {"RANK": "1", "WORLD_SIZE": "9"}, Shard(3, 4)),
        ("auto/3", {"JOB_COMPLETION_INDEX": "2"}, Shard(2, 3)),
        (
            "auto",
            {
                "SLURM_ARRAY_TASK_ID": "7",
                "SLURM_ARRAY_TASK_MIN": "5",
                "SLURM_ARRAY_TASK_COUNT": "4",
            },
            Shard(2, 4),
        ),
        ("auto", {"RANK": "0", "WORLD_SIZE": "2"}, Shard(0, 2)),
        ("auto", {"JOB_COMPLETION_INDEX": "0", "RANK": "1", "WORLD_SIZE": "2"}, None),
        ("auto", {}, None),
        ("auto", {"JOB_COMPLETION_INDEX": "0"}, None),
        ("auto/2", {"JOB_COMPLETION_INDEX": "2"}, None),
        ("auto", {"RANK": "one", "WORLD_SIZE": "2"}, None),
        ("0/4", {}, None),
        ("5/4", {}, None),
        ("1/0", {}, None),
        ("2", {}, None),
        ("1-4", {}, None),
    ],
)
def test_a_job_learns_its_shard(
    text: str, environment: Mapping[str, str], shard: Shard | None
) -> None:
    """From the command line, or from Kubernetes, Slurm, torchrun; else a clear error."""
    if shard is not None:
        assert parse_shard(text, environment) == shard
        return
    with pytest.raises(PlanError, match="shard") as caught:
        parse_shard(text, environment)
    assert "--shard" in caught.value.next_step


def _row(key: str, status: str, **more: object) -> TargetReport:
    return TargetReport.model_validate(
        {"key": key, "target": f"forward {key}", "device": "cpu", "status": status, **more}
    )


def test_a_report_is_what_ci_systems_show() -> None:
    """A case each; what failed, what is never cached and what could not be proven; any text."""
    never = Evidence(
        outcome="bypass", hits=0, misses=0, bypasses=1, launches=0, seconds=0.5, again_seconds=0
    )
    rows = (
        _row("a", "compiled"),
        _row("b", "failed", error="boom \x1b[31m<&>\nmore"),
        _row("c", "local", evidence=never),
        _row("d", "restored"),
    )
    report = Report(
        fingerprint="f", engine="trace", root="r", store=None, targets=rows, gave_up=("x\x00y",)
    )
    suite = ElementTree.fromstring(junit(report, {"d": "2 misses"}))[0]
    assert suite.attrib | {"time": ""} == {
        "name": "compilecache", "tests": "4", "errors": "1", "failures": "2", "time": "",
    }  # fmt: skip
    cases = {case.attrib["name"]: case for case in suite.iter("testcase")}
    assert cases["forward b"].find("error").text == "boom \ufffd[31m<&>\nmore"  # type: ignore[union-attr]
    assert cases["forward c"].attrib["time"] == "0.500"
    assert [name for name, case in cases.items() if case.find("failure") is not None] == [
        "forward c", "forward d",
    ]  # fmt: skip
    assert suite.findtext("system-err") == "x\ufffdy"
