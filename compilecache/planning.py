"""From a source of lengths and a workload to a shape plan: what ``compilecache plan`` does."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import JsonValue

from compilecache.buckets import (
    DEFAULT_MAX_BUCKETS,
    DEFAULT_STEP,
    BucketPlan,
    WasteCurve,
    bucket_plan,
    waste_curve,
)
from compilecache.errors import PlanError
from compilecache.lengths import Lengths, parse_sizes, read_lengths
from compilecache.shapes import InputSpec, ShapePlan
from compilecache.workload import Workload, load_workload

PHASES = ("train", "eval")

_EXPLICIT = re.compile(r"[\d,\s]+")
_DEVICE = re.compile(r"cpu|cuda:\d+")


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What a plan is made from."""

    workload: str | None = None
    """``module:attribute``; without one the specs have the dims seq_len and batch only."""
    settings: Mapping[str, JsonValue] = field(default_factory=dict)
    """Keyword arguments of the workload factory."""
    lengths: str | None = None
    """A JSONL, ``.npy`` or parquet file, or explicit buckets: "512,1024"."""
    length_field: str | None = None
    """The field that holds a length, or a list whose length counts."""
    seq_lens: tuple[int, ...] = ()
    """Explicit bucket edges in tokens; with ``lengths`` their waste is computed."""
    buckets: int | None = None
    """How many; None takes the knee of the curve."""
    max_buckets: int = DEFAULT_MAX_BUCKETS
    """Where the curve ends."""
    step: int = DEFAULT_STEP
    """Chosen edges are multiples of this, in tokens."""
    batch_sizes: tuple[int, ...] = (1,)
    """Rows of a batch; each is planned with each edge."""
    phases: tuple[str, ...] = PHASES
    """train, eval."""
    max_length: int | None = None
    """The longest row in tokens; None takes the workload's own maximum."""
    truncate: bool = False
    """Longer rows count as the maximum instead of being an error."""


@dataclass(frozen=True, slots=True)
class PlannedShapes:
    """A plan and where its buckets came from."""

    plan: ShapePlan
    """What will be compiled."""
    buckets: BucketPlan | None
    """The chosen edges and their waste; None when no lengths were given."""
    curve: WasteCurve | None
    """Waste against the number of buckets; None when the edges were given."""


def plan_shapes(request: PlanRequest) -> PlannedShapes:
    """Chooses the buckets and asks the workload for its specs.

    Raises PlanError for a source, length, bucket count, workload or setting that cannot be used.
    """
    workload = None
    if request.workload is not None:
        workload = load_workload(request.workload, request.settings)
    limit = _limit(request, workload)
    lengths, edges = _source(request, limit)
    curve: WasteCurve | None = None
    chosen: BucketPlan | None = None
    if lengths is not None and not edges:
        curve = waste_curve(lengths.counts, step=request.step, max_buckets=request.max_buckets)
        chosen = curve.at(curve.knee if request.buckets is None else request.buckets)
    elif lengths is not None:
        chosen = bucket_plan(edges, lengths.counts)
    edges = edges if chosen is None else chosen.edges
    _check_edges(edges, limit, request)
    plan = ShapePlan.parse(
        {
            "workload": request.workload,
            "settings": dict(request.settings),
            "lengths": {} if lengths is None or chosen is None else _notes(lengths, chosen, curve),
            "specs": [spec.model_dump() for spec in _specs(request, workload, edges)],
        }
    )
    return PlannedShapes(plan, chosen, curve)


def check_devices(devices: Sequence[str]) -> tuple[str, ...]:
    """The devices, once each. Raises PlanError for a name without an index, or of no known kind."""
    for device in devices:
        if _DEVICE.fullmatch(device) is None:
            raise PlanError(
                f"there is no device '{device}'",
                next_step="Name it with its index, as the trainer uses it: cuda:0, cuda:1, cpu",
                field="device",
            )
    return tuple(dict.fromkeys(devices))


def parse_settings(pairs: Sequence[str]) -> dict[str, JsonValue]:
    """Settings from "key=value"; a value is JSON, or else the text itself. Raises PlanError."""
    settings: dict[str, JsonValue] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key.isidentifier():
            raise PlanError(
                f"'{pair}' is no setting",
                next_step="Write it as key=value, for example --set layers=5",
                field="set",
            )
        try:
            settings[key] = json.loads(text)
        except ValueError:
            settings[key] = text
    return settings


def plan_schema() -> str:
    """The JSON Schema of plan files, as it ships in ``compilecache/schemas/plan.schema.json``."""
    return json.dumps(ShapePlan.model_json_schema(), indent=2, sort_keys=True) + "\n"


def write_plan(plan: ShapePlan, path: Path) -> None:
    """Writes a plan file, whole or not at all. Raises PlanError when the folder refuses it."""
    from compilecache.files import replacing

    try:
        with replacing(path) as file:
            file.write(plan.dump().encode())
    except OSError as error:
        raise PlanError(
            f"plan file '{path}' cannot be written: {error.strerror or error}",
            next_step="Name a file in a folder that exists and is yours: --output FILE",
            field="output",
        ) from error


def _limit(request: PlanRequest, workload: Workload | None) -> int | None:
    own = None if workload is None else workload.max_length()
    given = request.max_length
    return min((limit for limit in (own, given) if limit is not None), default=None)


def _source(request: PlanRequest, limit: int | None) -> tuple[Lengths | None, tuple[int, ...]]:
    """The lengths to choose from, and the edges where they are given."""
    edges = tuple(sorted(set(request.seq_lens)))
    if request.lengths is not None and _EXPLICIT.fullmatch(request.lengths):
        edges = tuple(sorted({*edges, *parse_sizes(request.lengths, field="--lengths")}))
    elif request.lengths is not None:
        field_name, cut = request.length_field, request.truncate
        lengths = read_lengths(request.lengths, field=field_name, max_length=limit, truncate=cut)
        return lengths, edges
    if not edges:
        raise PlanError(
            "there is nothing to plan from",
            next_step="Name a source (--lengths FILE), buckets (--seq-lens 512,1024), "
            "or a run (--observe -- python train.py)",
            field="lengths",
        )
    return None, edges


def _check_edges(edges: Sequence[int], limit: int | None, request: PlanRequest) -> None:
    if limit is None or edges[-1] <= limit:
        return
    if request.seq_lens:
        next_step = "Leave that bucket out"
    else:
        next_step = f"Use a --step that divides {limit}, or a --max-length that the step divides"
    raise PlanError(
        f"a bucket of {edges[-1]} tokens is past the maximum of {limit}",
        next_step=next_step,
        field="seq_len",
    )


def _specs(
    request: PlanRequest, workload: Workload | None, edges: Sequence[int]
) -> Sequence[InputSpec]:
    if workload is not None:
        return workload.specs(edges, batch_sizes=request.batch_sizes, phases=request.phases)
    data = [
        {"phase": phase, "dims": {"seq_len": edge, "batch": batch}}
        for edge in edges
        for batch in request.batch_sizes
        for phase in request.phases
    ]
    return ShapePlan.parse({"specs": data}).specs


def _notes(lengths: Lengths, chosen: BucketPlan, curve: WasteCurve | None) -> dict[str, JsonValue]:
    notes: dict[str, JsonValue] = {
        "source": Path(lengths.source).name,
        "rows": lengths.rows,
        "longest": lengths.longest,
        "padded_share": round(chosen.padded_share, 4),
    }
    if curve is not None:
        notes |= {"step": curve.step, "buckets": len(chosen.edges), "knee": curve.knee}
    if lengths.truncated:
        notes["truncated_rows"] = lengths.truncated
    return notes
