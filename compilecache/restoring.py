"""Bringing what a store, or an image, has of a plan into the cache root; compiles nothing.

torch is imported only to find out which machine this is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from compilecache.cachedir import LOCK_TIMEOUT, CacheDir
from compilecache.errors import StoreUnavailable
from compilecache.exchange import Exchange, Restored, siblings
from compilecache.extraexchange import ExtraExchange
from compilecache.extras import ExtraRoot
from compilecache.fingerprint import Fingerprint
from compilecache.progress import Teller
from compilecache.shapes import ShapePlan
from compilecache.store import ArtifactStore


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
    mark: Fingerprint | None = None,
) -> Restoration:
    """Brings what ``baked`` has for the plan into the root, and the store whatever is missing then.

    Into extra roots, too. ``mark``: the fingerprint to restore for; nothing of torch is imported then, and
    no adopted directory considered. None: this machine's. Raises LockTimeout, StoreUnavailable, and UnsafePath or UntrustedArtifact for
    an extra root.
    """
    own = mark is None
    mark = mark or _own_mark(plan, devices[0])
    targets = {target.key: target for target in plan.targets(devices)}
    elsewhere = siblings(targets.values()) if plan.engine != "trace" else None
    exchange = Exchange(cache, store, mark, targets, elsewhere)

    def waiting(holder: str) -> None:
        tell(f"waiting for {holder}")

    with cache.lock("restoring", timeout=lock_timeout, waiting=waiting):
        for trouble in exchange.look(repair=True):
            tell(f"warning: {trouble}; moved aside")
        local = len(exchange.keys & exchange.complete.keys())
        done = Restored() if baked is None else exchange.restore_from(baked)
        done.add(_settled(exchange, tell))
        done.add(exchange.restore() if exchange.missing else Restored())
        lacking = [
            target
            for key, target in sorted(targets.items())
            if key in exchange.missing and exchange.stand_in(target) is None
        ]
        adopted = exchange.adopt(_environment(devices[0])) if lacking and own else 0
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


def _settled(exchange: Exchange, tell: Teller) -> Restored:
    """What an image has serves as well: a store that does not answer is not waited for."""
    try:
        return exchange.restore_settled()
    except StoreUnavailable as error:
        tell(f"warning: {error}; what came with the image is used as it is")
        return Restored()


def _own_mark(plan: ShapePlan, device: str) -> Fingerprint:
    from compilecache.replicas import fingerprint_for

    return fingerprint_for(plan, device)


def _environment(device: str) -> Fingerprint:
    import torch

    from compilecache.fingerprint import environment

    return environment(torch.device(device))
