"""The grid behind every picture: shapes down, devices across, what each target came to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from compilecache.report import Report, TargetReport, without_common

SIGNS: Mapping[str, str] = {
    "restored": "↓",
    "local": "✓",
    "rewritten": "⇄",
    "compiled": "✓",
    "bypass": "↷",
    "failed": "✕",
    "in image": "↓",
    "in store": "↓",
    "by rewriting": "⇄",
    "damaged": "✕",
    "missing": "○",
}
"""A sign for every status, so that nobody depends on its colour."""

MEANINGS: Mapping[str, str] = {
    "restored": "came from the store",
    "local": "was in the cache root",
    "rewritten": "another device's program, with this one's index",
    "compiled": "compiled in this run",
    "bypass": "ran, and torch compiles it again on every start",
    "failed": "did not get warm",
    "in image": "a start would take it from the image",
    "in store": "a restore would bring it",
    "by rewriting": "another device's program would be rewritten",
    "damaged": "a file of it is not what it was",
    "missing": "would be compiled",
}

UNKNOWN = "·"
WIDE = 4
"""More devices than these get signs without words on a terminal."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One target."""

    status: str
    """As in a report or an explanation; "bypass" for what torch never caches."""
    seconds: float | None = None
    """Its first run; None when it did not run."""
    why: str = ""
    """What there is to say of it: an error, or notes."""

    @property
    def sign(self) -> str:
        """One letter for the status."""
        return SIGNS.get(self.status, UNKNOWN)


@dataclass(frozen=True, slots=True)
class Grid:
    """Shapes × devices."""

    devices: tuple[str, ...]
    """Columns."""
    shapes: tuple[str, ...]
    """Rows, without what all have in common."""
    common: str
    """That; "" when there is nothing."""
    cells: Mapping[tuple[int, int], Cell]
    """By row and column; a target that is not there was not reached."""

    def statuses(self) -> dict[str, int]:
        """How many targets came to what, in the order of ``SIGNS``."""
        found = [cell.status for cell in self.cells.values()]
        order = [*SIGNS, *sorted(set(found) - SIGNS.keys())]
        return {status: found.count(status) for status in order if status in found}

    def __rich__(self) -> object:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        narrow = len(self.devices) > WIDE
        table = Table(box=None, padding=(0, 2, 0, 0))
        table.add_column("shape", overflow="fold")
        for device in self.devices:
            table.add_column(device, justify="right" if narrow else "left", no_wrap=True)
        for row, shape in enumerate(self.shapes):
            cells = (self.cells.get((row, column)) for column in range(len(self.devices)))
            table.add_row(Text(shape), *(Text(_words(cell, narrow)) for cell in cells))
        legend = "  ".join(
            f"{SIGNS.get(status, UNKNOWN)} {status} ({count})"
            for status, count in self.statuses().items()
        )
        lines = [Text(f"all: {self.common}", style="italic")] if self.common else []
        return Group(table, *lines, Text(legend))


def _words(cell: Cell | None, narrow: bool) -> str:
    if cell is None:
        return UNKNOWN
    seconds = "" if cell.seconds is None else f" {cell.seconds:.1f} s"
    return f"{cell.sign}{seconds}" if narrow else f"{cell.sign} {cell.status}{seconds}"


def grid_of(report: Report) -> Grid:
    """The picture of a warm-up."""
    return make_grid((row.target, row.device, _cell(row)) for row in report.targets)


def make_grid(targets: Iterable[tuple[str, str, Cell]]) -> Grid:
    """A grid of targets: the target in words, its device, what it came to."""
    rows: dict[str, int] = {}
    columns: dict[str, int] = {}
    cells = {}
    for target, device, cell in targets:
        shape = target.removesuffix(f" on {device}")
        row = rows.setdefault(shape, len(rows))
        column = columns.setdefault(device, len(columns))
        cells[row, column] = cell
    common, shapes = without_common([f"{shape} on -" for shape in rows])
    return Grid(
        devices=tuple(columns),
        shapes=tuple(shape.removesuffix(" on -") for shape in shapes),
        common=common.removesuffix("on -").strip(),
        cells=cells,
    )


def _cell(row: TargetReport) -> Cell:
    seen = row.evidence
    bypassed = row.status != "failed" and seen is not None and seen.outcome == "bypass"
    return Cell(
        status="bypass" if bypassed else row.status,
        seconds=seen.seconds if seen else None,
        why=row.error or "; ".join(row.notes),
    )
