"""What one host of a fleet does: it warms the plan into a root of its own, and is asked how far it is.

Runs on the host, in a process of the engine that placed it there; knows nothing of that engine.
"""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from compilecache import CompileCacheError, StoreUnavailable
from compilecache.cachedir import CacheDir
from compilecache.report import Report, TargetReport
from compilecache.shapes import ShapePlan
from compilecache.store import ArtifactStore
from warmup.oneshot import JobFailed, carry_out, find_unproven
from warmup.service.queue import Request
from warmup.service.settings import Settings, find_devices

POLL_SECONDS = 5.0
"""How long a question for news stays open when there is none."""


@dataclass(frozen=True, slots=True)
class Order:
    """What every host of a fleet gets."""

    plan: ShapePlan
    devices: tuple[str, ...]
    """Empty: every GPU of the host, else its CPU."""
    settings: Settings
    """Paths in it are the host's own."""
    probe: str
    """Name of an object that the first host puts into the store, and the others must find there."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A host before the work."""

    devices: tuple[str, ...]
    probed: bool = True
    """Whether it found in the store what the first host had put there."""
    problem: str = ""
    """Why it cannot take part, with the next step; empty when it can."""


@dataclass(frozen=True, slots=True)
class Result:
    """A host after the work."""

    report: Report | None
    published: frozenset[str] = frozenset()
    """Keys of the plan's targets that the store has for this host's fingerprint now."""
    problem: str = ""
    """Why it could not do the job as a whole, with the next step; empty when it could."""


@dataclass(frozen=True, slots=True)
class News:
    """One line of progress."""

    text: str
    """For people."""
    row: TargetReport | None = None
    """The target that has ended."""
    result: Result | None = None
    """With the last one."""


class HostJob:
    """The job of one host. ``begin`` once, then ask for ``news`` until a result comes."""

    def __init__(self) -> None:
        self._news: list[News] = []
        self._changed = threading.Condition()

    def look(self, order: Order, *, first: bool) -> Ready:
        """Whether this host can do it: its devices, and the store that it must share."""
        forget_thread_count()
        try:
            probed = _probe(order, first=first)
            return Ready(order.devices or find_devices(), probed)
        except CompileCacheError as error:
            return Ready((), problem=str(error))

    def begin(self, order: Order, devices: tuple[str, ...]) -> None:
        """Starts the work; returns at once."""
        forget_thread_count()
        threading.Thread(target=self._work, args=(order, devices), daemon=True).start()

    def news(self, since: int) -> list[News]:
        """What happened after the first ``since`` news; waits a moment for some."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._news) > since, POLL_SECONDS)
            return self._news[since:]

    def prove(
        self, order: Order, devices: tuple[str, ...], report: Report, seconds: float
    ) -> dict[str, str]:
        """Key of every target that a fresh process would compile → what it did there."""
        return find_unproven(order.plan, devices, report, seconds)

    def clear(self, order: Order) -> None:
        """Takes the first host's object out of the store."""
        store = _open(order.settings)
        with suppress(StoreUnavailable):
            store.call("clearing up", lambda: store.storage.delete(order.probe))

    def _work(self, order: Order, devices: tuple[str, ...]) -> None:
        try:
            result = self._carry_out(order, devices)
        except CompileCacheError as error:
            result = Result(None, problem=str(error))
        except BaseException:
            result = Result(None, problem=traceback.format_exc())
        self._tell(News("ended", result=result))

    def _carry_out(self, order: Order, devices: tuple[str, ...]) -> Result:
        cache = CacheDir(order.settings.root)
        cache.prepare()
        settings = order.settings.model_copy(update={"root": cache.root})
        problem = ""
        try:
            report = carry_out(Request(order.plan, devices), settings, Steps(self._tell)).report
        except JobFailed as error:
            report, problem = error.report, str(error)
        keys = {row.key for row in report.targets}
        there = _open(settings).keys(report.fingerprint) if report.fingerprint else frozenset()
        return Result(report, there & keys, problem)

    def _tell(self, news: News) -> None:
        with self._changed:
            self._news.append(news)
            self._changed.notify_all()


class Steps:
    """Progress of the library as news."""

    def __init__(self, tell: Callable[[News], None]) -> None:
        self._tell = tell
        self._count = self._ended = 0

    def begin(self, count: int) -> None:
        """Targets on this host."""
        self._count = count

    def doing(self, phase: str, what: str) -> None:
        """A line."""
        self._tell(News(f"{phase} {what}"))

    def done(self, row: TargetReport) -> None:
        """A line that carries the row."""
        self._ended += 1
        how = f": {row.error}" if row.error else ""
        self._tell(News(f"[{self._ended}/{self._count}] {row.status} {row.target}{how}", row=row))

    def moving(self, phase: str, done: int, total: int) -> None:
        """The worker says it in words."""

    def trouble(self, text: str) -> None:
        """A line."""
        self._tell(News(f"warning: {text}"))


def forget_thread_count() -> None:
    """Takes back the OMP_NUM_THREADS=1 that an engine has set for its own sake in this process.

    What torch generates for a CPU depends on it, so a trainer would not find it. One that the process was
    started with is somebody's choice, and stays.
    """
    try:
        given = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return
    if not any(line.startswith(b"OMP_NUM_THREADS=") for line in given):
        os.environ.pop("OMP_NUM_THREADS", None)


def _open(settings: Settings) -> ArtifactStore:
    return ArtifactStore.open(
        settings.store, sign_key=settings.sign_key, trust_keys=settings.trust_keys or None
    )


def _probe(order: Order, *, first: bool) -> bool:
    """Whether the first host's object is in the store; the first host puts it there."""
    store = _open(order.settings)
    if first:
        store.call("probing", lambda: store.storage.create(order.probe, b"fleet"))
    return store.call("probing", lambda: store.storage.size(order.probe)) is not None
