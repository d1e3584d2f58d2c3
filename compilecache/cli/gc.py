"""``compilecache gc``: let go of what nobody needs, in a store and in a cache root."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from compilecache.cli import options as common

if TYPE_CHECKING:
    from compilecache.retention import Collection
    from compilecache.rootbudget import Trim

STORE_BYTES = 100 * 10**9
ROOT_BYTES = 20 * 10**9
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def _size(_ctx: click.Context, _param: click.Parameter, value: str | None) -> int | None:
    """Bytes, of a number with or without a unit: 500MB, 1.5TB."""
    if value is None:
        return None
    digits = value.strip().rstrip("kKmMgGtTbB").strip()
    unit = value.strip()[len(digits) :].strip().upper()
    try:
        size = float(digits) * UNITS[unit]
    except (KeyError, ValueError):
        size = -1.0
    if not 0 <= size < 2**63:
        raise click.BadParameter(f"'{value}' is no size: write 500MB, 20GB or a number of bytes")
    return int(size)


@click.command(epilog="Examples: compilecache gc; compilecache gc --store s3://bucket/cache --yes")
@common.with_options(*common.side_options, common.store_option, common.root_option)
@click.option(
    "--keep-days",
    type=click.FloatRange(min=0),
    default=90.0,
    show_default=True,
    metavar="DAYS",
    help="Fingerprints of which nothing was published (root: used) for longer go.",
)
@click.option(
    "--keep-bytes",
    callback=_size,
    metavar="SIZE",
    help="Most bytes that stay: 500MB, 1TB.  [default: 100GB in a store, 20GB in a root]",
)
@click.option(
    "--keep-fingerprints",
    type=click.IntRange(min=0),
    default=100,
    show_default=True,
    metavar="N",
    help="Most fingerprints that stay in a store, the latest ones.",
)
@click.option(
    "--keep-files",
    type=click.IntRange(min=0),
    default=200_000,
    show_default=True,
    metavar="N",
    help="Most files that stay in a root.",
)
@click.option(
    "--keep",
    multiple=True,
    metavar="FINGERPRINT",
    help="Never let this one go; its first digits are enough. Repeatable.",
)
@click.option(
    "--grace-hours",
    type=click.FloatRange(min=0),
    default=24.0,
    show_default=True,
    metavar="HOURS",
    help="What is younger, claimed or used within it stays.",
)
@click.option("--yes", is_flag=True, help="Do it. Without, it is only said what would go.")
@common.lock_option
@common.json_option
def gc(
    *,
    local: bool,
    remote: bool,
    store: str | None,
    root: Path | None,
    keep_days: float,
    keep_bytes: int | None,
    keep_fingerprints: int,
    keep_files: int,
    keep: tuple[str, ...],
    grace_hours: float,
    yes: bool,
    lock_timeout: float,
    as_json: bool,
) -> None:
    """Let go of what is old, superseded or too much, in the store and in the cache root.

    Nothing goes without --yes. Of a store go superseded generations, packs that no record names, and
    fingerprints that were published longest ago; of a root, what no record lists, and what was used
    longest ago. What is claimed, young or in use stays.
    """
    sides = common.chosen_sides(local, remote, store, root)
    collection = trim = None
    if sides.remote:
        from compilecache.retention import Collector, Retention

        opened = common.open_store(store)
        if opened is None:
            raise click.UsageError("--store none holds nothing to collect")
        bytes_kept = STORE_BYTES if keep_bytes is None else keep_bytes
        rule = Retention(keep_days, bytes_kept, keep_fingerprints, grace_hours, keep)
        collector = Collector(opened, rule)
        now = time.time()
        collection = collector.collect(now, common.tell) if yes else collector.plan(now)
    if sides.local:
        from compilecache.cachedir import CacheDir
        from compilecache.rootbudget import RootBudget, RootTrimmer

        cache = CacheDir(root)
        bytes_kept = ROOT_BYTES if keep_bytes is None else keep_bytes
        budget = RootBudget(bytes_kept, keep_files, keep_days, grace_hours, keep)
        trimmer = RootTrimmer(cache, budget)
        if yes and cache.prepare_to_clean():
            trim = trimmer.trim(
                timeout=lock_timeout, waiting=lambda who: common.tell(f"waiting for {who}")
            )
        else:
            trim = trimmer.plan()
    if as_json:
        common.print_json(
            {
                "done": yes,
                "store": asdict(collection) | {"freed": collection.freed} if collection else None,
                "root": asdict(trim) | {"freed": trim.freed} if trim else None,
            }
        )
        return
    if collection is not None:
        _print_collection(collection, yes)
    if trim is not None:
        _print_trim(trim, yes)
    if not yes and any(side is not None and side.freed for side in (collection, trim)):
        click.echo("Nothing was deleted. Add --yes to do it.")


def _print_collection(done: Collection, yes: bool) -> None:
    count = common.count(done.fingerprints, "fingerprint")
    common.print_table(
        f"store {done.url}: {count}, {common.megabytes(done.bytes)} MB",
        [
            (
                part.fingerprint[:12],
                "all of it" if part.whole else "a part",
                part.why,
                str(part.records),
                str(part.packs),
                common.megabytes(part.bytes),
            )
            for part in done.collected
        ],
        ("fingerprint", "what goes", "why"),
        ("records", "packs", "MB"),
    )
    for fingerprint, reason in sorted(done.held.items()):
        click.echo(f"  {fingerprint[:12]} stays as it is: {reason}")
    if done.half_uploads:
        click.echo(f"  {common.count(done.half_uploads, 'upload')} that never ended")
    if done.probes:
        click.echo(f"  {common.count(done.probes, 'probe')} that doctor left")
    click.echo(f"{_frees(yes)} {common.megabytes(done.freed)} MB in the store")


def _print_trim(done: Trim, yes: bool) -> None:
    common.print_table(
        f"root {done.root}: {common.count(done.files, 'file')}, {common.megabytes(done.bytes)} MB",
        [
            (part.kind, part.what[:12], str(part.files), common.megabytes(part.bytes))
            for part in done.trimmed
        ],
        ("what goes", "fingerprint"),
        ("files", "MB"),
    )
    if done.unpublished:
        records = common.count(done.unpublished, "target")
        click.echo(f"  {records} that no store has: kept; 'compilecache publish' sends them")
    if done.over_bytes or done.over_files:
        click.echo(
            f"  still {common.megabytes(done.over_bytes)} MB and {done.over_files} files too much: "
            "in use, or in no store"
        )
    click.echo(f"{_frees(yes)} {common.megabytes(done.freed)} MB in the root")


def _frees(yes: bool) -> str:
    return "Freed" if yes else "Would free"
