"""``compilecache fingerprint``: what must be equal for an artifact to fit this machine."""

from __future__ import annotations

import json
from pathlib import Path

import click

from compilecache.cli import options as common
from compilecache.shapes import EngineName


@click.command(epilog="Example: compilecache fingerprint plan.yaml --device cuda:0 --json")
@common.plan_argument
@common.with_options(common.device_option, *common.workload_options)
@common.json_option
def fingerprint(
    plan_file: Path,
    *,
    devices: str | None,
    workload: str | None,
    settings: tuple[str, ...],
    engine: EngineName | None,
    as_json: bool,
) -> None:
    """Print the fingerprint of PLAN's workload on this machine, component by component."""
    plan = common.load_plan(plan_file, workload, settings, engine)
    places = common.choose_devices(devices)
    from compilecache.replicas import fingerprint_for

    mark = fingerprint_for(plan, places[0])
    if as_json:
        common.print_json({"digest": mark.digest, **json.loads(mark.dump())})
        return
    click.echo(mark.digest)
    for name, value in sorted(mark.components.items()):
        click.echo(f"  {name:24} {value}")
