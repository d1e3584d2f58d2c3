"""``compilecache plan``: which shapes a run will need, before it starts."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

if TYPE_CHECKING:
    from rich.console import Console

    from compilecache.buckets import WasteCurve
    from compilecache.planning import PlannedShapes
    from compilecache.shapes import CompileTarget, ShapePlan

BAR_WIDTH = 30
"""Columns of the longest bar: the table fits a terminal of 80."""


@click.command(
    epilog="Example: compilecache plan --workload dflash_model.workload:dflash "
    "--set preset=tiny --lengths lengths.jsonl --output plan.yaml"
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.option("--workload", metavar="MODULE:ATTR", help="Workload that turns lengths into specs.")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="Workload setting; VALUE is JSON or text. Repeatable.",
)
@click.option(
    "--lengths",
    metavar="SOURCE",
    help="Lengths: a .jsonl, .npy or .parquet file, or buckets 512,1024.",
)
@click.option(
    "--field",
    "length_field",
    metavar="NAME",
    help="Field with a length, or a list whose length counts.  [default: the first known one]",
)
@click.option("--seq-lens", metavar="N,N", help="Explicit buckets, in tokens.")
@click.option(
    "--buckets",
    type=click.IntRange(min=1),
    metavar="K",
    help="Number of buckets.  [default: the knee]",
)
@click.option(
    "--max-buckets",
    type=click.IntRange(min=1),
    default=16,
    show_default=True,
    help="Where the waste curve ends.",
)
@click.option(
    "--step",
    type=click.IntRange(min=1),
    default=128,
    show_default=True,
    help="Buckets are multiples of this, in tokens.",
)
@click.option(
    "--batch", default="1", show_default=True, metavar="N,N", help="Batch sizes, in rows."
)
@click.option(
    "--phase",
    "phases",
    type=click.Choice(["train", "eval"]),
    multiple=True,
    help="Repeatable.  [default: both]",
)
@click.option(
    "--max-length",
    type=click.IntRange(min=1),
    metavar="N",
    help="Longest row, in tokens.  [default: the workload's]",
)
@click.option(
    "--truncate", is_flag=True, help="Count longer rows as the longest instead of failing."
)
@click.option(
    "--device",
    "devices",
    default="cuda:0",
    show_default=True,
    metavar="D,D",
    help="Devices to count targets for.",
)
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=4096,
    show_default=True,
    help="Most targets allowed.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the plan here (YAML).",
)
@click.option(
    "--observe",
    is_flag=True,
    help="Run COMMAND (after --) as it is and record the shapes that it feeds its compiled modules.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def plan(
    context: click.Context,
    *,
    command: tuple[str, ...],
    workload: str | None,
    settings: tuple[str, ...],
    lengths: str | None,
    length_field: str | None,
    seq_lens: str | None,
    buckets: int | None,
    max_buckets: int,
    step: int,
    batch: str,
    phases: tuple[str, ...],
    max_length: int | None,
    truncate: bool,
    devices: str,
    limit: int,
    output: Path | None,
    observe: bool,
    as_json: bool,
) -> None:
    """Plan the shapes of a run: choose buckets, list every compile target, write a plan file.

    With --observe the shapes come from a real run instead: COMMAND keeps its input, output, results
    and exit code. Several compiled modules make several plans, named after them.
    """
    if observe != bool(command):
        raise click.UsageError(
            "--observe and a command after '--' go together: --observe -- python train.py"
        )
    if observe:
        _refuse_planning_options(context)
        sys.exit(_observe(command, output, as_json))
    from compilecache.lengths import parse_sizes
    from compilecache.planning import (
        PHASES,
        PlanRequest,
        check_devices,
        parse_settings,
        plan_shapes,
        write_plan,
    )

    places = check_devices(devices.split(","))
    request = PlanRequest(
        workload=workload,
        settings=parse_settings(settings),
        lengths=lengths,
        length_field=length_field,
        seq_lens=() if seq_lens is None else parse_sizes(seq_lens, field="--seq-lens"),
        buckets=buckets,
        max_buckets=max_buckets,
        step=step,
        batch_sizes=parse_sizes(batch, field="--batch"),
        phases=phases or PHASES,
        max_length=max_length,
        truncate=truncate,
    )
    planned = plan_shapes(request)
    targets = planned.plan.targets(places, limit=limit)
    if as_json:
        click.echo(json.dumps(_as_json(planned, targets), indent=2))
    else:
        _print(planned, targets)
    if output is not None:
        write_plan(planned.plan, output)
        click.echo(f"Wrote {output}.", err=True)
    else:
        click.echo("Nothing was written; name a file with --output.", err=True)


def _refuse_planning_options(context: click.Context) -> None:
    """Raises click.UsageError for an option that would say what only the observed run can say."""
    with_observe = {"command", "observe", "output", "as_json"}
    given = [
        option.opts[0]
        for option in context.command.params
        if option.name is not None
        and option.name not in with_observe
        and context.get_parameter_source(option.name) is not ParameterSource.DEFAULT
    ]
    if given:
        raise click.UsageError(f"{', '.join(given)} cannot be used with --observe")


def _as_json(planned: PlannedShapes, targets: Sequence[CompileTarget]) -> Mapping[str, object]:
    points = () if planned.curve is None else planned.curve.plans
    knee = None if planned.curve is None else planned.curve.knee
    return {
        "plan": planned.plan.model_dump(mode="json"),
        "curve": [
            {
                "buckets": len(point.edges),
                "edges": point.edges,
                "rows": point.rows,
                "padded_tokens": point.padded_tokens,
                "padded_share": point.padded_share,
                "knee": len(point.edges) == knee,
            }
            for point in points
        ],
        "targets": [
            {"device": target.device, "key": target.key, "spec": str(target.spec)}
            for target in targets
        ],
    }


def _print(planned: PlannedShapes, targets: Sequence[CompileTarget]) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=False)
    if planned.curve is not None and planned.buckets is not None:
        _print_curve(console, planned.curve, len(planned.buckets.edges))
    if planned.buckets is not None:
        edges = ", ".join(map(str, planned.buckets.edges))
        share = f"{planned.buckets.padded_share:.1%}"
        console.print(f"Buckets: {edges} tokens; {share} of all tokens are padding\n")
    _print_targets(console, targets)


def _print_curve(console: Console, curve: WasteCurve, chosen: int) -> None:
    from rich.table import Table

    table = Table(box=None, title="Padding against the number of buckets", title_justify="left")
    table.add_column("buckets", justify="right")
    table.add_column("padding", justify="right")
    table.add_column("", width=BAR_WIDTH)
    table.add_column("")
    worst = max((point.padded_share for point in curve.plans), default=0.0) or 1.0
    for point in curve.plans:
        count = len(point.edges)
        marks = [name for name, k in (("knee", curve.knee), ("chosen", chosen)) if k == count]
        table.add_row(
            str(count),
            f"{point.padded_share:.1%}",
            _bar(point.padded_share / worst),
            " ".join(marks),
            style="bold" if marks else "",
        )
    console.print(table)
    console.print()


def _bar(share: float) -> str:
    eighths = round(share * BAR_WIDTH * 8)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def _print_targets(console: Console, targets: Sequence[CompileTarget]) -> None:
    from rich.table import Table

    count = f"{len(targets)} targets" if len(targets) != 1 else "1 target"
    table = Table(box=None, title=f"{count} to compile", title_justify="left")
    for column in ("device", "function", "phase", "shape"):
        table.add_column(column, overflow="fold")
    for target in targets:
        spec = target.spec
        shape = str(spec).removeprefix(f"{spec.function} {spec.phase}").strip()
        table.add_row(target.device, spec.function, spec.phase, shape)
    console.print(table)


def _observe(command: Sequence[str], output: Path | None, as_json: bool) -> int:
    """Runs the command, writes what was seen, and returns the exit code of this process.

    Raises CompileCacheError when the command went well but called nothing compiled.
    """
    from compilecache.errors import CompileCacheError
    from compilecache.observe import observe, plan_files
    from compilecache.planning import write_plan

    seen = observe(command)
    for fault in seen.faults:
        click.echo(f"Not recorded: {fault}.", err=True)
    if not seen.plans:
        problem = "nothing compiled was called, so there is no plan"
        if seen.exit_code == 0:
            raise CompileCacheError(
                problem,
                next_step="Check that the command calls a module compiled with torch.compile, "
                "and that Python is started without -I, -E or -S",
            )
        click.echo(f"The command ended with {seen.exit_code}; {problem}.", err=True)
        return seen.exit_code
    files = plan_files(seen.plans, output or Path("plan.yaml"))
    if len(files) > 1:
        click.echo(f"{len(files)} compiled modules were seen: one plan for each.", err=True)
    for path, found in files.items():
        write_plan(found, path)
        click.echo(f"Wrote {path}: {_summary(found)}.", err=True)
    if as_json:
        click.echo(json.dumps(_observed_json(files), indent=2))
    return seen.exit_code


def _summary(found: ShapePlan) -> str:
    return f"{len(found.specs)} specs of {found.lengths['module']}"


def _observed_json(files: Mapping[Path, ShapePlan]) -> Mapping[str, object]:
    return {"plans": {str(path): found.model_dump(mode="json") for path, found in files.items()}}
