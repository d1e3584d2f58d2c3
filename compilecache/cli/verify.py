"""``compilecache verify``: prove, in a fresh process, that nothing would be compiled."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from compilecache.cli import DAMAGED, NOT_WARM
from compilecache.cli import options as common
from compilecache.shapes import EngineName

if TYPE_CHECKING:
    from compilecache.cachedir import CacheDir
    from compilecache.proof import Result, Row
    from compilecache.shapes import ShapePlan


@click.command(epilog="Example: compilecache verify plan.yaml --device cuda:0,cuda:1")
@common.plan_argument
@common.with_options(
    common.device_option,
    common.root_option,
    *common.workload_options,
    common.network_option,
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=1),
    metavar="SECONDS",
    help="End the fresh process after this long.  [default: never]",
)
@common.json_option
def verify(
    plan_file: Path,
    *,
    devices: str | None,
    root: Path | None,
    workload: str | None,
    settings: tuple[str, ...],
    engine: EngineName | None,
    allow_network_root: bool,
    timeout: float | None,
    as_json: bool,
) -> None:
    """Run every target of PLAN in a fresh process on a copy of the cache root.

    A target is warm when torch's counters, the compilers started and the files written all say that
    nothing was compiled. Every file is also compared with its recorded digest.
    """
    plan = common.load_plan(plan_file, workload, settings, engine)
    cache = common.open_root(root, allow_network=allow_network_root)
    places = common.choose_devices(devices)
    check(plan, places, cache, as_json=as_json, timeout=timeout)


def check(
    plan: ShapePlan,
    devices: list[str],
    cache: CacheDir,
    *,
    as_json: bool,
    quiet: bool = False,
    timeout: float | None = None,
) -> None:
    """Prints the verdict and leaves with its exit code when it is not good."""
    from compilecache.proof import prove

    result = prove(plan, devices, cache.root, timeout=timeout)
    records = cache.records(result.digest)
    keys = [row.target.key for row in result.rows]
    damaged = [f for key in keys if key in records for f in cache.damaged(records[key].files)]
    if as_json:
        common.print_json(_as_json(result, damaged))
    elif not quiet:
        _print(result, damaged)
    if damaged:
        raise SystemExit(DAMAGED)
    if not result.warm:
        raise SystemExit(NOT_WARM)


def _as_json(result: Result, damaged: list[str]) -> object:
    return {
        "warm": result.warm and not damaged,
        "fingerprint": result.digest,
        "damaged": damaged,
        "targets": [
            {
                **row.model_dump(mode="json", exclude={"files"}),
                "key": row.target.key,
                "warm": row.warm,
            }
            for row in result.rows
        ],
    }


def _print(result: Result, damaged: list[str]) -> None:
    from rich.console import Console
    from rich.table import Table

    from compilecache.report import distinct_notes, without_common

    warm = sum(row.warm for row in result.rows)
    common, names = without_common([str(row.target) for row in result.rows])
    table = Table(box=None, title_justify="left", caption_justify="left")
    table.title = f"{warm} of {len(result.rows)} targets are warm"
    table.caption = f"all: {common}" if common else None
    mixed = any(row.engine != "trace" for row in result.rows)
    for column in ("target", "warm", *(("engine",) if mixed else ()), "what was seen"):
        table.add_column(column, overflow="fold")
    table.add_column("first s", justify="right")
    for name, row in zip(names, result.rows, strict=True):
        engine = (row.engine,) if mixed else ()
        table.add_row(name, "yes" if row.warm else "NO", *engine, row.seen, _seconds(row))
    console = Console(highlight=False)
    console.print(table)
    for note in distinct_notes((str(row.target), row.notes) for row in result.rows):
        console.print(note, markup=False)
    for fault in damaged:
        console.print(f"damaged: {fault}")
    if damaged or warm < len(result.rows):
        console.print("Run 'compilecache warm' with the same plan: it mends what is missing.")


def _seconds(row: Row) -> str:
    return f"{row.evidence.seconds:.2f}" if row.evidence else "-"
