"""What a warm-up did, target by target: for programs (JSON) and for people (a table)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

from compilecache.evidence import Evidence

Status = Literal["restored", "local", "rewritten", "compiled", "failed"]


class TargetReport(BaseModel):
    """One target."""

    model_config = ConfigDict(frozen=True)

    key: str
    """Its name within the fingerprint."""
    target: str
    """Spec and device, in words."""
    device: str
    status: Status
    """restored: from the store. local: was in the cache root. rewritten: another device's program,
    with this one's index. compiled: made here. failed: see error."""
    engine: str = "trace"
    """Which engine it went by."""
    notes: tuple[str, ...] = ()
    """Why it did not go by another, or did not take what was there, in words."""
    origin: str | None = None
    """Where a rewritten program was compiled."""
    evidence: Evidence | None = None
    """None when the target did not run."""
    bytes: int = 0
    """Size of its files."""
    published: bool = False
    """Whether its artifact went to the store in this run."""
    error: str | None = None


class ExtraReport(BaseModel):
    """The cache root of another compiler."""

    model_config = ConfigDict(frozen=True)

    name: str
    root: str
    files: int = 0
    """Finished files in it now."""
    restored: int = 0
    """Files that came from the store in this run."""
    published: int = 0
    """Files that went there."""


class Report(BaseModel):
    """A whole warm-up."""

    model_config = ConfigDict(frozen=True)

    fingerprint: str
    engine: str
    root: str
    store: str | None
    targets: tuple[TargetReport, ...]
    extra_roots: tuple[ExtraReport, ...] = ()
    """Cache roots of other compilers; empty unless some were named."""
    gave_up: tuple[str, ...] = ()
    """Cache trouble that was survived, in words; empty on a good day."""
    restored_bytes: int = 0
    restored_files: int = 0
    restore_seconds: float = 0.0
    seconds: float = 0.0

    def count(self, status: Status) -> int:
        """How many targets ended that way."""
        return sum(target.status == status for target in self.targets)

    @property
    def compiles(self) -> int:
        """Targets for which code was generated in this run."""
        return sum(bool(t.evidence and not t.evidence.compiled_nothing) for t in self.targets)

    @property
    def warm(self) -> bool:
        """Every target ran and none failed."""
        return all(target.status != "failed" for target in self.targets)

    def summary(self) -> str:
        """One line."""
        kinds: tuple[Status, ...] = ("restored", "local", "rewritten", "compiled", "failed")
        counts = ", ".join(f"{n} {kind}" for kind in kinds if (n := self.count(kind)))
        return f"{len(self.targets)} targets: {counts} in {self.seconds:.1f} s"

    def table(self, width: int = 80) -> str:
        """A table that fits a terminal."""
        from io import StringIO

        from rich.console import Console

        out = StringIO()
        Console(file=out, width=width, highlight=False, color_system=None).print(self.__rich__())
        return out.getvalue()

    def __rich__(self) -> object:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        common, names = without_common([row.target for row in self.targets])
        table = Table(box=None, padding=(0, 1, 0, 0), title_justify="left", caption_justify="left")
        table.title = self.summary()
        table.caption = f"all: {common}" if common else None
        mixed = any(row.engine != "trace" for row in self.targets)
        for column in ("target", "status", *(("engine",) if mixed else ()), "cache"):
            table.add_column(column, overflow="fold")
        for column in ("first s", "again ms", "MB"):
            table.add_column(column, justify="right", no_wrap=True)
        for name, row in zip(names, self.targets, strict=True):
            status, *cells = _cells(row)
            table.add_row(name, status, *((row.engine,) if mixed else ()), *cells)
        notes = distinct_notes((row.target, row.notes) for row in self.targets)
        return Group(table, *map(Text, notes)) if notes else table


def distinct_notes(notes: Iterable[tuple[str, Sequence[str]]]) -> list[str]:
    """The notes of targets, each once, as lines for people; one says how many it stands for."""
    count = Counter(
        note.replace(f"the program of '{target}'", "it") for target, said in notes for note in said
    )
    return [f"note: {note}{f' ({n} targets)' if n > 1 else ''}" for note, n in count.items()]


def without_common(names: Sequence[str]) -> tuple[str, list[str]]:
    """The dimensions and device that all targets share, once, and what tells them apart."""
    words = [name.split(" ") for name in names]
    shared = [
        word
        for word in (words[0] if len(words) > 1 else ())
        if "=" in word and all(word in other for other in words)
    ]
    devices = {name.rpartition(" on ")[2] for name in names}
    short = [" ".join(word for word in other if word not in shared) for other in words]
    if len(names) > 1 and len(devices) == 1:
        device = next(iter(devices))
        shared.append(f"on {device}")
        short = [name.removesuffix(f" on {device}") for name in short]
    return " ".join(shared), short


def _cells(row: TargetReport) -> tuple[str, ...]:
    seen = row.evidence
    return (
        row.status,
        seen.outcome if seen else "-",
        f"{seen.seconds:.2f}" if seen else "-",
        f"{seen.again_seconds * 1e3:.1f}" if seen else "-",
        f"{row.bytes / 1e6:.1f}",
    )
