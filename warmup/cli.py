"""``warmup``: ``run`` in CI or on a GPU host, ``pull`` in an init container."""

from __future__ import annotations

import json
import time
from pathlib import Path

import click

from compilecache.cli import DONE, NOT_WARM, run_group
from compilecache.cli import options as common
from compilecache.errors import CompileCacheError, StoreUnavailable

PAUSE_SECONDS = 2.0


@click.group(
    epilog="Exit codes: 0 done, 1 fault, 2 usage, 3 not warm, 4 damaged or untrusted, 5 timed out."
)
@click.version_option(package_name="compilecache")
def group() -> None:
    """Make the artifacts of a plan, or bring them, and say in one JSON line how it went."""


@group.command(epilog="Example: warmup run plan.yaml --store s3://bucket/cache")
@common.plan_argument
@common.with_options(
    common.device_option,
    common.store_option,
    common.sign_option,
    common.trust_option,
    common.root_option,
    common.extra_option,
    common.lock_option,
    common.share_option,
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=1),
    metavar="SECONDS",
    help="End the fresh process of the proof after this long.  [default: never]",
)
def run(
    plan_file: Path,
    *,
    devices: str | None,
    store: str | None,
    sign_key: Path | None,
    trust_keys: tuple[Path, ...],
    root: Path | None,
    extra_roots: tuple[str, ...],
    lock_timeout: float,
    no_share: bool,
    timeout: float | None,
) -> None:
    """Warm PLAN, publish it, and prove it in a fresh process. Resumable: run it again."""
    from contextlib import ExitStack

    from compilecache.shapes import ShapePlan

    plan = ShapePlan.load(plan_file)
    cache = common.open_root(root)
    extras = common.open_extras(extra_roots, cache)
    opened = common.open_store(store, trust_keys, sign_key)
    places = common.choose_devices(devices)
    from compilecache.jobs import warm_plan
    from compilecache.proof import prove

    with ExitStack() as stack:
        teller = common.show_progress(stack)
        report = warm_plan(
            plan,
            places,
            cache,
            opened,
            progress=teller,
            share=not no_share,
            lock_timeout=lock_timeout,
            extras=extras,
        )
    proof = prove(plan, places, cache.root, timeout=timeout)
    good = report.warm and proof.warm
    line = {
        "state": "warm" if good else "partly",
        "fingerprint": report.fingerprint,
        "targets": len(report.targets),
        "compiled": report.count("compiled"),
        "restored": report.count("restored"),
        "failed": report.count("failed"),
        "published": sum(row.published for row in report.targets),
        "not_proven": [str(row) for row in proof.rows if not row.warm],
        "gave_up": report.gave_up,
        "seconds": round(report.seconds, 3),
    }
    click.echo(json.dumps(line))
    raise SystemExit(DONE if good else NOT_WARM)


@group.command(epilog="Example: warmup pull plan.yaml --store s3://bucket/cache --ready /ready")
@common.plan_argument
@common.with_options(
    common.device_option,
    common.store_option,
    common.trust_option,
    common.root_option,
    common.extra_option,
    common.lock_option,
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
    trust_keys: tuple[Path, ...],
    root: Path | None,
    extra_roots: tuple[str, ...],
    lock_timeout: float,
    wait: float,
    ready: Path | None,
) -> None:
    """Restore PLAN, every digest checked, and compile nothing.

    Leaves with 3 and says "partly" or "cold" when something is missing; the trainer then compiles it.
    """
    from compilecache.shapes import ShapePlan

    plan = ShapePlan.load(plan_file)
    cache = common.open_root(root)
    extras = common.open_extras(extra_roots, cache)
    places = common.choose_devices(devices)
    from compilecache.jobs import Restoration, restore_plan

    deadline = time.monotonic() + wait

    def once() -> Restoration:
        opened = common.open_store(store, trust_keys)
        with common.showing_transfers(opened):
            return restore_plan(
                plan, places, cache, opened, lambda text: click.echo(text, err=True),
                lock_timeout=lock_timeout, extras=extras,
            )  # fmt: skip

    while True:
        try:
            done = once()
            break
        except StoreUnavailable as error:
            if time.monotonic() + PAUSE_SECONDS > deadline:
                raise
            click.echo(f"waiting: {error}", err=True)
            time.sleep(PAUSE_SECONDS)
    have = done.local + done.restored
    state = "warm" if not done.missing else "partly" if have else "cold"
    line = json.dumps({"state": state, **done.as_json()})
    click.echo(line)
    if done.missing:
        raise SystemExit(NOT_WARM)
    if ready is not None:
        _write(ready, line)


def _write(ready: Path, line: str) -> None:
    from compilecache.files import replacing

    try:
        with replacing(ready) as file:
            file.write(line.encode() + b"\n")
    except OSError as error:
        raise CompileCacheError(
            f"ready file '{ready}' cannot be written: {error.strerror}",
            next_step="Name a file in a writable folder with --ready",
        ) from error


def main() -> None:
    """Entry point of ``warmup``: one clear error, never a traceback."""
    run_group(group)
