"""How a warm-up tells people where it is: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from compilecache.report import TargetReport

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

log = logging.getLogger("compilecache")

OF_A_TARGET = ("compiling", "priming", "publishing")
"""Phases of one target; the others concern all."""


Teller = Callable[[str], None]
"""Hears of trouble and of waiting, in words."""


class Progress(Protocol):
    """Hears of every step; all methods return at once and raise nothing but SystemExit.

    That ends a warm-up; from ``done`` it comes between two targets, and what is finished is kept.
    """

    def begin(self, count: int) -> None:
        """``count`` targets are ahead."""

    def doing(self, phase: str, what: str) -> None:
        """A phase starts: "restoring", "compiling", "priming", "publishing", "waiting"."""

    def done(self, row: TargetReport) -> None:
        """A target has ended."""

    def trouble(self, text: str) -> None:
        """Something went wrong and was survived."""


class LogProgress:
    """Lines through ``logging``: what ensure_warm uses inside somebody's training program."""

    def __init__(self) -> None:
        self._count = 0
        self._ended = 0
        self._began = time.monotonic()

    def begin(self, count: int) -> None:
        self._count, self._ended, self._began = count, 0, time.monotonic()
        self._line(f"{count} targets")

    def doing(self, phase: str, what: str) -> None:
        if phase in OF_A_TARGET and self._ended == self._count:
            what = f"{what}, another replica"
        elif phase in OF_A_TARGET:
            phase = f"[{self._ended + 1}/{self._count}] {phase}"
        self._line(f"{phase} {what}")

    def done(self, row: TargetReport) -> None:
        self._ended += 1
        seen = row.evidence
        cost = f" ({seen.outcome}, {seen.seconds:.1f} s)" if seen else f": {row.error}"
        self._line(f"[{self._ended}/{self._count}] {row.status} {row.target}{cost}, {self._left()}")

    def trouble(self, text: str) -> None:
        log.warning("compilecache: %s", text)

    def _left(self) -> str:
        elapsed = time.monotonic() - self._began
        remaining = elapsed / max(1, self._ended) * (self._count - self._ended)
        return f"elapsed {elapsed:.0f} s, about {remaining:.0f} s left"

    def _line(self, text: str) -> None:
        log.info("compilecache: %s", text)


class LineProgress(LogProgress):
    """The same lines on standard error, for commands without a terminal (CI, pods)."""

    def trouble(self, text: str) -> None:
        print(f"warning: {text}", file=sys.stderr, flush=True)

    def _line(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class BarProgress:
    """A live bar with target, phase, elapsed time and estimate."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            SpinnerColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
        from rich.table import Column

        cut = Column(ratio=1, no_wrap=True, overflow="ellipsis")
        self._bar: RichProgress = Progress(
            SpinnerColumn(),
            MofNCompleteColumn(),
            BarColumn(bar_width=16),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}", table_column=cut),
            console=Console(stderr=True),
            expand=True,
            transient=True,
        )
        self._task: TaskID | None = None

    def begin(self, count: int) -> None:
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task("", total=count)
        self._bar.start()

    def doing(self, phase: str, what: str) -> None:
        if self._task is not None:
            self._bar.update(self._task, description=f"{phase} {what}")

    def done(self, row: TargetReport) -> None:
        if self._task is not None:
            self._bar.advance(self._task)

    def trouble(self, text: str) -> None:
        self._bar.console.print(f"[yellow]warning:[/] {text}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()
