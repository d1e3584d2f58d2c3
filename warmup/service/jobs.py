"""The words of the service: jobs, their targets and events, as the API and the page show them."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, JsonValue

JobKind = Literal["warm", "explain"]
"""warm: make every target warm. explain: say of each where a start would take it from; compiles nothing."""

JobState = Literal["queued", "running", "cancelling", "done", "failed", "cancelled"]
"""done: every target is warm (or was explained). failed: at least one is not."""

ENDED: tuple[JobState, ...] = ("done", "failed", "cancelled")
OPEN: tuple[JobState, ...] = ("queued", "running")
"""An equal request gets such a job instead of one of its own."""

TargetState = Literal[
    "waiting",
    "compiling",
    "priming",
    "publishing",
    "restored",
    "local",
    "rewritten",
    "compiled",
    "bypass",
    "failed",
    "cancelled",
    "in image",
    "in store",
    "by rewriting",
    "damaged",
    "missing",
]
"""waiting, then compiling, priming or publishing; then how the report says it ended. bypass: compiled,
and torch will compile it again on every start. The last five only in jobs of the kind explain."""

IN_HAND: tuple[TargetState, ...] = ("compiling", "priming", "publishing")
WARM: tuple[TargetState, ...] = ("restored", "local", "rewritten", "compiled")


class _Shown(BaseModel):
    model_config = ConfigDict(frozen=True)


class Target(_Shown):
    """One target of a job."""

    position: int
    """Its place in the plan, device by device."""
    key: str
    """Its name within the fingerprint."""
    device: str
    shape: str
    """The spec in words."""
    state: TargetState
    engine: str | None = None
    """By which engine it went."""
    outcome: str | None = None
    """What torch's cache did: hit, miss, bypass, live."""
    seconds: float | None = None
    """First run, wall clock."""
    again_seconds: float | None = None
    """Second run."""
    bytes: int = 0
    """Size of its files."""
    published: bool = False
    """Whether its artifact went to the store in this job."""
    notes: tuple[str, ...] = ()
    error: str | None = None
    began: float | None = None
    """When it was begun, seconds since the epoch."""
    ended: float | None = None


class Job(_Shown):
    """One submitted plan."""

    id: str
    number: int
    """Counts up in the order of submission."""
    kind: JobKind
    name: str
    """What who submitted it called it; else the workload."""
    workload: str
    devices: tuple[str, ...]
    state: JobState
    priority: int
    """Higher goes first."""
    fingerprint: str | None = None
    """Known once the worker has built the model."""
    phase: str | None = None
    """What the worker is at, in words; None when it is not running."""
    targets: int
    """How many there are."""
    ended_targets: int
    failed_targets: int
    created: float
    """Seconds since the epoch, as the next two."""
    started: float | None = None
    ended: float | None = None
    attempts: int = 0
    """How often a worker was started for it."""
    estimate_seconds: float | None = None
    """About how long it will still take once it runs; None while nobody can tell."""
    gave_up: tuple[str, ...] = ()
    """Cache trouble that was survived, in words."""
    error: str | None = None
    """Why it failed, when that is more than its targets say."""
    next_step: str | None = None


class JobDetail(Job):
    """A job with its targets."""

    rows: tuple[Target, ...]
    """By position."""
    plan: JsonValue
    """The plan as it was submitted."""
    explanation: JsonValue = None
    """Of a job of the kind explain: what ``compilecache explain --json`` prints."""
    last_event: int
    """Read events after this one to keep it current."""


class JobPage(_Shown):
    """Some of the jobs."""

    jobs: tuple[Job, ...]
    next_before: int | None = None
    """Give it as ``before`` for the next page; None on the last."""
    last_event: int
    """Read events after this one to keep them current."""


class Event(_Shown):
    """Something that changed."""

    id: int
    """Counts up over all jobs; never given twice."""
    job: str
    kind: Literal["job", "target"]
    at: float
    """Seconds since the epoch."""
    data: str
    """The whole Job or Target as it is now, as JSON."""

    def as_sse(self) -> bytes:
        """As it goes over the wire; JSON has no line breaks."""
        body = (
            f'{{"id":{self.id},"job_id":"{self.job}","at":{self.at:.3f},"{self.kind}":{self.data}}}'
        )
        return f"id: {self.id}\nevent: {self.kind}\ndata: {body}\n\n".encode()
