"""``compilecache restore``: bring a plan's targets from the store into the cache root."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from compilecache.cli import DAMAGED, NOT_WARM
from compilecache.cli import options as common
from compilecache.shapes import EngineName

if TYPE_CHECKING:
    from compilecache.jobs import Restoration


@click.command(epilog="Example: compilecache restore plan.yaml --store s3://bucket/cache")
@common.plan_argument
@common.with_options(
    common.device_option,
    common.store_option,
    common.baked_option,
    common.trust_option,
    common.root_option,
    *common.workload_options,
    common.lock_option,
    common.network_option,
)
@common.json_option
def restore(
    plan_file: Path,
    *,
    devices: str | None,
    store: str | None,
    baked: Path | None,
    trust_keys: tuple[Path, ...],
    root: Path | None,
    workload: str | None,
    settings: tuple[str, ...],
    engine: EngineName | None,
    lock_timeout: float,
    allow_network_root: bool,
    as_json: bool,
) -> None:
    """Restore what the store has for PLAN on this machine, every digest checked.

    Files in use are never overwritten. Leaves with 3 when targets are still missing, 4 when the
    store holds damaged ones.
    """
    plan = common.load_plan(plan_file, workload, settings, engine)
    cache = common.open_root(root, allow_network=allow_network_root)
    opened = common.open_store(store, trust_keys)
    places = common.choose_devices(devices)
    from compilecache.baked import open_baked
    from compilecache.jobs import restore_plan

    image = open_baked(baked, trust_keys or None)
    done = restore_plan(
        plan, places, cache, opened, common.tell, baked=image, lock_timeout=lock_timeout
    )
    for fault in done.faults:
        common.tell(f"warning: {fault}")
    if as_json:
        common.print_json(done.as_json())
    else:
        _print(done)
    if done.missing:
        raise SystemExit(DAMAGED if done.damaged else NOT_WARM)


def _print(done: Restoration) -> None:
    click.echo(
        f"{done.targets} targets: {done.local} local, {done.restored} restored ({done.files} files, "
        f"{done.bytes / 1e6:.1f} MB in {done.seconds:.1f} s), {len(done.missing)} missing"
    )
    for target in done.missing:
        click.echo(f"  missing: {target}")
    if done.adopted_files:
        click.echo(
            f"An adopted directory was restored whole ({done.adopted_files} files). "
            "'compilecache verify' says which targets it serves."
        )
