"""``compilecache restore``: bring a plan's targets from the store into the cache root."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from compilecache.cli import DAMAGED, NOT_WARM
from compilecache.cli import options as common
from compilecache.shapes import EngineName

if TYPE_CHECKING:
    from compilecache.cachedir import CacheDir
    from compilecache.knowngood import Returned
    from compilecache.restoring import Restoration
    from compilecache.store import ArtifactStore


@click.command(
    epilog="Examples: compilecache restore plan.yaml --store s3://bucket/cache; "
    "compilecache restore --tag good"
)
@common.optional_plan_argument
@common.tag_option
@click.option(
    "--strict", is_flag=True, help="With --tag: leave with 3 if anything is not as it was."
)
@common.with_options(
    common.device_option,
    common.store_option,
    common.baked_option,
    common.trust_option,
    common.root_option,
    *common.workload_options,
    common.extra_option,
    common.lock_option,
    common.network_option,
)
@common.json_option
def restore(
    plan_file: Path | None,
    *,
    tag_name: str | None,
    strict: bool,
    devices: str | None,
    store: str | None,
    baked: Path | None,
    trust_keys: tuple[Path, ...],
    root: Path | None,
    workload: str | None,
    settings: tuple[str, ...],
    engine: EngineName | None,
    extra_roots: tuple[str, ...],
    lock_timeout: float,
    allow_network_root: bool,
    as_json: bool,
) -> None:
    """Restore what the store has for PLAN on this machine, or what a tag names, every digest checked.

    Files in use are never overwritten. Leaves with 3 when targets are still missing, 4 when the
    store holds damaged ones.

    With --tag: those very artifacts, whatever is younger, and a line for each thing that is not as
    it was when the tag was made.
    """
    if (plan_file is None) == (tag_name is None):
        raise click.UsageError("name a PLAN, or a state that is known to work with --tag")
    if tag_name is not None:
        _restore_tag(
            tag_name,
            common.open_store(store, trust_keys),
            common.open_root(root, allow_network=allow_network_root),
            extra_roots,
            strict=strict,
            lock_timeout=lock_timeout,
            as_json=as_json,
        )
        return
    assert plan_file is not None
    plan = common.load_plan(plan_file, workload, settings, engine)
    cache = common.open_root(root, allow_network=allow_network_root)
    extras = common.open_extras(extra_roots, cache)
    opened = common.open_store(store, trust_keys)
    places = common.choose_devices(devices)
    from compilecache.baked import open_baked
    from compilecache.restoring import restore_plan

    image = open_baked(baked, trust_keys or None)
    with common.showing_transfers(opened):
        done = restore_plan(
            plan,
            places,
            cache,
            opened,
            common.tell,
            baked=image,
            lock_timeout=lock_timeout,
            extras=extras,
        )
    for fault in done.faults:
        common.tell(f"warning: {fault}")
    if as_json:
        common.print_json(done.as_json())
    else:
        _print(done)
    if done.missing:
        raise SystemExit(DAMAGED if done.damaged else NOT_WARM)
    if done.extra_missing:
        raise SystemExit(DAMAGED)


def _restore_tag(
    name: str,
    store: ArtifactStore | None,
    cache: CacheDir,
    extra_words: tuple[str, ...],
    *,
    strict: bool,
    lock_timeout: float,
    as_json: bool,
) -> None:
    """Brings back a state that is known to work, and says what around it has changed."""
    if store is None:
        raise click.UsageError("--store none holds no tags")
    tag = common.find_tag(store, name)
    extras = common.open_extras(extra_words, cache)
    from compilecache.knowngood import restore_tag

    done = restore_tag(tag, cache, store, common.tell, extras=extras, lock_timeout=lock_timeout)
    for fault in done.faults:
        common.tell(f"warning: {fault}")
    from compilecache.changes import changes_since

    done = replace(done, changes=changes_since(tag).changes)
    if as_json:
        common.print_json(done.as_json())
    else:
        _print_tag(done)
    if done.missing:
        raise SystemExit(DAMAGED)
    if strict and done.changes:
        raise SystemExit(NOT_WARM)


def _print_tag(done: Returned) -> None:
    click.echo(
        f"tag {done.tag}: {common.count(done.targets, 'record')}: {done.local} local, "
        f"{done.restored} restored ({done.files} files, {done.bytes / 1e6:.1f} MB in "
        f"{done.seconds:.1f} s), {len(done.missing)} missing"
    )
    for key in done.missing:
        click.echo(f"  missing: {key}")
    for name in done.left_out:
        click.echo(f"  it also holds the extra root {name}: add --extra-root {name}")
    for change in done.changes:
        click.echo(f"  not as it was: {change}")
    if done.changes:
        click.echo(f"'compilecache explain --tag {done.tag}' prints the commands that undo it.")


def _print(done: Restoration) -> None:
    click.echo(
        f"{done.targets} targets: {done.local} local, {done.restored} restored ({done.files} files, "
        f"{done.bytes / 1e6:.1f} MB in {done.seconds:.1f} s), {len(done.missing)} missing"
    )
    for target in done.missing:
        click.echo(f"  missing: {target}")
    if done.extra_files:
        click.echo(f"  and {common.count(done.extra_files, 'file')} of extra roots")
    if done.adopted_files:
        click.echo(
            f"An adopted directory was restored whole ({done.adopted_files} files). "
            "'compilecache verify' says which targets it serves."
        )
