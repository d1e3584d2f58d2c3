"""``compilecache keygen``: a pair of keys to sign with and to trust."""

from __future__ import annotations

from pathlib import Path

import click

from compilecache.cli import options as common


@click.command(epilog="Example: compilecache keygen compilecache.key")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@common.json_option
def keygen(file: Path, *, as_json: bool) -> None:
    """Make a key to sign with (FILE, mode 0600) and the key to trust (FILE.pub).

    Keep FILE where artifacts are made, and nowhere else. Nothing is overwritten.
    """
    from compilecache.signing import make_key

    key = make_key(file)
    if as_json:
        common.print_json({"id": key.id, "sign_key": str(file), "trust_key": f"{file}.pub"})
    else:
        click.echo(f"Key {key.id}: sign with {file}, trust {file}.pub")
