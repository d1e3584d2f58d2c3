"""``warmup run``: a plan, once, watched: warmed, published, proven, reported, baked."""

from __future__ import annotations

import json
import os
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click

from compilecache import CompileCacheError
from compilecache.cli import DONE, NOT_WARM
from compilecache.cli import options as common
from compilecache.offline import DEVICE
from warmup.options import deadline_options, heed_sigterm

if TYPE_CHECKING:
    from compilecache.cachedir import CacheDir
    from compilecache.fingerprint import Fingerprint
    from compilecache.gpuprofile import GpuProfile
    from compilecache.report import Report
    from compilecache.shapes import ShapePlan
    from warmup.service.settings import Settings

file_option = click.Path(path_type=Path, dir_okay=False)


@click.command(epilog="Example: warmup run plan.yaml --store s3://bucket/cache --shard auto/4")
@common.plan_argument
@common.with_options(
    common.device_option,
    common.store_option,
    common.baked_option,
    common.sign_option,
    common.trust_option,
    common.root_option,
    common.extra_option,
    common.lock_option,
    common.share_option,
    common.profile_option,
)
@click.option(
    "--shard",
    metavar="I/N",
    help="Take the I-th of N parts of the plan, from 1. auto, or auto/N: as JOB_COMPLETION_INDEX, "
    "SLURM_ARRAY_TASK_ID or RANK say.  [default: all]",
)
@common.with_options(*deadline_options)
@click.option("--junit", type=file_option, metavar="FILE", help="Write JUnit XML, a test a target.")
@click.option("--report", "report_file", type=file_option, metavar="FILE", help="Write the report.")
@click.option(
    "--bake",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Once all is proven, lay it there for an image: read-only, and good wherever it is moved.",
)
def run(
    plan_file: Path,
    *,
    devices: str | None,
    store: str | None,
    baked: Path | None,
    sign_key: Path | None,
    trust_keys: tuple[Path, ...],
    root: Path | None,
    extra_roots: tuple[str, ...],
    lock_timeout: float,
    no_share: bool,
    gpu_profile: str | None,
    shard: str | None,
    target_timeout: float,
    timeout: float | None,
    junit: Path | None,
    report_file: Path | None,
    bake: Path | None,
) -> None:
    """Warm PLAN, publish it, and prove it in a fresh process.

    Targets are compiled in a process of their own, which is ended at a deadline, and again where it
    dies. What is finished is kept whatever happens: run it again, and it goes on there. Prints one JSON
    line; leaves with 3 when something is not warm. With --gpu-profile nothing can run here: the first
    start with that GPU proves it.
    """
    from compilecache.shapes import ShapePlan

    common.refuse_unwritable(junit, report_file)
    whole = ShapePlan.load(plan_file)
    profile = _absent(gpu_profile, whole, devices, extra_roots)
    plan = _share(whole, shard)
    if plan is None:
        click.echo(json.dumps({"state": "warm", "targets": 0, "shard": shard}))
        return
    cache = common.open_root(root)
    for extra in () if profile else common.open_extras(extra_roots, cache):
        extra.use()  # for the fresh process of the proof
    common.open_store(store, trust_keys, sign_key)
    from warmup.oneshot import FOREVER, find_unproven
    from warmup.service.settings import Settings

    deadline = time.monotonic() + (timeout or FOREVER)
    settings = Settings(
        root=cache.root,
        store=store,
        baked=baked.absolute() if baked else None,
        extra_roots=extra_roots,
        sign_key=sign_key,
        trust_keys=trust_keys,
        lock_timeout=max(lock_timeout, 0.001),
        share=not no_share,
        target_deadline=target_timeout,
        job_deadline=timeout or FOREVER,
    )
    places = (DEVICE,) if profile else tuple(common.choose_devices(devices))
    heed_sigterm()
    report, mark, problem = _warm(plan, places, settings, profile)
    unproven = {}
    # A job that was ended has no time for a proof, and what is for another GPU cannot run here.
    if problem is None and profile is None:
        unproven = find_unproven(plan, places, report, deadline - time.monotonic())
    good = report.warm and problem is None and not unproven
    _write(junit, report_file, report, unproven, profile)
    line = _line(report, unproven, good=good) | ({"shard": shard} if shard else {})
    line |= {"gpu_profile": profile.name} if profile else {}
    if bake is not None and good:
        try:
            line["baked"] = _lay(plan, places, cache, bake, sign_key, mark)
        except CompileCacheError as error:  # the line and the files are told all the same
            problem = error
    click.echo(json.dumps(line))
    if problem is not None:
        raise problem
    raise SystemExit(DONE if good else NOT_WARM)


def _absent(
    name: str | None, plan: ShapePlan, devices: str | None, extra_roots: tuple[str, ...]
) -> GpuProfile | None:
    """The GPU that is not there. Raises for what cannot be compiled for it, before anything is."""
    if name is None:
        return None
    from compilecache.gpuprofile import GpuProfile, refuse_other_versions
    from compilecache.offline import NOTICE, refuse_plan

    common.refuse_with_profile(devices, verify=False, extra_roots=extra_roots)
    profile = GpuProfile.load(name)
    refuse_plan(plan)
    refuse_other_versions(profile)
    common.tell(NOTICE.format(name=profile.name))
    return profile


def _lay(
    plan: ShapePlan,
    places: tuple[str, ...],
    cache: CacheDir,
    folder: Path,
    sign_key: Path | None,
    mark: Fingerprint | None,
) -> int:
    """How many targets the baked cache has."""
    from compilecache.baked import bake

    laid = bake(plan, places, cache, folder, common.tell, sign_key=sign_key, mark=mark)
    return len(laid.published) + laid.known


def _share(plan: ShapePlan, shard: str | None) -> ShapePlan | None:
    """This job's part; None when there is nothing left for it."""
    from warmup.shards import parse_shard

    return plan if shard is None else parse_shard(shard, os.environ).share(plan)


def _warm(
    plan: ShapePlan, places: tuple[str, ...], settings: Settings, profile: GpuProfile | None
) -> tuple[Report, Fingerprint | None, CompileCacheError | None]:
    """The report, what it is all kept under, and what went wrong with the job as a whole."""
    from warmup.oneshot import JobFailed, carry_out
    from warmup.service.queue import Request

    with ExitStack() as stack:
        progress = common.show_progress(stack)
        try:
            done = carry_out(Request(plan, places), settings, progress, profile=profile)
        except JobFailed as error:
            return error.report, None, error
    return done.report, done.mark, None


def _line(report: Report, unproven: dict[str, str], *, good: bool) -> dict[str, object]:
    names = {row.key: row.target for row in report.targets}
    return {
        "state": "warm" if good else "partly",
        "fingerprint": report.fingerprint,
        "targets": len(report.targets),
        "compiled": report.count("compiled"),
        "restored": report.count("restored"),
        "failed": report.count("failed"),
        "published": sum(row.published for row in report.targets),
        "not_proven": [f"{names[key]}: {seen}" for key, seen in unproven.items()],
        "gave_up": report.gave_up,
        "seconds": round(report.seconds, 3),
    }


def _write(
    junit: Path | None,
    report_file: Path | None,
    report: Report,
    unproven: dict[str, str],
    profile: GpuProfile | None,
) -> None:
    from warmup.junit import junit as as_junit

    if junit is not None:
        absent = profile.name if profile else ""
        common.write_file(junit, as_junit(report, unproven, absent_gpu=absent))
    if report_file is not None:
        common.write_file(report_file, report.model_dump_json(indent=2).encode() + b"\n")
