"""The picture as one HTML file that needs nothing else: no script, no network."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape
from importlib.resources import files

from compilecache.picture.grid import MEANINGS, SIGNS, UNKNOWN, Cell, Grid, grid_of
from compilecache.report import Report, TargetReport, distinct_notes

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""Should anything in a name still look like HTML: a browser does nothing with it."""


def style() -> str:
    """The style sheet of every picture."""
    return files("compilecache.picture").joinpath("style.css").read_text(encoding="utf-8")


def render(report: Report) -> str:
    """A whole HTML document."""
    grid = grid_of(report)
    title = f"compilecache: {report.summary()}"
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{style()}</style></head><body>",
        f'<header><h1>{_verdict(report)}</h1><p class="quiet">{escape(report.summary())}</p></header>',
        "<main>",
        *_section("Targets", _grid(grid), _legend(grid)),
        *_section("Seconds", _details(report.targets)),
        *_notes("Given up", report.gave_up),
        *_notes("Notes", distinct_notes((row.target, row.notes) for row in report.targets)),
        *_section("Where", _facts(report)),
        "</main></body></html>",
    ]
    return "\n".join(parts) + "\n"


def _verdict(report: Report) -> str:
    return "Every target is warm" if report.warm else f"{report.count('failed')} not warm"


def _section(title: str, *parts: Iterable[str]) -> Iterator[str]:
    yield f"<section><h2>{escape(title)}</h2>"
    for part in parts:
        yield from part
    yield "</section>"


def _notes(title: str, lines: Iterable[str]) -> Iterator[str]:
    found = list(lines)
    if found:
        yield from _section(
            title, ["<ul>", *(f"<li>{escape(line)}</li>" for line in found), "</ul>"]
        )


def _grid(grid: Grid) -> Iterator[str]:
    yield '<div class="wide" tabindex="0" role="region" aria-label="Targets by shape and device">'
    yield '<table class="grid"><thead><tr><th scope="col">shape</th>'
    yield from (f'<th scope="col">{escape(device)}</th>' for device in grid.devices)
    yield "</tr></thead><tbody>"
    for row, shape in enumerate(grid.shapes):
        cells = (grid.cells.get((row, column)) for column in range(len(grid.devices)))
        yield f'<tr><th scope="row">{escape(shape)}</th>{"".join(map(_cell, cells))}</tr>'
    yield "</tbody></table></div>"
    if grid.common:
        yield f'<p class="quiet">all: {escape(grid.common)}</p>'


def _cell(cell: Cell | None) -> str:
    if cell is None:
        return f'<td class="cell">{UNKNOWN} not reached</td>'
    seconds = (
        f' <span class="number">{cell.seconds:.1f} s</span>' if cell.seconds is not None else ""
    )
    why = f' title="{escape(cell.why)}"' if cell.why else ""
    return (
        f'<td class="cell {_class(cell.status)}"{why}><span aria-hidden="true">{cell.sign}</span> '
        f"{escape(cell.status)}{seconds}</td>"
    )


def _class(status: str) -> str:
    return "is-" + status.replace(" ", "-") if status in SIGNS else "is-unknown"


def _legend(grid: Grid) -> Iterator[str]:
    yield '<dl class="legend">'
    for status, count in grid.statuses().items():
        sign = f'<span class="cell {_class(status)}">{SIGNS.get(status, UNKNOWN)} {escape(status)}</span>'
        yield f"<div><dt>{sign}</dt><dd>{count}: {escape(MEANINGS.get(status, ''))}</dd></div>"
    yield "</dl>"


def _details(rows: Iterable[TargetReport]) -> Iterator[str]:
    yield '<div class="wide" tabindex="0" role="region" aria-label="Seconds by target">'
    yield '<table><thead><tr><th scope="col">target</th><th scope="col">cache</th>'
    for name in ("first s", "again ms", "MB"):
        yield f'<th scope="col" class="number">{name}</th>'
    yield '<th scope="col">published</th></tr></thead><tbody>'
    for row in rows:
        seen = row.evidence
        numbers = (
            f"{seen.seconds:.2f}" if seen else "-",
            f"{seen.again_seconds * 1e3:.1f}" if seen else "-",
            f"{row.bytes / 1e6:.1f}",
        )
        error = f'<p class="error">{escape(row.error)}</p>' if row.error else ""
        yield f'<tr><th scope="row">{escape(row.target)}{error}</th>'
        yield f"<td>{seen.outcome if seen else '-'}</td>"
        yield from (f'<td class="number">{number}</td>' for number in numbers)
        yield f"<td>{'yes' if row.published else 'no'}</td></tr>"
    yield "</tbody></table></div>"


def _facts(report: Report) -> Iterator[str]:
    facts = {
        "fingerprint": report.fingerprint,
        "engine": report.engine,
        "cache root": report.root,
        "store": report.store or "none",
        "restored": f"{report.restored_files} files, {report.restored_bytes / 1e6:.1f} MB "
        f"in {report.restore_seconds:.1f} s",
    }
    yield '<dl class="facts">'
    yield from (
        f"<div><dt>{name}</dt><dd>{escape(fact)}</dd></div>" for name, fact in facts.items()
    )
    yield "</dl>"
