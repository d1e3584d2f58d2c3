"""``compilecache ls``: what a store holds, by fingerprint."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from compilecache.cli import options as common

if TYPE_CHECKING:
    from compilecache.records import StoreEntry
    from compilecache.store import ArtifactStore

LABELS = ("torch", "gpu", "device", "workload")
"""Components that tell fingerprints apart at a glance."""


@click.command(epilog="Example: compilecache ls --store s3://bucket/cache")
@click.argument("digest", required=False, metavar="[FINGERPRINT]")
@common.store_option
@common.trust_option
@common.json_option
def ls(
    digest: str | None, *, store: str | None, trust_keys: tuple[Path, ...], as_json: bool
) -> None:
    """List the fingerprints of the store, or the targets of one (the first digits are enough)."""
    opened = common.open_store(store, trust_keys)
    if opened is None:
        raise click.UsageError("--store none holds nothing to list")
    if digest is None:
        _fingerprints(opened, as_json)
    else:
        _targets(opened, common.full_digest(opened, digest), as_json)


def _fingerprints(store: ArtifactStore, as_json: bool) -> None:
    rows = []
    for digest in store.fingerprints():
        entries = _trusted(store, digest)
        rows.append(
            {
                "fingerprint": digest,
                "targets": len(entries),
                "bytes": sum(entry.pack_bytes for entry in entries),
                "newest": max((entry.created for entry in entries), default=""),
                "what": _what(store.get_fingerprint(digest)),
            }
        )
    if as_json:
        common.print_json({"store": store.url, "fingerprints": rows})
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(
        box=None, title=f"{_count(len(rows), 'fingerprint')} in {store.url}", title_justify="left"
    )
    table.add_column("fingerprint", no_wrap=True, max_width=12)
    for column in ("targets", "MB", "age"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("what", overflow="fold")
    for row in rows:
        table.add_row(
            str(row["fingerprint"])[:12],
            str(row["targets"]),
            f"{int(str(row['bytes'])) / 1e6:.1f}",
            age(str(row["newest"])),
            str(row["what"]),
        )
    Console(highlight=False).print(table)


def _trusted(store: ArtifactStore, digest: str) -> tuple[StoreEntry, ...]:
    """A line for each target; what is not trusted is told apart."""
    view = store.latest(digest)
    for line in view.untrusted:
        common.tell(f"not trusted: {digest[:12]}: {line}")
    return view.entries


def _what(text: str | None) -> str:
    from compilecache.errors import PlanError
    from compilecache.fingerprint import Fingerprint

    try:
        components = Fingerprint.parse(text or "").components
    except PlanError:
        return "no readable fingerprint.json"
    if "workload" not in components:
        components = {**components, "workload": "adopted directory"}
    return ", ".join(components[label] for label in LABELS if label in components)


def _targets(store: ArtifactStore, digest: str, as_json: bool) -> None:
    entries = _trusted(store, digest)
    if as_json:
        common.print_json({"fingerprint": digest, "targets": [_entry(entry) for entry in entries]})
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(
        box=None, title=f"{_count(len(entries), 'target')} of {digest}", title_justify="left"
    )
    table.add_column("target", overflow="fold")
    for column in ("gen", "files", "MB", "age"):
        table.add_column(column, justify="right", no_wrap=True)
    for entry in entries:
        table.add_row(
            entry.key,
            str(entry.generation),
            str(entry.files),
            f"{entry.file_bytes / 1e6:.1f}",
            age(entry.created),
        )
    Console(highlight=False).print(table)


def _entry(entry: StoreEntry) -> dict[str, object]:
    return {name: getattr(entry, name) for name in type(entry).__slots__}


def age(created: str) -> str:
    """How long ago, in one unit: "5 min", "3 h", "12 d"."""
    try:
        then = datetime.fromisoformat(created)
    except ValueError:
        return "-"
    minutes = max(0.0, (datetime.now(UTC) - then).total_seconds() / 60)
    if minutes < 120:
        return f"{minutes:.0f} min"
    return f"{minutes / 60:.0f} h" if minutes < 48 * 60 else f"{minutes / 1440:.0f} d"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
