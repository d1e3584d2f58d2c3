"""One change of the queue: a transaction, and the events that it makes."""

from __future__ import annotations

import sqlite3
import time

from warmup.service import rows
from warmup.service.jobs import IN_HAND, Event, JobState, TargetState
from warmup.service.problems import Refusal


class Change:
    """One transaction and the events it makes."""

    def __init__(
        self, connection: sqlite3.Connection, events: list[Event], pace: float | None
    ) -> None:
        self.connection = connection
        self._events = events
        self._pace = pace
        self.job_id: str | None = None
        """Of the job that was changed last."""

    def sql(self, query: str, *values: str | int | float | None) -> sqlite3.Cursor:
        return self.connection.execute(query, values)

    def job(self, job_id: str) -> sqlite3.Row:
        return found(self.connection, job_id)

    def by_number(self, number: int) -> sqlite3.Row:
        row: sqlite3.Row = self.sql(
            f"SELECT {rows.LISTED} FROM jobs WHERE number = ?", number
        ).fetchone()
        return row

    # -- jobs -------------------------------------------------------------------------------------

    def set_job(
        self, number: int, *, quiet: bool = False, **values: str | int | float | None
    ) -> None:
        names = ", ".join(f"{name} = ?" for name in values)
        self.sql(f"UPDATE jobs SET {names} WHERE number = ?", *values.values(), number)
        if not quiet:
            self.note_job(number)

    def note_job(self, number: int) -> None:
        row = self.by_number(number)
        self.job_id = row["id"]
        data = rows.job(row, self._pace).model_dump_json()
        self._note(row["id"], "job", data)

    def end(self, number: int, state: JobState) -> None:
        if state == "cancelled":
            self._end_open_targets(number, "cancelled")
        self.set_job(number, state=state, phase=None, ended=time.time())

    def give_back(self, number: int) -> None:
        self.let_go(number)
        self.set_job(number, state="queued", phase=None)

    def reset(self, number: int) -> None:
        """Everything that is not warm waits again; an explanation is made anew."""
        keep = "('restored', 'local', 'rewritten', 'compiled', 'bypass')"
        found = self.sql(
            f"SELECT position FROM targets WHERE job = ? AND state NOT IN {keep}", number
        )
        for row in found.fetchall():
            self.sql(
                "UPDATE targets SET state = 'waiting', error = NULL, notes = '[]', crashes = 0, "
                "began = NULL, ended = NULL WHERE job = ? AND position = ?",
                *(number, row["position"]),
            )
            self._note_target(number, row["position"])
        self.sql(
            "UPDATE jobs SET ended_targets = (SELECT count(*) FROM targets WHERE job = number AND "
            "ended IS NOT NULL), failed_targets = 0, error = NULL, next_step = NULL, gave_up = '[]', "
            "ended = NULL, explanation = NULL WHERE number = ?",
            number,
        )
        self.set_job(number, state="queued", phase=None)

    # -- targets ----------------------------------------------------------------------------------

    def in_hand(self, number: int) -> sqlite3.Row | None:
        marks = ", ".join("?" * len(IN_HAND))
        row: sqlite3.Row | None = self.sql(
            f"SELECT * FROM targets WHERE job = ? AND state IN ({marks}) LIMIT 1", number, *IN_HAND
        ).fetchone()
        return row

    def let_go(self, number: int) -> None:
        """The target in hand waits again."""
        while (row := self.in_hand(number)) is not None:
            self.sql(
                "UPDATE targets SET state = 'waiting', began = NULL WHERE job = ? AND position = ?",
                *(number, row["position"]),
            )
            self._note_target(number, row["position"])

    def hold_target(self, number: int, key: str, state: str) -> None:
        row = self._target(number, key)
        if row is None or row["ended"] is not None:
            return
        self.sql(
            "UPDATE targets SET state = ?, began = coalesce(began, ?) WHERE job = ? AND position = ?",
            *(state, time.time(), number, row["position"]),
        )
        self._note_target(number, row["position"])
        self.set_job(number, quiet=True, phase=f"{state} {row['shape']} on {row['device']}"[:300])

    def end_target(
        self,
        number: int,
        key: str,
        state: TargetState,
        values: dict[str, str | int | float | None],
    ) -> float | None:
        """How long it took since it was begun; None when it had ended before."""
        row = self._target(number, key)
        if row is None or row["ended"] is not None:
            return None
        now = time.time()
        began = row["began"] or now
        values = {**values, "state": state, "began": began, "ended": now}
        names = ", ".join(f"{name} = ?" for name in values)
        self.sql(
            f"UPDATE targets SET {names} WHERE job = ? AND position = ?",
            *(*values.values(), number, row["position"]),
        )
        self.sql(
            "UPDATE jobs SET ended_targets = ended_targets + 1, failed_targets = failed_targets + ?, "
            "spent = spent + ? WHERE number = ?",
            *(int(state == "failed"), now - began, number),
        )
        self._note_target(number, row["position"])
        self.note_job(number)
        return float(now - began)

    def fail_targets(self, number: int, why: str) -> None:
        """Those that have not ended."""
        self._end_open_targets(number, "failed", why)
        self.sql(
            "UPDATE jobs SET failed_targets = (SELECT count(*) FROM targets WHERE job = number AND "
            "state = 'failed') WHERE number = ?",
            number,
        )

    def _end_open_targets(self, number: int, state: TargetState, why: str | None = None) -> None:
        found = self.sql("SELECT position FROM targets WHERE job = ? AND ended IS NULL", number)
        for row in found.fetchall():
            self.sql(
                "UPDATE targets SET state = ?, error = ?, ended = ? WHERE job = ? AND position = ?",
                *(state, why, time.time(), number, row["position"]),
            )
            self._note_target(number, row["position"])
        self.sql(
            "UPDATE jobs SET ended_targets = (SELECT count(*) FROM targets WHERE job = number AND "
            "ended IS NOT NULL) WHERE number = ?",
            number,
        )

    def _target(self, number: int, key: str) -> sqlite3.Row | None:
        row: sqlite3.Row | None = self.sql(
            "SELECT * FROM targets WHERE job = ? AND key = ?", number, key
        ).fetchone()
        return row

    def _note_target(self, number: int, position: int) -> None:
        row = self.sql(
            "SELECT * FROM targets WHERE job = ? AND position = ?", number, position
        ).fetchone()
        self._note(self.by_number(number)["id"], "target", rows.target(row).model_dump_json())

    def _note(self, job_id: str, kind: str, data: str) -> None:
        now = time.time()
        made = self.sql(
            "INSERT INTO events (job, kind, at, data) VALUES (?, ?, ?, ?)",
            *(job_id, kind, now, data),
        )
        assert made.lastrowid is not None
        self._events.append(rows.made(made.lastrowid, job_id, kind, now, data))


def found(sql: sqlite3.Connection, job_id: str, columns: str = rows.LISTED) -> sqlite3.Row:
    row: sqlite3.Row | None = sql.execute(
        f"SELECT {columns} FROM jobs WHERE id = ?", (job_id,)
    ).fetchone()
    if row is None:
        raise Refusal(404, f"there is no job '{job_id}'", next_step="List them: GET /v1/jobs")
    return row


def last_event(sql: sqlite3.Connection) -> int:
    row = sql.execute("SELECT seq FROM sqlite_sequence WHERE name = 'events'").fetchone()
    return int(row["seq"]) if row else 0
