"""``compilecache gc``: let go of what nobody needs, in a store and in a cache root."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from compilecache.cli import options as common
from compilecache.keeping import KEEP_DAYS, ROOT_BYTES, ROOT_FILES, STORE_BYTES, STORE_FINGERPRINTS

if TYPE_CHECKING:
    from compilecache.retention import Collection
    from compilecache.rootbudget import Trim

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
    default=KEEP_DAYS,
    show_default=True,
    metavar="DAYS",
    help="Fingerprints of which nothing was published (root: used) for longer go.",
)
@click.option(
    "--keep-bytes",
    callback=_size,
    metavar="SIZE",
    help=f"Most bytes that stay: 500MB, 1TB.  [default: {STORE_BYTES // 10**9}GB in a store, "
    f"{ROOT_BYTES // 10**9}GB in a root]",
)
@click.option(
    "--keep-fingerprints",
    type=click.IntRange(min=0),
    default=STORE_FINGERPRINTS,
    show_default=True,
    metavar="N",
    help="Most fingerprints that stay in a store, the latest ones.",
)
@click.option(
    "--keep-files",
    type=click.IntRange(min=0),
    default=ROOT_FILES,
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
@common.grace_option("What is younger, claimed or used within it stays.")
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
    longest ago. What is claimed, young, in use or named by a tag stays.
    """
    sides = common.chosen_sides(local, remote, store, root)
    rule: dict[str, Any] = {"keep_days": keep_days, "grace_hours": grace_hours, "keep": keep}
    if keep_bytes is not None:
        rule["keep_bytes"] = keep_bytes
    collection = trim = None
    if sides.remote:
        collection = _collect(store, rule | {"keep_fingerprints": keep_fingerprints}, yes)
    if sides.local:
        trim = _trim(root, rule | {"keep_files": keep_files}, yes, lock_timeout)
    if as_json:
        common.print_json({"done": yes, "store": _data(collection), "root": _data(trim)})
        return
    if collection is not None:
        _print_collection(collection, yes)
    if trim is not None:
        _print_trim(trim, yes)
    if not yes and any(side is not None and side.freed for side in (collection, trim)):
        click.echo("Nothing was deleted. Add --yes to do it.")


def _collect(store: str | None, rule: Mapping[str, Any], yes: bool) -> Collection:
    from compilecache.retention import Collector, Retention

    opened = common.open_store(store)
    if opened is None:
        raise click.UsageError("--store none holds nothing to collect")
    collector = Collector(opened, Retention(**rule))
    now = time.time()
    return collector.collect(now, common.tell) if yes else collector.plan(now)


def _trim(root: Path | None, rule: Mapping[str, Any], yes: bool, lock_timeout: float) -> Trim:
    from compilecache.cachedir import CacheDir
    from compilecache.rootbudget import RootBudget, RootTrimmer

    cache = CacheDir(root)
    trimmer = RootTrimmer(cache, RootBudget(**rule))
    if yes and cache.prepare_to_clean():
        return trimmer.trim(
            timeout=lock_timeout, waiting=lambda who: common.tell(f"waiting for {who}")
        )
    return trimmer.plan()


def _data(done: Collection | Trim | None) -> dict[str, Any] | None:
    return None if done is None else asdict(done) | {"freed": done.freed}


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
    for fingerprint, names in sorted(done.kept_by.items()):
        click.echo(f"  {fingerprint[:12]} is kept by {_named_tags(names)}")
    for fingerprint, reason in sorted(done.held.items()):
        click.echo(f"  {fingerprint[:12]} stays as it is: {reason}")
    if done.tags:
        click.echo(f"  {common.count(done.tags, 'object')} of tags that were released")
    if done.half_uploads:
        click.echo(f"  {common.count(done.half_uploads, 'upload')} that never ended")
    if done.probes:
        click.echo(f"  {common.count(done.probes, 'probe')} that doctor left")
    click.echo(f"{_frees(yes)} {common.megabytes(done.freed)} MB in the store")


def _named_tags(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{'tag' if len(names) == 1 else 'tags'} {', '.join(names[:5])}{more}"


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
