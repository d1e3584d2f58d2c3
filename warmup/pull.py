"""``warmup pull``: at the start of a pod, before the trainer's container."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from compilecache import ChecksumMismatch, PlanError, StoreUnavailable
from compilecache.cli import NOT_WARM
from compilecache.cli import options as common

if TYPE_CHECKING:
    from compilecache.fingerprint import Fingerprint
    from compilecache.restoring import Restoration
    from compilecache.store import ArtifactStore

T = TypeVar("T")

PAUSE_SECONDS = 2.0
WHOLE = re.compile("[0-9a-f]{32}")
"""A fingerprint that is not shortened."""


@click.command(epilog="Example: warmup pull plan.yaml --store s3://bucket/cache --ready /ready")
@common.plan_argument
@common.with_options(
    common.device_option,
    common.store_option,
    common.baked_option,
    common.trust_option,
    common.root_option,
    common.extra_option,
    common.lock_option,
)
@click.option(
    "--fingerprint",
    metavar="DIGEST",
    help="Restore for this one, of which the first digits are enough, and start without torch. Needs "
    "--device.  [default: this machine's]",
)
@click.option(
    "--wait",
    type=click.FloatRange(min=0),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for the store to answer.",
)
@click.option(
    "--ready",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the JSON line here too, once everything is there.",
)
def pull(
    plan_file: Path,
    *,
    devices: str | None,
    store: str | None,
    baked: Path | None,
    trust_keys: tuple[Path, ...],
    root: Path | None,
    extra_roots: tuple[str, ...],
    lock_timeout: float,
    fingerprint: str | None,
    wait: float,
    ready: Path | None,
) -> None:
    """Restore PLAN, every digest checked, and compile nothing.

    The store is asked, and waited for, only for what the root and the image lack; for what has become
    of programs that nobody had run on their GPU it is asked, too, and not waited for. Leaves with 3 and says
    "partly" or "cold" when something is missing, whatever the reason; the trainer then compiles it.
    """
    from compilecache.baked import open_baked
    from compilecache.shapes import ShapePlan

    plan = ShapePlan.load(plan_file)
    if fingerprint is not None and devices is None:
        raise PlanError(
            "--fingerprint without --device: only torch knows the devices of this machine",
            next_step="Name them, as in --device cuda:0,cuda:1",
            field="device",
        )
    cache = common.open_root(root)
    extras = common.open_extras(extra_roots, cache)
    image = open_baked(baked, trust_keys or None)
    deadline = time.monotonic() + wait

    def opened() -> ArtifactStore | None:
        # Anew each time: a store that has cost its budget of failures is not asked again.
        return common.open_store(store, trust_keys)

    mark = None
    if fingerprint is not None:
        wanted = fingerprint.lower()
        mark = _waiting(deadline, lambda: _mark([image, opened()], wanted))
    places = common.choose_devices(devices) if mark is None else common.names_of(devices or "")
    from compilecache.restoring import restore_plan

    def once() -> Restoration:
        source = opened()
        with common.showing_transfers(source):
            return restore_plan(
                plan,
                places,
                cache,
                source,
                common.tell,
                baked=image,
                lock_timeout=lock_timeout,
                extras=extras,
                mark=mark,
            )

    done = _waiting(deadline, once)
    for fault in done.faults:
        common.tell(f"warning: {fault}")
    line = json.dumps({"state": _state(done), **done.as_json()})
    click.echo(line)
    if done.missing:
        raise SystemExit(NOT_WARM)
    if ready is not None:
        common.write_file(ready, line.encode() + b"\n")


def _waiting(deadline: float, act: Callable[[], T]) -> T:
    """The result, once the store answers. Raises StoreUnavailable when it is too late for that."""
    while True:
        try:
            return act()
        except StoreUnavailable as error:
            if time.monotonic() + PAUSE_SECONDS > deadline:
                raise
            common.tell(f"waiting: {error}")
            time.sleep(PAUSE_SECONDS)


def _mark(stores: Sequence[ArtifactStore | None], wanted: str) -> Fingerprint:
    """The published fingerprint that begins so. Raises PlanError when there is none, or more than one."""
    from compilecache.fingerprint import Fingerprint

    found = _texts([store for store in stores if store is not None], wanted)
    if len(found) != 1:
        raise PlanError(
            f"{len(found) or 'no'} published fingerprints begin with '{wanted}'",
            next_step="List them with 'compilecache ls', or leave --fingerprint out",
            field="fingerprint",
        )
    ((digest, text),) = found.items()
    mark = Fingerprint.parse(text)
    if mark.digest != digest:
        raise ChecksumMismatch(
            f"the store's text of fingerprint {digest[:12]} is of another one",
            next_step="Run 'compilecache fsck', or leave --fingerprint out",
            faults=(f"fingerprint {digest}",),
        )
    return mark


def _texts(stores: Sequence[ArtifactStore], wanted: str) -> dict[str, str]:
    """Digest that begins so → its text; without a listing where all of it is given."""
    whole = WHOLE.fullmatch(wanted) is not None
    found: dict[str, str] = {}
    for store in stores:
        for digest in [wanted] if whole else store.fingerprints():
            if digest.startswith(wanted) and digest not in found:
                text = store.get_fingerprint(digest)
                if text is not None or not whole:
                    found[digest] = text or ""
    return found


def _state(done: Restoration) -> str:
    if not done.missing:
        return "warm"
    return "partly" if done.local + done.restored else "cold"
