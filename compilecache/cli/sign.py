"""``compilecache sign``: sign what a store holds already, with a new key or for the first time."""

from __future__ import annotations

from pathlib import Path

import click

from compilecache.cli import DAMAGED
from compilecache.cli import options as common


@click.command(
    epilog="Example, from an old key to a new one: compilecache sign --sign-key new.key "
    "--trust-key old.key.pub"
)
@common.with_options(common.store_option, common.sign_option, common.trust_option)
@click.option(
    "--unsigned",
    is_flag=True,
    help="Sign whatever is in force, also what no trusted key signed: you vouch for everybody who "
    "could write the store until now.",
)
@common.json_option
def sign(
    *,
    store: str | None,
    sign_key: Path | None,
    trust_keys: tuple[Path, ...],
    unsigned: bool,
    as_json: bool,
) -> None:
    """Add a signature to every record in force, and every tag, that a trusted key signed.

    Nothing is removed.

    Leaves with 4 when records were passed over because nobody trusted signed them, or because they
    are damaged.
    """
    opened = common.open_store(store, trust_keys, sign_key)
    if opened is None:
        raise click.UsageError("--store none holds nothing to sign")
    if not opened.signs:
        raise click.UsageError("name a key with --sign-key or COMPILECACHE_SIGN_KEY")
    signed: list[dict[str, str]] = []
    known, refused = 0, []
    for digest in opened.fingerprints():
        done = opened.sign(digest, unsigned=unsigned)
        signed += [{"fingerprint": digest, "key": key} for key in done.keys]
        known += done.known
        refused += [f"{digest[:12]}: {text}" for text in done.refused]
    tags, passed_over = opened.tags.sign(unsigned=unsigned)
    refused += passed_over
    for text in refused:
        common.tell(f"warning: not signed: {text}")
    if as_json:
        common.print_json({"signed": signed, "known": known, "tags": tags, "refused": refused})
    else:
        named = f", {common.count(len(tags), 'tag')}" if tags else ""
        click.echo(
            f"{len(signed)} signed{named}, {known} signed before, {len(refused)} passed over"
        )
    if refused:
        raise SystemExit(DAMAGED)
