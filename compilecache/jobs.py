"""What the commands do with a plan file and no trainer: warm it, restore it, publish it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from compilecache.cachedir import LOCK_TIMEOUT, CacheDir
from compilecache.exchange import Exchange
from compilecache.extraexchange import ExtraExchange
from compilecache.extras import ExtraRoot
from compilecache.fingerprint import Fingerprint
from compilecache.gpuprofile import GpuProfile
from compilecache.picture.last import keep_report
from compilecache.pipeline import Job, warm
from compilecache.progress import Progress, Teller
from compilecache.replicas import build_fakes, build_replicas, fingerprint_for
from compilecache.report import Report
from compilecache.shapes import TARGET_LIMIT, ShapePlan
from compilecache.store import ArtifactStore
from compilecache.workload import workload_of_plan


def warm_plan(
    plan: ShapePlan,
    devices: Sequence[str],
    cache: CacheDir,
    store: ArtifactStore | None,
    *,
    baked: ArtifactStore | None = None,
    progress: Progress | None = None,
    strict: bool = False,
    share: bool = True,
    limit: int = TARGET_LIMIT,
    lock_timeout: float = LOCK_TIMEOUT,
    extras: tuple[ExtraRoot, ...] = (),
    profile: GpuProfile | None = None,
) -> Report:
    """Makes every target of the plan warm with models built for it. Raises as ``pipeline.warm``.

    ``profile``: of a GPU that is not there, in a process that was prepared for that.
    """
    workload = workload_of_plan(plan)
    for spec in plan.specs:
        workload.check(spec)
    job = Job(
        workload=workload,
        targets=plan.targets(devices, limit=limit),
        cache=cache,
        store=store,
        baked=baked,
        options=plan.compile_options,
        engine=plan.engine,
        strict=strict,
        share=share,
        lock_timeout=lock_timeout,
        extras=extras,
        profile=profile,
    )
    build = build_replicas if profile is None else build_fakes
    report = warm(job, build(workload, devices), progress)
    with suppress(OSError):  # for 'compilecache report' alone
        keep_report(cache.root, report)
    return report


@dataclass(frozen=True, slots=True)
class Publication:
    """What was sent to the store."""

    fingerprint: str
    published: tuple[str, ...]
    """Keys of targets that the store lacked."""
    known: int
    """Targets that it had."""
    missing: tuple[str, ...]
    """Targets that are not complete in the root."""
    extra_files: int = 0
    """Files of extra roots that the store lacked."""


def publish_plan(
    plan: ShapePlan,
    devices: Sequence[str],
    cache: CacheDir,
    store: ArtifactStore,
    tell: Teller,
    *,
    lock_timeout: float = LOCK_TIMEOUT,
    extras: tuple[ExtraRoot, ...] = (),
    mark: Fingerprint | None = None,
) -> Publication:
    """Publishes the plan's complete targets, and what extra roots hold.

    ``mark``: the fingerprint, where it is known; else the model is built to find it. Raises LockTimeout,
    StoreUnavailable.
    """
    mark = mark or fingerprint_for(plan, devices[0])
    targets = {target.key: target for target in plan.targets(devices)}
    exchange = Exchange(cache, store, mark, targets)
    with cache.lock("publishing", timeout=lock_timeout):
        for trouble in exchange.look():
            tell(f"warning: {trouble}; not published")
        sent = exchange.publish_complete(exchange.complete)
    others = [ExtraExchange(one, store, mark, tell, lock_timeout).publish() for one in extras]
    return Publication(
        fingerprint=mark.digest,
        published=tuple(sent),
        known=len(exchange.complete) - len(sent),
        missing=tuple(str(targets[key]) for key in sorted(exchange.missing)),
        extra_files=sum(other.published for other in others),
    )
