"""From lengths and a workload to a plan."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import jsonschema
import pytest
import yaml

import compilecache
from compilecache.errors import PlanError
from compilecache.planning import (
    PlanRequest,
    check_devices,
    parse_settings,
    plan_schema,
    plan_shapes,
    write_plan,
)
from compilecache.shapes import ShapePlan

SCHEMA = Path(compilecache.__file__).with_name("schemas") / "plan.schema.json"

WORKLOAD = """
    from compilecache.shapes import InputSpec
    from compilecache.workload import Workload

    class Toy(Workload):
        def __init__(self, blocks: int = 1, limit: int = 1024) -> None:
            self.blocks, self.limit = blocks, limit

        def max_length(self):
            return self.limit

        def specs(self, seq_lens, *, batch_sizes, phases):
            return [
                InputSpec(phase=p, dims={"seq_len": s, "batch": b, "blocks": self.blocks})
                for s in seq_lens for b in batch_sizes for p in phases
            ]
"""


@pytest.fixture
def rows(tmp_path: Path) -> str:
    """A source of four lengths."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"length": {n}}}\n' for n in (100, 120, 500, 900)))
    return str(path)


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A workload that takes rows of up to 1024 tokens."""
    (tmp_path / "toy_workload.py").write_text(textwrap.dedent(WORKLOAD))
    monkeypatch.syspath_prepend(str(tmp_path))
    return "toy_workload:Toy"


def test_a_plan_comes_from_lengths_and_a_workload(rows: str, toy: str) -> None:
    """Edges of the best buckets, in each batch size and phase, and where they came from."""
    request = PlanRequest(
        workload=toy, settings={"blocks": 3}, lengths=rows, buckets=2, batch_sizes=(1, 2)
    )
    planned = plan_shapes(request)
    assert planned.plan.sizes() == (128, 1024)
    assert planned.plan.sizes("batch") == (1, 2)
    assert planned.plan.sizes("blocks") == (3,)
    assert len(planned.plan.specs) == 8
    assert planned.plan.workload == toy
    assert planned.plan.settings == {"blocks": 3}
    assert planned.plan.lengths == {
        "source": "rows.jsonl",
        "rows": 4,
        "longest": 900,
        "padded_share": 0.2969,
        "step": 128,
        "buckets": 2,
        "knee": 2,
    }


def test_the_knee_is_taken_where_nothing_is_asked_for(rows: str) -> None:
    """Without a workload the specs have the dims seq_len and batch."""
    planned = plan_shapes(PlanRequest(lengths=rows))
    assert planned.curve is not None
    assert planned.buckets == planned.curve.at(planned.curve.knee)
    assert [spec.dims for spec in planned.plan.specs[::2]] == [
        {"seq_len": 128, "batch": 1},
        {"seq_len": 1024, "batch": 1},
    ]


def test_every_observed_length_fits_its_plan(rows: str) -> None:
    """plan.fit gives the smallest planned size, and refuses what is longer."""
    plan = plan_shapes(PlanRequest(lengths=rows, buckets=3)).plan
    assert [plan.fit(length) for length in (1, 100, 128, 129, 900)] == [128, 128, 128, 512, 1024]
    with pytest.raises(
        PlanError, match=r"a seq_len of 1025 fits no planned shape \(largest 1024\)"
    ):
        plan.fit(1025)


def test_explicit_buckets_are_taken_as_they_are(rows: str) -> None:
    """As --seq-lens, as the source itself, or with lengths, which then tell their waste."""
    for request in (PlanRequest(seq_lens=(512, 100)), PlanRequest(lengths="512, 100")):
        planned = plan_shapes(request)
        assert planned.plan.sizes() == (100, 512)
        assert (planned.buckets, planned.curve) == (None, None)
    planned = plan_shapes(PlanRequest(seq_lens=(500, 1000), lengths=rows))
    assert planned.buckets is not None
    assert planned.buckets.rows == (3, 1)
    assert planned.buckets.padded_tokens == 400 + 380 + 0 + 100


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "there is nothing to plan from"),
        ({"lengths": "rows", "buckets": 9}, "9 buckets were asked for, the lengths allow 1 to 3"),
        ({"lengths": "rows", "buckets": 0}, "0 buckets were asked for"),
        ({"lengths": "rows", "max_length": 899}, "line 4: 900 tokens are more than the maximum"),
        ({"lengths": "rows", "step": 1000, "workload": "toy"}, None),
        ({"lengths": "rows", "step": 700, "workload": "toy"}, "bucket of 1400 tokens is past"),
        ({"seq_lens": (2048,), "workload": "toy"}, "a bucket of 2048 tokens is past the maximum"),
        ({"seq_lens": (512,), "lengths": "rows"}, "a row of 900 tokens fits no bucket"),
        ({"seq_lens": (512,), "workload": "nowhere:x"}, "no module named 'nowhere'"),
        ({"seq_lens": (512,), "phases": ("test",)}, "phase"),
    ],
)
def test_a_request_that_cannot_be_planned_is_refused(
    rows: str, toy: str, options: dict[str, object], message: str | None
) -> None:
    """Each with a message that names the length, bucket, workload or field."""
    names = {"rows": rows, "toy": toy}
    request = PlanRequest(
        **{k: names.get(v, v) if isinstance(v, str) else v for k, v in options.items()}  # type: ignore[arg-type]
    )
    if message is None:
        assert plan_shapes(request).plan.sizes()
        return
    with pytest.raises(PlanError, match=message):
        plan_shapes(request)


def test_the_workload_knows_the_maximum_and_truncate_cuts_to_it(rows: str, toy: str) -> None:
    """A limit given as an option counts where it is the smaller one."""
    settings = {"limit": 512}
    with pytest.raises(PlanError, match="more than the maximum of 512"):
        plan_shapes(PlanRequest(workload=toy, settings=settings, lengths=rows))
    request = PlanRequest(workload=toy, settings=settings, lengths=rows, truncate=True)
    plan = plan_shapes(request).plan
    assert max(plan.sizes()) == 512
    assert plan.lengths["truncated_rows"] == 1


def test_settings_are_json_or_text() -> None:
    """What is not JSON is taken as it stands; what is no key=value is refused."""
    assert parse_settings(["a=1", "b=tiny", "c=[1, 2]", "d=x=y"]) == {
        "a": 1,
        "b": "tiny",
        "c": [1, 2],
        "d": "x=y",
    }
    for pair in ("a", "=1", "a-b=1"):
        with pytest.raises(PlanError, match=f"'{pair}' is no setting"):
            parse_settings([pair])


def test_devices_carry_their_index() -> None:
    """As the trainer uses it; named once each."""
    assert check_devices(["cuda:1", "cpu", "cuda:1"]) == ("cuda:1", "cpu")
    for name in ("cuda", "gpu:0", "cuda:x", "", "cpu:0"):
        with pytest.raises(PlanError, match=f"there is no device '{name}'"):
            check_devices([name])


def test_a_written_plan_reads_the_same_and_meets_the_schema(rows: str, tmp_path: Path) -> None:
    """The file is YAML; a folder that is not there is a PlanError."""
    plan = plan_shapes(PlanRequest(lengths=rows)).plan
    write_plan(plan, tmp_path / "plan.yaml")
    assert ShapePlan.load(tmp_path / "plan.yaml") == plan
    jsonschema.validate(
        yaml.safe_load((tmp_path / "plan.yaml").read_text()), json.loads(SCHEMA.read_text())
    )
    with pytest.raises(PlanError, match="cannot be written: No such file"):
        write_plan(plan, tmp_path / "absent" / "plan.yaml")


def test_the_shipped_schema_is_current() -> None:
    """Write it anew from compilecache.planning.plan_schema when ShapePlan changes."""
    assert SCHEMA.read_text() == plan_schema()


def test_the_schema_refuses_what_the_library_refuses() -> None:
    """An unknown field, and a plan without specs."""
    schema = json.loads(SCHEMA.read_text())
    for data in ({"format": 1, "specs": []}, {"specs": [{"phaze": "train"}]}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(data, schema)
