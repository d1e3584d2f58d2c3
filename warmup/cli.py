"""``warmup``: ``run`` on one host, ``fleet`` on a cluster, ``pull`` in an init container, ``serve`` to be asked."""

from __future__ import annotations

import click

from compilecache.cli import run_group
from warmup.fleet import fleet
from warmup.pull import pull
from warmup.run import run
from warmup.serve import serve


@click.group(
    epilog="Exit codes: 0 done, 1 fault, 2 usage, 3 not warm, 4 damaged or untrusted, 5 timed out."
)
@click.version_option(package_name="compilecache")
def group() -> None:
    """Make the artifacts of a plan, or bring them, and say in one JSON line how it went."""


group.add_command(run)
group.add_command(pull)
group.add_command(fleet)
group.add_command(serve)


def main() -> None:
    """Entry point of ``warmup``: one clear error, never a traceback."""
    run_group(group)
