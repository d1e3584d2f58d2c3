"""``compilecache warm``: make every target of a plan exist, locally and in the store."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click

from compilecache.cli import options as common
from compilecache.gpuprofile import GpuProfile
from compilecache.shapes import EngineName

if TYPE_CHECKING:
    from compilecache.report import Report


@click.command(epilog="Example: compilecache warm plan.yaml --store s3://bucket/cache")
@common.plan_argument
@common.with_options(
    common.device_option,
    common.store_option,
    common.baked_option,
    common.sign_option,
    common.trust_option,
    common.root_option,
    *common.workload_options,
    common.limit_option,
    common.extra_option,
    common.lock_option,
    common.share_option,
    common.network_option,
    common.profile_option,
)
@click.option(
    "--strict",
    is_flag=True,
    help="Fail on cache trouble, on targets that fail and on those that torch never caches.",
)
@click.option("--verify", is_flag=True, help="Prove the result in a fresh process afterwards.")
@common.json_option
def warm(
    plan_file: Path,
    *,
    devices: str | None,
    store: str | None,
    baked: Path | None,
    sign_key: Path | None,
    trust_keys: tuple[Path, ...],
    root: Path | None,
    workload: str | None,
    settings: tuple[str, ...],
    engine: EngineName | None,
    limit: int,
    extra_roots: tuple[str, ...],
    lock_timeout: float,
    no_share: bool,
    allow_network_root: bool,
    gpu_profile: str | None,
    strict: bool,
    verify: bool,
    as_json: bool,
) -> None:
    """Compile what is missing of PLAN, device by device, and publish each target at once.

    What the cache root or the store has already is not compiled again. Interrupt it at any moment:
    the same command goes on where it stopped.
    """
    plan = common.load_plan(plan_file, workload, settings, engine)
    plan.targets(["cpu"], limit=limit)
    cache = common.open_root(root, allow_network=allow_network_root)
    if gpu_profile is not None:
        from compilecache.offline import Request, warm_offline

        common.refuse_with_profile(devices, verify=verify, extra_roots=extra_roots)
        report = warm_offline(
            Request(
                plan=plan,
                profile=GpuProfile.load(gpu_profile),
                root=cache.root,
                store=store,
                baked=baked,
                sign_key=sign_key,
                trust_keys=trust_keys,
                strict=strict,
                share=not no_share,
                limit=limit,
                lock_timeout=lock_timeout,
            )
        )
        _show(report, as_json=as_json)
        return
    extras = common.open_extras(extra_roots, cache)
    opened = common.open_store(store, trust_keys, sign_key)
    from compilecache.baked import open_baked
    from compilecache.jobs import warm_plan

    image = open_baked(baked, trust_keys or None)
    places = common.choose_devices(devices)
    with ExitStack() as stack:
        report = warm_plan(
            plan,
            places,
            cache,
            opened,
            baked=image,
            progress=common.show_progress(stack),
            strict=strict,
            share=not no_share,
            limit=limit,
            lock_timeout=lock_timeout,
            extras=extras,
        )
    _show(report, as_json=as_json)
    if verify:
        from compilecache.cli.verify import check

        check(plan, places, cache, as_json=False, quiet=as_json)


def _show(report: Report, *, as_json: bool) -> None:
    """Leaves with 3 when something is not warm."""
    if as_json:
        common.print_json(report.model_dump(mode="json"))
    else:
        click.echo(report.table(), nl=False)
    if not report.warm:
        raise SystemExit(3)
