"""The file behind the queue: SQLite with a write-ahead log, so that a SIGKILL loses nothing that was answered."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from compilecache.errors import PlanError
from compilecache.files import make_private

FORMAT = 1
SCHEMA = """
CREATE TABLE jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    kind TEXT NOT NULL,
    name TEXT NOT NULL,
    workload TEXT NOT NULL,
    request TEXT NOT NULL,
    plan TEXT NOT NULL,
    devices TEXT NOT NULL,
    expected TEXT,
    state TEXT NOT NULL,
    priority INTEGER NOT NULL,
    fingerprint TEXT,
    phase TEXT,
    targets INTEGER NOT NULL,
    ended_targets INTEGER NOT NULL DEFAULT 0,
    failed_targets INTEGER NOT NULL DEFAULT 0,
    spent REAL NOT NULL DEFAULT 0,
    created REAL NOT NULL,
    started REAL,
    ended REAL,
    attempts INTEGER NOT NULL DEFAULT 0,
    gave_up TEXT NOT NULL DEFAULT '[]',
    error TEXT,
    next_step TEXT,
    explanation TEXT
);
CREATE INDEX jobs_queue ON jobs (state, priority DESC, number);
CREATE UNIQUE INDEX jobs_open ON jobs (request) WHERE state IN ('queued', 'running');
CREATE TABLE targets (
    job INTEGER NOT NULL REFERENCES jobs (number) ON DELETE CASCADE,
    position INTEGER NOT NULL,
    key TEXT NOT NULL,
    device TEXT NOT NULL,
    shape TEXT NOT NULL,
    state TEXT NOT NULL DEFAULT 'waiting',
    engine TEXT,
    outcome TEXT,
    seconds REAL,
    again_seconds REAL,
    bytes INTEGER NOT NULL DEFAULT 0,
    published INTEGER NOT NULL DEFAULT 0,
    notes TEXT NOT NULL DEFAULT '[]',
    error TEXT,
    crashes INTEGER NOT NULL DEFAULT 0,
    began REAL,
    ended REAL,
    PRIMARY KEY (job, position)
) WITHOUT ROWID;
CREATE TABLE events (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    job TEXT NOT NULL,
    kind TEXT NOT NULL,
    at REAL NOT NULL,
    data TEXT NOT NULL
);
CREATE INDEX events_of ON events (job, id);
"""
SMALL_CACHE_KB = 2048


class Database:
    """One file, one writer, one reader, each behind a lock of its own. Safe to use from threads."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "jobs.sqlite"
        try:
            make_private(folder)
            self._lock = _sole(folder / "lock")
            self._writer = self._connect()
            self._create()
            self._reader = self._connect()
        except (OSError, sqlite3.Error) as error:
            raise PlanError(
                f"the queue '{self.path}' cannot be opened: {error}",
                next_step="Name another folder with --state, on a local disk",
                field="state",
            ) from error
        self._writing, self._reading = threading.Lock(), threading.Lock()

    def _connect(self) -> sqlite3.Connection:
        made = sqlite3.connect(self.path, check_same_thread=False, isolation_level=None, timeout=30)
        made.row_factory = sqlite3.Row
        for pragma in (
            *("journal_mode = WAL", "synchronous = NORMAL", "foreign_keys = ON"),
            f"cache_size = -{SMALL_CACHE_KB}",
        ):
            made.execute(f"PRAGMA {pragma}")
        return made

    def _create(self) -> None:
        (version,) = self._writer.execute("PRAGMA user_version").fetchone()
        if version == 0:
            self._writer.executescript(f"BEGIN;{SCHEMA}PRAGMA user_version = {FORMAT};COMMIT;")
            self.path.chmod(0o600)
        elif version != FORMAT:
            raise sqlite3.DatabaseError(f"it has format {version}, this version reads {FORMAT}")

    @contextmanager
    def writing(self, committed: Callable[[], None] = lambda: None) -> Iterator[sqlite3.Connection]:
        """One transaction: all of it, or nothing. ``committed`` is called before the next begins."""
        with self._writing:
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield self._writer
            except BaseException:
                self._writer.execute("ROLLBACK")
                raise
            self._writer.execute("COMMIT")
            committed()

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Several reads of one moment."""
        with self._reading:
            self._reader.execute("BEGIN")
            try:
                yield self._reader
            finally:
                self._reader.execute("COMMIT")

    def close(self) -> None:
        """Both connections; what was committed stays."""
        for connection in (self._reader, self._writer):
            connection.close()
        os.close(self._lock)


def _sole(path: Path) -> int:
    """A lock that ends with this process: two services would give back each other's jobs."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise OSError("another service uses it") from error
    return descriptor
