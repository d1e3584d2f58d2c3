"""The queue: what was submitted, what goes next, and what became of it. Every change is an event."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from pydantic import JsonValue

from compilecache.report import TargetReport
from compilecache.shapes import CompileTarget, ShapePlan
from warmup.service import changes, rows
from warmup.service.changes import Change
from warmup.service.database import Database
from warmup.service.jobs import (
    ENDED,
    Event,
    Job,
    JobDetail,
    JobKind,
    JobPage,
    JobState,
    TargetState,
)
from warmup.service.problems import Refusal

KEPT_EVENTS = 100_000
"""Older ones are forgotten; whoever asks for them is told to read the jobs anew."""
SOMETIMES = 256
"""Events between two rounds of forgetting."""
MOST_TROUBLES = 50
RECENT = 50
"""Compiled targets that an estimate for new ones is the mean of."""
MOST_QUEUED = 10_000


@dataclass(frozen=True, slots=True)
class Request:
    """What somebody asks for, checked."""

    plan: ShapePlan
    devices: tuple[str, ...]
    kind: JobKind = "warm"
    name: str = ""
    priority: int = 0
    expected: str | None = None
    """The fingerprint that this host must have; the job fails on another."""

    @property
    def digest(self) -> str:
        """Equal for requests that ask for the same work."""
        asked = {
            "kind": self.kind,
            "plan": self.plan.model_dump(mode="json"),
            "devices": self.devices,
            "expected": self.expected,
        }
        return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()

    @property
    def targets(self) -> tuple[CompileTarget, ...]:
        """Device by device."""
        return self.plan.targets(self.devices)


@dataclass(frozen=True, slots=True)
class Work:
    """A job in the hands of the runner."""

    number: int
    id: str
    kind: JobKind
    plan: ShapePlan
    devices: tuple[str, ...]
    expected: str | None


class Queue:
    """Jobs in a database. ``tell`` hears of every event, after it is safe."""

    def __init__(
        self, database: Database, tell: Callable[[Sequence[Event]], None], *, keep_jobs: int
    ) -> None:
        self._database = database
        self._tell = tell
        self._keep_jobs = keep_jobs
        self._since_forgetting = 0
        self._recent: deque[float] = deque(maxlen=RECENT)
        self.ended: Counter[TargetState] = Counter()
        """How many targets have ended in each state since the start."""

    # -- asking -----------------------------------------------------------------------------------

    def submit(self, request: Request) -> tuple[Job, bool]:
        """The job, and whether it is new; an equal one that is open stands for both."""
        number = 0
        with self._change() as change:
            known = change.sql(
                f"SELECT {rows.LISTED} FROM jobs WHERE request = ? AND state IN ('queued', 'running')",
                request.digest,
            ).fetchone()
            if known is None:
                self._refuse_full(change)
                number = rows.insert(change.connection, request, _new_id())
                change.note_job(number)
            elif request.priority > known["priority"]:
                number = known["number"]
                change.sql(
                    "UPDATE jobs SET priority = ? WHERE number = ?", request.priority, number
                )
                change.note_job(number)
        return self.job(change.job_id or known["id"]), known is None

    def _refuse_full(self, change: Change) -> None:
        (count,) = change.sql("SELECT count(*) FROM jobs WHERE state = 'queued'").fetchone()
        if count >= MOST_QUEUED:
            raise Refusal(
                503, f"{count} jobs are queued already", next_step="Try again when some have ended"
            )

    def cancel(self, job_id: str) -> Job:
        """Ends a job: at once when it is queued, else as soon as its worker has been ended."""
        with self._change() as change:
            job = change.job(job_id)
            if job["state"] in ENDED:
                raise _conflict(job, "has ended already", "Nothing is left to cancel")
            if job["state"] == "queued":
                change.end(job["number"], "cancelled")
            elif job["state"] == "running":
                change.set_job(job["number"], state="cancelling")
        return self.job(job_id)

    def retry(self, job_id: str) -> Job:
        """Queues again what did not get warm of a job that has ended."""
        with self._change() as change:
            job = change.job(job_id)
            if job["state"] not in ENDED:
                raise _conflict(job, f"is {job['state']}", "Cancel it first, or wait for its end")
            twin = change.sql(
                "SELECT id FROM jobs WHERE request = ? AND state IN ('queued', 'running')",
                job["request"],
            ).fetchone()
            if twin is not None:
                raise _conflict(job, f"equals job {twin['id']}, which is open", "Follow that one")
            self._refuse_full(change)
            change.reset(job["number"])
        return self.job(job_id)

    # -- reading ----------------------------------------------------------------------------------

    def job(self, job_id: str) -> Job:
        """Raises Refusal when there is none."""
        with self._database.reading() as sql:
            return rows.job(changes.found(sql, job_id), self.pace)

    def detail(self, job_id: str) -> JobDetail:
        """With its targets. Raises Refusal when there is none."""
        with self._database.reading() as sql:
            row = changes.found(sql, job_id, "*")
            targets = sql.execute(
                "SELECT * FROM targets WHERE job = ? ORDER BY position", (row["number"],)
            )
            return rows.detail(row, targets.fetchall(), self.pace, changes.last_event(sql))

    def page(
        self, *, state: JobState | None = None, before: int | None = None, limit: int = 50
    ) -> JobPage:
        """The newest first."""
        where, values = ["number < ?"], [before if before is not None else 2**62]
        if state is not None:
            where, values = [*where, "state = ?"], [*values, state]  # type: ignore[list-item]
        query = f"SELECT {rows.LISTED} FROM jobs WHERE {' AND '.join(where)} ORDER BY number DESC LIMIT ?"
        with self._database.reading() as sql:
            found = sql.execute(query, (*values, limit + 1)).fetchall()
            last = changes.last_event(sql)
        more = found[limit - 1]["number"] if len(found) > limit else None
        jobs = tuple(rows.job(row, self.pace) for row in found[:limit])
        return JobPage(jobs=jobs, next_before=more, last_event=last)

    def events(self, after: int, job_id: str | None, limit: int) -> list[Event] | None:
        """Those after one, oldest first; None when some of them are forgotten."""
        with self._database.reading() as sql:
            (oldest,) = sql.execute("SELECT min(id) FROM events").fetchone()
            if after + 1 < (oldest or 0) and after < changes.last_event(sql):
                return None
            found = sql.execute(
                f"SELECT * FROM events WHERE id > ? {'AND job = ?' if job_id else ''} "
                "ORDER BY id LIMIT ?",
                (after, *((job_id,) if job_id else ()), limit),
            )
            return [rows.event(row) for row in found]

    def last_event(self) -> int:
        """The newest event's id; 0 before the first."""
        with self._database.reading() as sql:
            return changes.last_event(sql)

    def ids(self) -> set[str]:
        """Of all jobs that are kept."""
        with self._database.reading() as sql:
            return {row["id"] for row in sql.execute("SELECT id FROM jobs")}

    def counts(self) -> dict[str, int]:
        """How many jobs are in each state."""
        with self._database.reading() as sql:
            found = sql.execute("SELECT state, count(*) AS n FROM jobs GROUP BY state")
            return {row["state"]: row["n"] for row in found}

    @property
    def pace(self) -> float | None:
        """Seconds that a target took of late; None before the first."""
        return sum(self._recent) / len(self._recent) if self._recent else None

    # -- working ----------------------------------------------------------------------------------

    def recover(self) -> int:
        """Gives back what a service that died had in hand. Returns how many jobs."""
        with self._change() as change:
            found = change.sql(
                f"SELECT {rows.LISTED} FROM jobs WHERE state IN ('running', 'cancelling')"
            )
            left = found.fetchall()
            for job in left:
                if job["state"] == "cancelling":
                    change.end(job["number"], "cancelled")
                else:
                    change.give_back(job["number"])
        return len(left)

    def take(self) -> Work | None:
        """The next job, running from now on; None when nothing is queued."""
        with self._change() as change:
            row = change.sql(
                "SELECT * FROM jobs WHERE state = 'queued' ORDER BY priority DESC, number LIMIT 1"
            ).fetchone()
            if row is None:
                return None
            now = time.time()
            change.set_job(row["number"], state="running", started=row["started"] or now)
        plan = ShapePlan.parse(json.loads(row["plan"]))
        devices = tuple(json.loads(row["devices"]))
        return Work(row["number"], row["id"], row["kind"], plan, devices, row["expected"])

    def left(self, work: Work) -> tuple[int, ...]:
        """Positions of its targets that have not ended."""
        with self._database.reading() as sql:
            found = sql.execute(
                "SELECT position FROM targets WHERE job = ? AND ended IS NULL ORDER BY position",
                (work.number,),
            )
            return tuple(row["position"] for row in found)

    def is_cancelled(self, work: Work) -> bool:
        """Whether somebody wants it ended."""
        with self._database.reading() as sql:
            row = sql.execute("SELECT state FROM jobs WHERE number = ?", (work.number,)).fetchone()
            return row is None or row["state"] != "running"

    def begin_attempt(self, work: Work) -> None:
        """A worker is about to be started for it."""
        with self._change() as change:
            change.sql("UPDATE jobs SET attempts = attempts + 1 WHERE number = ?", work.number)
            change.set_job(work.number, phase="starting")

    def note_fingerprint(self, work: Work, digest: str, components: Mapping[str, str]) -> None:
        """What the worker found to be this machine's; the digest is kept."""
        with self._change() as change:
            change.set_job(work.number, fingerprint=digest)

    def note_phase(self, work: Work, phase: str, key: str | None, what: str) -> None:
        """What the worker is at; ``key``: the target it concerns."""
        with self._change() as change:
            if key is None:
                change.set_job(work.number, phase=f"{phase} {what}"[:300])
            else:
                change.hold_target(work.number, key, phase)

    def note_row(self, work: Work, row: TargetReport) -> None:
        """How a target ended."""
        bypassed = row.evidence is not None and row.evidence.outcome == "bypass"
        state: TargetState = "bypass" if bypassed and row.status != "failed" else row.status
        with self._change() as change:
            took = change.end_target(work.number, row.key, state, rows.columns(row))
        if took is not None:
            self.ended[state] += 1
        if took is not None and row.status == "compiled":
            self._recent.append(took)

    def note_explanation(self, work: Work, explanation: JsonValue) -> None:
        """What explain found: keeps all of it, and each target's state."""
        with self._change() as change:
            for key, state, columns in rows.findings(explanation):
                change.end_target(work.number, key, state, columns)
            change.set_job(work.number, explanation=json.dumps(explanation))

    def note_trouble(self, work: Work, text: str) -> None:
        """Cache trouble that the worker survived."""
        with self._change() as change:
            known = json.loads(change.by_number(work.number)["gave_up"])
            if len(known) < MOST_TROUBLES:
                change.set_job(work.number, gave_up=json.dumps([*known, text[:1000]]))

    def crashed(self, work: Work, problem: str, *, most: int) -> str | None:
        """A worker died. Fails the target that it had in hand the ``most``-th time; returns its key."""
        with self._change() as change:
            row = change.in_hand(work.number)
            if row is None:
                return None
            change.sql(
                "UPDATE targets SET crashes = crashes + 1 WHERE job = ? AND position = ?",
                *(work.number, row["position"]),
            )
            if row["crashes"] + 1 >= most:
                self.ended["failed"] += 1
                change.end_target(work.number, row["key"], "failed", {"error": problem[:2000]})
            else:
                change.let_go(work.number)
            return str(row["key"])

    def give_back(self, work: Work) -> None:
        """Back to its place in the queue; what has ended stays so."""
        with self._change() as change:
            if change.by_number(work.number)["state"] == "cancelling":
                change.end(work.number, "cancelled")
            else:
                change.give_back(work.number)

    def finish(self, work: Work) -> None:
        """Every target has ended, or nobody wants the rest."""
        with self._change() as change:
            row = change.by_number(work.number)
            state: JobState = "failed" if row["failed_targets"] else "done"
            change.end(work.number, "cancelled" if row["state"] == "cancelling" else state)

    def fail(self, work: Work, problem: str, next_step: str) -> None:
        """The job as a whole cannot be done."""
        with self._change() as change:
            change.fail_targets(work.number, "the job failed before this target came to an end")
            change.set_job(
                work.number, quiet=True, error=problem[:4000], next_step=next_step[:1000]
            )
            cancelled = change.by_number(work.number)["state"] == "cancelling"
            change.end(work.number, "cancelled" if cancelled else "failed")

    # -- changing ---------------------------------------------------------------------------------

    @contextmanager
    def _change(self) -> Iterator[Change]:
        """A transaction; its events are told in the order of their ids, once it is safe."""
        made: list[Event] = []
        with self._database.writing(lambda: self._tell(made)) as sql:
            yield Change(sql, made, self.pace)
        self._since_forgetting += len(made)
        if self._since_forgetting >= SOMETIMES:
            self._since_forgetting = 0
            self._forget()

    def _forget(self) -> None:
        with self._database.writing() as sql:
            sql.execute(
                "DELETE FROM events WHERE id <= ?", (changes.last_event(sql) - KEPT_EVENTS,)
            )
            sql.execute(
                "DELETE FROM jobs WHERE number IN (SELECT number FROM jobs WHERE state IN "
                "('done', 'failed', 'cancelled') ORDER BY number DESC LIMIT 100 OFFSET ?)",
                (self._keep_jobs,),
            )


def _conflict(job: sqlite3.Row, what: str, next_step: str) -> Refusal:
    return Refusal(409, f"job {job['id']} {what}", next_step=next_step)


def _new_id() -> str:
    return uuid.uuid4().hex[:16]
