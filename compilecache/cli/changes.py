"""What has changed since a tag, as people read it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from compilecache.cli import options as common

if TYPE_CHECKING:
    from compilecache.changes import Change, Changes
    from compilecache.tags import Tag


def print_changes(tag: Tag, found: Changes) -> None:
    """A table of what differs, and the commands that undo it."""
    click.echo("\n".join(_about(tag)))
    if found.trouble:
        click.echo(f"The model was not compared: {found.trouble}.")
    common.print_table(
        f"\n{common.count(len(found.changes), 'change')} since",
        [_row(change) for change in found.changes],
        ("", "what", "then", "now"),
    )
    title = "\nThese commands undo it:" if found.changes else "\nTo bring its artifacts back:"
    click.echo(title)
    for line in found.commands:
        click.echo(f"  {line}")


def _about(tag: Tag) -> Iterator[str]:
    rate = tag.tokens_per_second
    said = "" if rate is None else f", measured at {rate:,.0f} tokens/s"
    yield f"Tag {tag.full_name} of {tag.created}{said}"
    if tag.note:
        yield tag.note
    yield (
        f"{common.count(len(tag.records), 'record')} on {', '.join(tag.devices) or 'no device'}, "
        f"fingerprint {tag.fingerprint[:12]}"
    )


def _row(change: Change) -> tuple[str, str, str, str]:
    from compilecache.cli.explain import apart

    return change.kind, change.what, *apart(change.then, change.now)
