"""How a warm-up tells people where it is: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from io import StringIO
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from compilecache.report import TargetReport

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

log = logging.getLogger("compilecache")

OF_A_TARGET = ("compiling", "priming", "publishing")
"""Phases of one target; the others concern all."""
SAID_EVERY = 10.0
"""Seconds between two lines about one transfer; what is done sooner gets none."""


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

    def moving(self, phase: str, done: int, total: int) -> None:
        """So many bytes are restored or published, of so many; heard in several threads."""

    def trouble(self, text: str) -> None:
        """Something went wrong and was survived."""


class Pace:
    """When to say something of a transfer, and what."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = self._told = 0.0
        self._first = 0
        self._before: int | None = None

    def said(self, done: int, total: int) -> str | None:
        """Bytes, rate and what is left, if it is time; the first call of a transfer begins it."""
        now = self._clock()
        if self._before is None or done < self._before:
            self._began = self._told = now
            self._first = done
        self._before = None if done >= total else done
        if done >= total or now - self._told < SAID_EVERY:
            return None
        self._told = now
        rate = (done - self._first) / (now - self._began)
        left = f", about {(total - done) / rate:.0f} s left" if rate else ""
        return f"{done / 1e6:.1f} of {total / 1e6:.1f} MB, {rate / 1e6:.1f} MB/s{left}"


class LogProgress:
    """Lines through ``logging``: what ensure_warm uses inside somebody's training program."""

    def __init__(self) -> None:
        self._count = 0
        self._ended = 0
        self._began = time.monotonic()
        self._pace = Pace()

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

    def moving(self, phase: str, done: int, total: int) -> None:
        if said := self._pace.said(done, total):
            self._line(f"{phase}: {said}")

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
    """A live bar with target, phase, elapsed time and estimate; below it one of bytes while they move."""

    def __init__(self) -> None:
        from rich.console import Console, Group
        from rich.live import Live
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            Progress,
            SpinnerColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
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
            expand=True,
        )
        self._bytes: RichProgress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=16),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        console = Console(stderr=True)
        self._live = Live(Group(self._bar, self._bytes), console=console, transient=True)
        self._task: TaskID | None = None
        self._transfer: TaskID | None = None
        self._moved = 0

    def begin(self, count: int) -> None:
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task("", total=count)
        self._live.start()

    def doing(self, phase: str, what: str) -> None:
        if self._task is not None:
            self._bar.update(self._task, description=f"{phase} {what}")

    def done(self, row: TargetReport) -> None:
        if self._task is not None:
            self._bar.advance(self._task)

    def moving(self, phase: str, done: int, total: int) -> None:
        if self._transfer is not None and (done >= total or done < self._moved):
            self._bytes.remove_task(self._transfer)
            self._transfer = None
        self._moved = done
        if done >= total:
            return
        if self._transfer is None:
            self._live.start()
            self._transfer = self._bytes.add_task(phase)
        self._bytes.update(self._transfer, description=phase, completed=done, total=total)

    def text(self, width: int) -> str:
        """What it shows now, without colours, so many columns wide."""
        from rich.console import Console

        console = Console(width=width, file=StringIO())
        console.print(self._live.renderable)
        assert isinstance(console.file, StringIO)
        return console.file.getvalue()

    def trouble(self, text: str) -> None:
        self._live.console.print(f"[yellow]warning:[/] {text}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()
