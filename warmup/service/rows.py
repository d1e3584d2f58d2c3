"""Between rows of the database and what the API shows."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from pydantic import JsonValue

from compilecache.report import TargetReport
from warmup.service.jobs import ENDED, Event, Job, JobDetail, Target, TargetState

if TYPE_CHECKING:
    from warmup.service.queue import Request

_JOB = [
    name
    for name in Job.model_fields
    if name not in ("devices", "gave_up", "estimate_seconds")
]  # fmt: skip
LISTED = ", ".join([*_JOB, "devices", "gave_up", "spent", "request"])
"""Columns of a job without its plan and explanation, which may be large."""
_TARGET = [name for name in Target.model_fields if name not in ("notes", "published")]


def insert(sql: sqlite3.Connection, request: Request, job_id: str) -> int:
    """A new job with its targets, queued. Returns its number."""
    plan, targets = request.plan, request.targets
    made = sql.execute(
        "INSERT INTO jobs (id, kind, name, workload, request, plan, devices, expected, state, "
        "priority, targets, created) VALUES (?, ?, ?, ?, ?, ?, ?, ?, 'queued', ?, ?, ?)",
        (
            *(job_id, request.kind, request.name or plan.workload, plan.workload, request.digest),
            *(plan.model_dump_json(), json.dumps(request.devices), request.expected),
            *(request.priority, len(targets), time.time()),
        ),
    )
    number = made.lastrowid
    assert number is not None
    sql.executemany(
        "INSERT INTO targets (job, position, key, device, shape) VALUES (?, ?, ?, ?, ?)",
        [(number, i, t.key, t.device, str(t.spec)) for i, t in enumerate(targets)],
    )
    return number


def job(row: sqlite3.Row, pace: float | None) -> Job:
    """``pace``: seconds that targets took of late, for an estimate."""
    return Job.model_validate(_job(row, pace))


def _job(row: sqlite3.Row, pace: float | None) -> dict[str, object]:
    return {
        **{name: row[name] for name in _JOB},
        "devices": tuple(json.loads(row["devices"])),
        "gave_up": tuple(json.loads(row["gave_up"])),
        "estimate_seconds": _estimate(row, pace),
    }


def _estimate(row: sqlite3.Row, pace: float | None) -> float | None:
    if row["state"] in ENDED:
        return None
    own = row["spent"] / row["ended_targets"] if row["ended_targets"] and row["spent"] else pace
    return None if own is None else round(own * (row["targets"] - row["ended_targets"]), 1)


def detail(
    row: sqlite3.Row, targets: Sequence[sqlite3.Row], pace: float | None, last_event: int
) -> JobDetail:
    """A job with its targets."""
    return JobDetail.model_validate(
        {
            **_job(row, pace),
            "rows": tuple(map(target, targets)),
            "plan": json.loads(row["plan"]),
            "explanation": json.loads(row["explanation"]) if row["explanation"] else None,
            "last_event": last_event,
        }
    )


def target(row: sqlite3.Row) -> Target:
    """One target."""
    return Target.model_construct(
        **{name: row[name] for name in _TARGET},
        notes=tuple(json.loads(row["notes"])),
        published=bool(row["published"]),
    )


def event(row: sqlite3.Row) -> Event:
    """One event."""
    return made(row["id"], row["job"], row["kind"], row["at"], row["data"])


def made(number: int, job_id: str, kind: str, at: float, data: str) -> Event:
    """An event that was just written."""
    return Event.model_construct(id=number, job=job_id, kind=kind, at=at, data=data)


def columns(row: TargetReport) -> dict[str, str | int | float | None]:
    """What is kept of a row of a report."""
    seen = row.evidence
    return {
        "engine": row.engine,
        "outcome": seen.outcome if seen else None,
        "seconds": seen.seconds if seen else None,
        "again_seconds": seen.again_seconds if seen else None,
        "bytes": row.bytes,
        "published": int(row.published),
        "notes": json.dumps([note[:1000] for note in row.notes[:20]]),
        "error": row.error[:2000] if row.error else None,
    }


def findings(
    explanation: JsonValue,
) -> Iterator[tuple[str, TargetState, dict[str, str | int | float | None]]]:
    """Key, state and what else is known of each target of an explanation."""
    found = cast("Mapping[str, list[dict[str, JsonValue]]]", explanation)
    for row in found["targets"]:
        changed = cast("Mapping[str, list[str]]", row["changed"])
        notes = [f"{name}: {then} → {now}" for name, (then, now) in changed.items()]
        faults = cast("list[str]", row["faults"])
        yield (
            str(row["key"]),
            cast("TargetState", row["state"]),
            {
                "engine": cast("str | None", row["engine"]),
                "notes": json.dumps(notes[:20]),
                "error": "; ".join(faults)[:2000] or None,
            },
        )
