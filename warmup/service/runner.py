"""The runner: takes one job after the other, has a worker do it, and ends a worker that does not come to an end."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
from enum import Enum, auto
from pathlib import Path

from pydantic import ValidationError

from compilecache.gpuprofile import GpuProfile
from compilecache.offline import environment_of
from warmup.service.child import Child
from warmup.service.orders import (
    SAID,
    Doing,
    Ended,
    Explained,
    Failed,
    Finished,
    Identified,
    Order,
    Said,
    Trouble,
)
from warmup.service.queue import Queue, Work
from warmup.service.settings import Settings

log = logging.getLogger("warmup")

WORKER = (sys.executable, "-m", "warmup.service.worker")
MOST_CRASHES = 2
"""A target in whose hands the worker died as often is reported as failed."""
SWEEP_JOBS = 100
"""Jobs between two looks for logs of jobs that are forgotten."""
TICK_SECONDS = 0.2
"""How soon a cancellation or a stop is noticed."""


class Outcome(Enum):
    """How a worker came to its end."""

    COMPLETE = auto()
    STOPPED = auto()
    CANCELLED = auto()
    FAILED = auto()
    """It said why."""
    TOO_SLOW = auto()
    OUT_OF_TIME = auto()
    """The job was."""
    DIED = auto()


class Runner:
    """A thread that works on the queue until it is told to stop."""

    def __init__(
        self,
        queue: Queue,
        settings: Settings,
        *,
        command: Sequence[str] = WORKER,
        profile: GpuProfile | None = None,
    ) -> None:
        """``profile``: of a GPU that is not there; workers compile for it and see none."""
        self._queue = queue
        self._settings = settings
        self._command = command
        self._profile = profile
        self._logs = settings.state / "logs"
        self._new = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="runner", daemon=True)
        self._done = 0
        self.broken: str | None = None
        """What ended the thread, other than a stop."""

    def start(self) -> None:
        """Gives back what a service that died had in hand, then works."""
        self._logs.mkdir(parents=True, exist_ok=True, mode=0o700)
        left = self._queue.recover()
        if left:
            log.info("%d jobs of an earlier run go on where they stopped", left)
        self._sweep()
        self._thread.start()

    def wake(self) -> None:
        """There may be something new."""
        self._new.set()

    def stop(self) -> None:
        """Lets the target in hand end within the grace time, else gives it back; then returns."""
        self._stopping.set()
        self._new.set()
        self._thread.join()

    @property
    def alive(self) -> bool:
        """Whether jobs are worked on."""
        return self._thread.is_alive() and not self._stopping.is_set()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._new.clear()
                work = self._queue.take()
                if work is None:
                    self._new.wait()
                else:
                    self._do(work)
                    self._done += 1
                    if self._done % SWEEP_JOBS == 0:
                        self._sweep()
        except BaseException as error:
            self.broken = f"{type(error).__name__}: {error}"
            log.exception("the runner has ended; restart the service")

    def _sweep(self) -> None:
        """Removes the logs of jobs that are forgotten."""
        known = self._queue.ids()
        for log_file in self._logs.glob("*.log"):
            if log_file.stem not in known:
                log_file.unlink(missing_ok=True)

    def _do(self, work: Work) -> None:
        deadline = time.monotonic() + self._settings.job_deadline
        fruitless = 0
        while left := self._queue.left(work):
            if self._queue.is_cancelled(work):
                break
            self._queue.begin_attempt(work)
            attempt = Attempt(self._queue, work, self._settings, self._stopping, self._profile)
            log_file = self._logs / f"{work.id}.log"
            outcome = attempt.run(self._command, left, log_file, deadline)
            if outcome is Outcome.STOPPED or (self._stopping.is_set() and outcome is Outcome.DIED):
                self._queue.give_back(work)
                return
            if outcome in (Outcome.FAILED, Outcome.OUT_OF_TIME):
                return
            fruitless = fruitless + 1 if self._queue.left(work) == left else 0
            if fruitless >= MOST_CRASHES:
                self._queue.fail(work, attempt.obituary(log_file), f"See '{log_file}'")
                return
        self._queue.finish(work)


class Attempt:
    """One worker at one job."""

    def __init__(
        self,
        queue: Queue,
        work: Work,
        settings: Settings,
        stopping: threading.Event,
        profile: GpuProfile | None,
    ) -> None:
        self._queue = queue
        self._work = work
        self._settings = settings
        self._stopping = stopping
        self._profile = profile
        self._said_end: Outcome | None = None
        self._limit = self._deadline_of(None)
        self._code = 0

    def run(
        self, command: Sequence[str], left: tuple[int, ...], log_file: Path, job_deadline: float
    ) -> Outcome:
        """Has a worker do what is left, and says how it ended; nothing of it runs afterwards."""
        child = Child(command, self._order(left), log_file, self._environment())
        try:
            outcome = self._watch(child, job_deadline)
        finally:
            self._code = child.end()
        if outcome is Outcome.DIED:
            self._queue.crashed(self._work, self.obituary(log_file), most=MOST_CRASHES)
        if outcome is Outcome.TOO_SLOW:
            seconds = self._settings.target_deadline
            slow = self._queue.crashed(
                self._work, f"ended by its deadline of {seconds:.0f} s", most=1
            )
            log.warning("job %s: %s took too long", self._work.id, slow or "the start")
        if outcome is Outcome.OUT_OF_TIME:
            self._queue.fail(
                self._work,
                f"the job was ended by its deadline of {self._settings.job_deadline:.0f} s",
                "Raise 'job_deadline' in the settings, then retry it",
            )
        return outcome

    def obituary(self, log_file: Path) -> str:
        """How the worker died, with its last words."""
        how = f"signal {-self._code}" if self._code < 0 else f"exit code {self._code}"
        return f"the worker ended before its work ({how}): {last_words(log_file)}"

    def _order(self, left: tuple[int, ...]) -> Order:
        work, settings = self._work, self._settings
        return Order(
            kind=work.kind,
            plan=work.plan,
            devices=work.devices,
            positions=left,
            root=settings.root,
            store=settings.store,
            baked=settings.baked,
            extra_roots=settings.extra_roots,
            sign_key=settings.sign_key,
            trust_keys=settings.trust_keys,
            lock_timeout=settings.lock_timeout,
            share=settings.share,
            expected=work.expected,
            profile=self._profile,
        )

    def _environment(self) -> dict[str, str]:
        if self._profile is None:
            return {}
        assert self._settings.root is not None
        return environment_of(self._settings.root)

    def _watch(self, child: Child, job_deadline: float) -> Outcome:
        told_to_stop: float | None = None
        looked = time.monotonic()
        while True:
            lines = child.lines(TICK_SECONDS)
            for line in lines or ():
                self._hear(line)
            if lines is None or self._said_end is not None:
                return self._said_end or Outcome.DIED
            now = time.monotonic()
            if self._stopping.is_set() and told_to_stop is None:
                told_to_stop = now
                child.stop()
            if told_to_stop is not None and now > told_to_stop + self._settings.grace:
                return Outcome.STOPPED
            if now > looked + TICK_SECONDS:
                looked = now
                if self._queue.is_cancelled(self._work):
                    return Outcome.CANCELLED
            if now > job_deadline:
                return Outcome.OUT_OF_TIME
            if now > self._limit:
                return Outcome.TOO_SLOW

    def _hear(self, line: bytes) -> None:
        try:
            said = SAID.validate_json(line)
        except ValidationError:
            log.warning("job %s: the worker said something strange: %r", self._work.id, line[:200])
            return
        self._note(said)

    def _note(self, said: Said) -> None:
        queue, work = self._queue, self._work
        match said:
            case Identified():
                queue.note_fingerprint(work, said.digest, said.components)
            case Doing():
                self._limit = self._deadline_of(said)
                queue.note_phase(work, said.phase, said.key, said.what)
            case Finished():
                queue.note_row(work, said.row)
            case Trouble():
                queue.note_trouble(work, said.text)
            case Explained():
                queue.note_explanation(work, said.explanation)
            case Failed():
                queue.fail(work, said.problem, said.next_step)
                self._said_end = Outcome.FAILED
            case Ended():
                self._said_end = Outcome.STOPPED if said.stopped else Outcome.COMPLETE

    def _deadline_of(self, doing: Doing | None) -> float:
        """A target's own, from its beginning; with the time to wait for others before that."""
        seconds = self._settings.target_deadline
        if doing is None or doing.key is None:
            return time.monotonic() + seconds + self._settings.lock_timeout
        if doing.phase == "publishing":
            return max(self._limit, time.monotonic() + seconds)
        return time.monotonic() + seconds


def last_words(log_file: Path, size: int = 1500) -> str:
    """The end of what a worker printed."""
    try:
        with log_file.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - size))
            text = file.read().decode(errors="replace").strip()
    except OSError:
        text = ""
    return text or "it printed nothing"
