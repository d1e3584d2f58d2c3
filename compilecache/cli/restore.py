"""``compilecache restore``: bring a plan's targets from the store into the cache root."""

from __future__ import annotations

from pathlib import Path

import click

from compilecache.cli import NOT_WARM, exit_code
from compilecache.cli import options as common


@click.command(epilog="Example: compilecache restore plan.yaml --store s3://bucket/cache")
@common.plan_argument
@common.with_options(
    common.device_option,
    common.store_option,
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
    root: Path | None,
    workload: str | None,
    settings: tuple[str, ...],
    lock_timeout: float,
    allow_network_root: bool,
    as_json: bool,
) -> None:
    """Restore what the store has for PLAN on this machine, every digest checked.

    Files in use are never overwritten. Leaves with 3 when targets are still missing, 4 when the
    store holds damaged ones.
    """
    plan = common.load_plan(plan_file, workload, settings)
    cache = common.open_root(root, allow_network=allow_network_root)
    opened = common.open_store(store)
    places = common.choose_devices(devices)
    import torch

    from compilecache.exchange import Exchange
    from compilecache.fingerprint import environment
    from compilecache.replicas import fingerprint_for
    from compilecache.workload import workload_of_plan

    mark = fingerprint_for(workload_of_plan(plan), places[0], plan.compile_options)
    targets = {target.key: target for target in plan.targets(places)}
    exchange = Exchange(cache, opened, mark, targets)

    def waiting(holder: str) -> None:
        click.echo(f"waiting for {holder}", err=True)

    with cache.lock("restoring", timeout=lock_timeout, waiting=waiting):
        for trouble in exchange.look(repair=True):
            click.echo(f"warning: {trouble}; moved aside", err=True)
        local = len(exchange.complete)
        done = exchange.restore()
        adopted = exchange.adopt(environment(torch.device(places[0]))) if exchange.missing else 0
    for fault in done.faults:
        click.echo(f"warning: {fault}", err=True)
    missing = [str(targets[key]) for key in sorted(exchange.missing)]
    summary = {
        "fingerprint": mark.digest,
        "targets": len(targets),
        "local": local,
        "restored": len(done.keys),
        "files": done.files,
        "bytes": done.bytes,
        "seconds": done.seconds,
        "adopted_files": adopted,
        "missing": missing,
        "faults": [str(fault) for fault in done.faults],
    }
    if as_json:
        common.print_json(summary)
    else:
        click.echo(
            f"{len(targets)} targets: {local} local, {len(done.keys)} restored ({done.files} files, "
            f"{done.bytes / 1e6:.1f} MB in {done.seconds:.1f} s), {len(missing)} missing"
        )
        for target in missing:
            click.echo(f"  missing: {target}")
        if adopted:
            click.echo(
                f"An adopted directory was restored whole ({adopted} files). 'compilecache verify' "
                "says which targets it serves."
            )
    if missing:
        raise SystemExit(exit_code(done.faults[0]) if done.faults else NOT_WARM)
