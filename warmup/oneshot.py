"""A plan as one job that is watched: a worker of its own, deadlines, and a report whatever happens.

It is the service's queue and runner with a single job in it, in a folder that is gone afterwards.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from compilecache import CompileCacheError
from compilecache.fingerprint import Fingerprint
from compilecache.gpuprofile import GpuProfile
from compilecache.progress import Progress
from compilecache.report import Report, Status, TargetReport
from compilecache.shapes import ShapePlan
from warmup.service.database import Database
from warmup.service.jobs import ENDED, Event, JobDetail, Target
from warmup.service.queue import Queue, Request, Work
from warmup.service.runner import WORKER, Runner, last_words
from warmup.service.settings import Settings

LOOK_SECONDS = 0.1
FOREVER = 10 * 365 * 86400.0


class JobFailed(CompileCacheError):
    """The job as a whole could not be done; ``report`` says what it came to before that."""

    def __init__(self, problem: str, report: Report, *, next_step: str) -> None:
        self.report = report
        super().__init__(problem, next_step=next_step)


@dataclass(frozen=True, slots=True)
class Carried:
    """What a job came to."""

    report: Report
    mark: Fingerprint | None
    """What its artifacts are kept under; None when no worker said."""


class Watched(Queue):
    """A queue that tells somebody what its worker is at, and keeps the rows as they come."""

    def __init__(self, database: Database, progress: Progress) -> None:
        super().__init__(database, _nobody, keep_jobs=1)
        self._progress = progress
        self.rows: dict[str, TargetReport] = {}
        self.mark: Fingerprint | None = None

    def note_fingerprint(self, work: Work, digest: str, components: Mapping[str, str]) -> None:
        """The same, and keeps what it is over."""
        super().note_fingerprint(work, digest, components)
        self.mark = Fingerprint(components) if components else None

    def note_phase(self, work: Work, phase: str, key: str | None, what: str) -> None:
        """The library's own progress."""
        super().note_phase(work, phase, key, what)
        self._progress.doing(phase, what)

    def note_row(self, work: Work, row: TargetReport) -> None:
        """The same."""
        super().note_row(work, row)
        self.rows[row.key] = row
        self._progress.done(row)

    def note_trouble(self, work: Work, text: str) -> None:
        """The same."""
        super().note_trouble(work, text)
        self._progress.trouble(text)

    def crashed(self, work: Work, problem: str, *, most: int) -> str | None:
        """A worker that was ended, or died, is trouble."""
        key = super().crashed(work, problem, most=most)
        self._progress.trouble(problem)
        return key


def carry_out(
    request: Request,
    settings: Settings,
    progress: Progress,
    *,
    command: Sequence[str] = WORKER,
    profile: GpuProfile | None = None,
) -> Carried:
    """Warms the plan in workers that are ended at their deadlines; every target has a row.

    ``profile``: of a GPU that is not there, for which they compile. Raises JobFailed, which has the report, for what is more than its targets say, and for Ctrl-C. What has
    ended is in the root and in the store: the next run goes on there.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="warmup-") as name:
        settings = settings.model_copy(update={"state": Path(name)})
        queue = Watched(Database(Path(name)), progress)
        job, _ = queue.submit(request)
        progress.begin(job.targets)
        runner = Runner(queue, settings, command=command, profile=profile)
        runner.start()
        interrupted = False
        try:
            while runner.alive and queue.job(job.id).state not in ENDED:
                time.sleep(LOOK_SECONDS)
        except KeyboardInterrupt:
            interrupted = True
            progress.trouble("ending: the target in hand gets its time of grace")
        finally:
            runner.stop()
        detail = queue.detail(job.id)
        report = _report(request, settings, detail, queue.rows, time.monotonic() - began)
        if interrupted:
            step = "Run the same command again: it goes on there"
            raise JobFailed("it was interrupted; what is finished is kept", report, next_step=step)
        if detail.error or detail.state != "done":
            _relay(Path(name) / "logs" / f"{job.id}.log", progress)
        if detail.error:
            step = detail.next_step or ""
            step = "See what its worker printed, above" if name in step else step
            raise JobFailed(detail.error, report, next_step=step)
        return Carried(report, queue.mark)


def find_unproven(
    plan: ShapePlan, places: Sequence[str], report: Report, seconds: float = FOREVER
) -> dict[str, str]:
    """Key of every target of the report's root that a fresh process would not find warm → what it did there."""
    from compilecache.proof import prove

    done = {row.key: row for row in report.targets if row.status != "failed"}
    if not done or seconds < 1:
        return dict.fromkeys(done, "there was no time left to prove it")
    try:
        limit = None if seconds > FOREVER / 2 else seconds
        proof = prove(plan, places, Path(report.root), timeout=limit)
    except CompileCacheError as error:
        return dict.fromkeys(done, str(error))
    rows = {row.target.key: row for row in proof.rows}
    return {key: rows[key].seen for key in done if key in rows and not rows[key].warm}


def _nobody(events: Sequence[Event]) -> None:
    """Hears of events."""


def _relay(log_file: Path, progress: Progress) -> None:
    """The end of what the workers printed: the folder will be gone."""
    progress.trouble(f"the worker's last words:\n{last_words(log_file)}")


def _report(
    request: Request,
    settings: Settings,
    detail: JobDetail,
    rows: dict[str, TargetReport],
    seconds: float,
) -> Report:
    return Report(
        fingerprint=detail.fingerprint or "",
        engine=request.plan.engine,
        root=str(settings.root),
        store=settings.store,
        targets=tuple(rows.get(row.key) or _unfinished(row) for row in detail.rows),
        gave_up=detail.gave_up,
        seconds=seconds,
    )


def _unfinished(row: Target) -> TargetReport:
    """Of a target whose worker was ended, or that never had its turn."""
    status: Status = "failed"
    return TargetReport(
        key=row.key,
        target=f"{row.shape} on {row.device}",
        device=row.device,
        status=status,
        error=row.error or f"it was {row.state} when the job ended",
    )
