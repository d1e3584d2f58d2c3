"""``warmup fleet``: a plan on every host of a cluster; claims in the store divide the compiling."""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path

import click

from compilecache import CompileCacheError, PlanError
from compilecache.cli import DONE, NOT_WARM
from compilecache.cli import options as common
from warmup.options import deadline_options, heed_sigterm


@click.command(epilog="Example: warmup fleet plan.yaml --ray auto --store s3://bucket/cache")
@common.plan_argument
@click.option(
    "--ray",
    "address",
    required=True,
    metavar="ADDRESS",
    help="The cluster: HOST:6379, or auto. Run it on one of its hosts.",
)
@common.with_options(
    common.device_option,
    common.store_option,
    common.sign_option,
    common.trust_option,
    common.root_option,
    common.lock_option,
)
@click.option(
    "--hosts",
    type=click.IntRange(min=1),
    metavar="N",
    help="Use no more than so many.  [default: all with GPUs; all where none has, or for the CPU]",
)
@click.option(
    "--working-dir",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    metavar="DIR",
    help="Folder that Ray copies to the hosts, where the plan's workload is imported from.  [default: "
    "it is installed there]",
)
@common.with_options(*deadline_options)
def fleet(
    plan_file: Path,
    *,
    address: str,
    devices: str | None,
    store: str | None,
    sign_key: Path | None,
    trust_keys: tuple[Path, ...],
    root: Path | None,
    lock_timeout: float,
    hosts: int | None,
    working_dir: Path | None,
    target_timeout: float,
    timeout: float | None,
) -> None:
    """Warm PLAN on the hosts of a Ray cluster, each target compiled on one of them.

    Every host does what 'warmup run' does, on all of its GPUs. A host that dies is survived: the others
    take over its targets. Prints one JSON line; leaves with 3 when something is not warm.
    """
    from compilecache.shapes import ShapePlan
    from warmup.hosts import Order
    from warmup.muster import Muster
    from warmup.oneshot import FOREVER
    from warmup.raycluster import connected
    from warmup.service.settings import Settings

    order = Order(
        plan=ShapePlan.load(plan_file),
        devices=tuple(common.names_of(devices)) if devices else (),
        settings=Settings(
            root=root,
            store=shared_store(store),
            sign_key=sign_key,
            trust_keys=trust_keys,
            lock_timeout=max(lock_timeout, 0.001),
            target_deadline=target_timeout,
            job_deadline=timeout or FOREVER,
        ),
        probe=f"fleet-{uuid.uuid4().hex}",
    )
    heed_sigterm()
    with connected(address, working_dir) as cluster:
        report = Muster(cluster, order, common.tell).carry_out(hosts)
    click.echo(json.dumps(report.as_json()))
    if report.failed:
        host = report.failed[0]
        raise CompileCacheError(
            f"{common.count(len(report.failed), 'host')} of {len(report.hosts)} failed; host {host.name}: "
            f"{host.fault.rstrip('.')}",
            next_step="What is finished is in the store: mend that, and run the same command again; a "
            "workload that is not installed on the hosts goes there with --working-dir",
        )
    raise SystemExit(DONE if report.warm else NOT_WARM)


def shared_store(store: str | None) -> str | None:
    """The store's address as other hosts understand it; None for the default, which one host may use.

    Raises PlanError for one that no two hosts can share.
    """
    address = store or os.environ.get("COMPILECACHE_STORE")
    if address == "none" or (address or "").startswith("memory:"):
        raise PlanError(
            f"the hosts of a fleet cannot share the store '{address}'",
            next_step="Name s3://BUCKET/PREFIX, or a folder that all hosts mount, with --store",
            field="store",
        )
    if address is None or "://" in address:
        return address
    return str(Path(address).expanduser().absolute())
