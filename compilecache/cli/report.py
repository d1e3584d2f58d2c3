"""``compilecache report``: the picture of a warm-up, on the terminal or as one HTML file."""

from __future__ import annotations

from pathlib import Path

import click

from compilecache.cli import NOT_WARM
from compilecache.cli import options as common
from compilecache.errors import CompileCacheError


@click.command(epilog="Example: compilecache report --html warm.html")
@click.argument(
    "report_file",
    required=False,
    metavar="[REPORT]",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
)
@common.root_option
@click.option(
    "--html",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write one HTML file that needs nothing else.",
)
@common.json_option
def report(
    report_file: Path | None, *, root: Path | None, html: Path | None, as_json: bool
) -> None:
    """Show what a warm-up came to, shape by shape and device by device.

    REPORT is a file that 'warm --json' wrote; without one it is the last warm-up of the cache root.
    Leaves with 3 when a target is not warm.
    """
    from compilecache.cachedir import CacheDir
    from compilecache.picture.grid import grid_of
    from compilecache.picture.last import last_report, read_report
    from compilecache.picture.page import render

    found = read_report(report_file) if report_file else last_report(CacheDir(root).root)
    if html is not None:
        _write(html, render(found))
        common.tell(f"Wrote {html}.")
    if as_json:
        common.print_json(found.model_dump(mode="json"))
    elif html is None:
        from rich.console import Console

        click.echo(found.summary())
        Console(highlight=False).print(grid_of(found))
        for line in found.gave_up:
            common.tell(f"warning: {line}")
    if not found.warm:
        raise SystemExit(NOT_WARM)


def _write(path: Path, text: str) -> None:
    from compilecache.files import replacing

    try:
        with replacing(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise CompileCacheError(
            f"'{path}' cannot be written: {error.strerror}",
            next_step="Name a file in a writable folder with --html",
        ) from error
