"""What a training run says while it goes and at its end: a log, lines for people, a summary."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TextIO

from compilecache.files import replacing

Say = Callable[[str], None]
"""Takes one line for people."""

PROGRESS_SECONDS = 5.0
"""Between two lines of progress."""
UNSTEADY_STEPS = 5
"""First steps that do not count as steady state."""


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step."""

    step: int
    """Its number, counted from 1 over the whole run."""
    loss: float
    """Mean of the drafters' losses, before the step."""
    lr: float
    """Learning rate."""
    tokens: int
    """Tokens of all its micro-batches, pads left out."""
    seconds: float
    """Since the step before."""
    grad_norm: float
    """Norm of the averaged gradient before it was clipped."""


@dataclass(frozen=True, slots=True)
class Summary:
    """How a run went."""

    steps: int
    """Steps done, those before a resume left out."""
    last_step: int
    """Number of the last one."""
    tokens: int
    """Tokens trained on, pads left out."""
    seconds: float
    """From the start of the threads to the end of the last step."""
    tokens_per_second: float
    """Over all of it."""
    steady_tokens_per_second: float | None
    """Without the first five steps; None when there are no others."""
    first_loss: float
    """Of the first step done."""
    last_loss: float
    """Of the last one."""
    compiles_after_prime: int | None
    """Compilations that threads started; None when nothing was warmed."""
    memory_peak: Mapping[str, int]
    """Most bytes that torch held on each GPU."""
    memory_spread: float | None
    """Largest of the drafters' ratios of most to least peak memory of a steady step; None on CPUs."""
    dropped: Mapping[str, int]
    """Rows left out by reason: ``too_long``, ``no_anchor``, and ``left_over`` in each pass."""
    truncated: int
    """Rows that were cut."""
    checkpoint: str | None
    """The last one written."""

    def json(self) -> str:
        """One JSON object."""
        return json.dumps(asdict(self))


@dataclass(slots=True)
class Meter:
    """Hears of every step, logs it and counts; used by one thread."""

    steps: int
    """Of the whole run."""
    say: Say
    """Where lines for people go."""
    log: TextIO | None = None
    """Where one JSON object a step goes."""
    done: list[Step] = field(default_factory=list)
    """Every step so far."""
    _began: float = field(default_factory=time.perf_counter)
    _ended: float = 0.0
    _said: float = 0.0

    def begin(self) -> None:
        """The threads start now."""
        self._began = self._ended = self._said = time.perf_counter()

    def add(
        self, step: int, *, loss: float, lr: float, tokens: int, grad_norm: float, memory: int
    ) -> None:
        """A step has ended; ``memory`` is the most bytes it held on the first GPU, 0 on a CPU."""
        now = time.perf_counter()
        record = Step(step, loss, lr, tokens, now - self._ended, grad_norm)
        self._ended = now
        self.done.append(record)
        if self.log is not None:
            self.log.write(json.dumps(asdict(record)) + "\n")
            self.log.flush()
        if len(self.done) == 1 or step == self.steps or now - self._said >= PROGRESS_SECONDS:
            self._said = now
            self.say(self._line(record, memory))

    @property
    def seconds(self) -> float:
        """From the start to the end of the last step."""
        return self._ended - self._began

    @property
    def tokens(self) -> int:
        """Of all steps."""
        return sum(record.tokens for record in self.done)

    def tokens_per_second(self, skip: int = 0) -> float | None:
        """Without the first ``skip`` steps; None when there are no others."""
        counted = self.done[skip:]
        seconds = sum(record.seconds for record in counted)
        return sum(record.tokens for record in counted) / seconds if counted else None

    def _line(self, record: Step, memory: int) -> str:
        rate = (self.tokens_per_second(UNSTEADY_STEPS) or self.tokens_per_second()) or 0.0
        left = (self.steps - record.step) * self.seconds / len(self.done)
        held = f"  {memory / 2**30:.1f} GiB" if memory else ""
        return (
            f"step {record.step}/{self.steps}  loss {record.loss:.4f}  lr {record.lr:.2e}  "
            f"{rate:,.0f} tokens/s{held}  about {left:.0f} s left"
        )


class StepLog:
    """A JSONL file with one object a step, which a resumed run continues."""

    def __init__(self, path: Path | None, first_step: int) -> None:
        """Lines of steps after ``first_step``, which will be made again, are cut off."""
        self._path = path
        self._first_step = first_step
        self._stack = ExitStack()

    def __enter__(self) -> TextIO | None:
        if self._path is None:
            return None
        kept = [line for line in self._lines() if _step_of(line) <= self._first_step]
        with replacing(self._path) as file:
            file.write("".join(kept).encode())
        return self._stack.enter_context(self._path.open("a", encoding="utf-8"))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def _lines(self) -> list[str]:
        assert self._path is not None
        if self._first_step == 0 or not self._path.is_file():
            return []
        return self._path.read_text("utf-8").splitlines(keepends=True)


def spread(peaks: list[int]) -> float | None:
    """Most to least peak memory of the steady steps; None when nothing was measured."""
    steady = [peak for peak in peaks[UNSTEADY_STEPS:] if peak]
    return max(steady) / min(steady) if steady else None


def _step_of(line: str) -> float:
    """The number in a line; of one that was cut off while it was written, later than all others."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, LookupError, TypeError):
        return float("inf")
