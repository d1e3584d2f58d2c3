"""What the commands do with a plan file and no trainer: warm it, restore it, publish it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

import torch

from compilecache.cachedir import CacheDir
from compilecache.exchange import Exchange, Restored, siblings
from compilecache.extraexchange import ExtraExchange
from compilecache.extras import ExtraRoot
from compilecache.fingerprint import environment
from compilecache.picture.last import keep_report
from compilecache.pipeline import Job, warm
from compilecache.progress import Progress
from compilecache.replicas import build_replicas, fingerprint_for
from compilecache.report import Report
from compilecache.shapes import TARGET_LIMIT, ShapePlan
from compilecache.store import ArtifactStore
from compilecache.workload import workload_of_plan

LOCK_TIMEOUT = 3600.0
"""Seconds: above what the slowest target takes."""

Teller = Callable[[str], None]
"""Hears of trouble and of waiting, in words."""


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
) -> Report:
    """Makes every target of the plan warm with models built for it. Raises as ``pipeline.warm``."""
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
    )
    report = warm(job, build_replicas(workload, devices), progress)
    with suppress(OSError):  # for 'compilecache report' alone
        keep_report(cache.root, report)
    return report


@dataclass(frozen=True, slots=True)
class Restoration:
    """What a restore brought."""

    fingerprint: str
    targets: int
    """How many the plan has on these devices."""
    local: int
    """Complete in the root before."""
    restored: int
    """Complete now."""
    files: int
    bytes: int
    seconds: float
    adopted_files: int
    """Files of an adopted directory, restored whole because something was missing."""
    missing: tuple[str, ...]
    """Targets that neither the root nor the store has."""
    faults: tuple[str, ...]
    """Records that were passed over, and why."""
    damaged: bool = False
    """Whether a fault is damage, not absence."""
    extra_files: int = 0
    """Files that came into extra roots."""
    extra_missing: tuple[str, ...] = ()
    """Extra roots that could not be restored, and are as they were."""

    def as_json(self) -> dict[str, object]:
        """For programs."""
        return asdict(self)


def restore_plan(
    plan: ShapePlan,
    devices: Sequence[str],
    cache: CacheDir,
    store: ArtifactStore | None,
    tell: Teller,
    *,
    baked: ArtifactStore | None = None,
    lock_timeout: float = LOCK_TIMEOUT,
    extras: tuple[ExtraRoot, ...] = (),
) -> Restoration:
    """Brings what ``baked`` has for the plan into the root, and the store whatever is missing then.

    Into extra roots, too. Raises LockTimeout, StoreUnavailable, and UnsafePath or UntrustedArtifact for
    an extra root.
    """
    mark = fingerprint_for(plan, devices[0])
    targets = {target.key: target for target in plan.targets(devices)}
    elsewhere = siblings(targets.values()) if plan.engine != "trace" else None
    exchange = Exchange(cache, store, mark, targets, elsewhere)

    def waiting(holder: str) -> None:
        tell(f"waiting for {holder}")

    with cache.lock("restoring", timeout=lock_timeout, waiting=waiting):
        for trouble in exchange.look(repair=True):
            tell(f"warning: {trouble}; moved aside")
        local = len(exchange.keys & exchange.complete.keys())
        done = exchange.restore_from(baked) if baked is not None else Restored()
        done.add(exchange.restore() if exchange.missing else Restored())
        lacking = [
            target
            for key, target in sorted(targets.items())
            if key in exchange.missing and exchange.stand_in(target) is None
        ]
        adopted = exchange.adopt(environment(torch.device(devices[0]))) if lacking else 0
    others = [ExtraExchange(one, store, mark, tell, lock_timeout).restore() for one in extras]
    faults = [*done.faults, *(fault for other in others for fault in other.faults)]
    return Restoration(
        fingerprint=mark.digest,
        targets=len(targets),
        local=local,
        restored=len(exchange.keys.intersection(done.keys)),
        files=done.files,
        bytes=done.bytes,
        seconds=done.seconds,
        adopted_files=adopted,
        missing=tuple(map(str, lacking)),
        faults=tuple(map(str, faults)),
        damaged=bool(done.faults),
        extra_files=sum(other.files for other in others),
        extra_missing=tuple(
            extra.name for extra, other in zip(extras, others, strict=True) if other.faults
        ),
    )


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
) -> Publication:
    """Publishes the plan's complete targets, and what extra roots hold.

    Raises LockTimeout, StoreUnavailable.
    """
    mark = fingerprint_for(plan, devices[0])
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
