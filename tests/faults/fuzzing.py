"""Parsers given what nobody would write: each either reads it, or refuses it with an error of ours.

Input number N of a kind is always the same for one seed, so one that fails can be looked at alone.
"""

from __future__ import annotations

import random
import resource
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from parsers import PARSERS, Parser

MOST_SECONDS = 5.0
"""One input may take; the usual one takes a thousandth of a second."""
MOST_BYTES = 256 << 20
"""One process may grow by, over all inputs."""


@dataclass
class Tally:
    """What came of some inputs."""

    inputs: int = 0
    accepted: int = 0
    """Read after all: the change did no harm."""
    refused: int = 0
    crashes: list[str] = field(default_factory=list)
    """Errors that are none of ours, and promises that did not hold: with the input's number."""
    slowest: float = 0.0
    """Seconds."""
    grown: int = 0
    """Bytes by which the process grew."""

    def add(self, other: Tally) -> None:
        """Counts another's in."""
        self.inputs += other.inputs
        self.accepted += other.accepted
        self.refused += other.refused
        self.crashes += other.crashes
        self.slowest = max(self.slowest, other.slowest)
        self.grown = max(self.grown, other.grown)


class TookTooLongError(Exception):
    """One input had all the time that it may have."""


def fuzz(name: str, seed: int, numbers: range) -> Tally:
    """What comes of these inputs of one kind. In the main thread of a process only."""
    tally = Tally()
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        dir=memory if memory.is_dir() else None, prefix="fuzz-"
    ) as folder:
        parser = PARSERS[name](Path(folder))
        before = 0
        for number in numbers:
            chance = random.Random(f"{seed} {name} {number}")
            data = parser.make(chance)
            before = before or _resident()
            began = time.perf_counter()
            if problem := _tried(parser, data, tally):
                tally.crashes.append(f"{name} {number}: {problem}; {data[:60]!r}")
            tally.inputs += 1
            tally.slowest = max(tally.slowest, time.perf_counter() - began)
        tally.grown = _resident() - before
    if tally.grown > MOST_BYTES:
        tally.crashes.append(f"{name}: the process grew by {tally.grown >> 20} MiB")
    return tally


def _tried(parser: Parser, data: bytes, tally: Tally) -> str:
    """What is wrong with how the parser took it; "" when all is well."""
    problem = ""
    try:
        with _limited():
            parser.read(data)
        tally.accepted += 1
    except parser.errors as error:
        tally.refused += 1
        if len(str(error)) > 20_000 or not str(error).endswith("."):
            problem = f"an error of {len(str(error))} characters"
    except (Exception, RecursionError) as error:
        problem = f"{type(error).__name__}: {str(error)[:300]}"
    try:
        parser.clean()
    except AssertionError as error:
        problem = problem or str(error)
    return problem


@contextmanager
def _limited() -> Iterator[None]:
    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise TookTooLongError

    usual = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, MOST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, usual)


def _resident() -> int:
    """The most memory that this process has had so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
