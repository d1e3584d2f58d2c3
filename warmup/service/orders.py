"""What the service and its worker say to each other: one order, then lines of JSON back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, TypeAdapter

from compilecache.gpuprofile import GpuProfile
from compilecache.report import TargetReport
from compilecache.shapes import ShapePlan
from warmup.service.jobs import JobKind


class _Said(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Order(_Said):
    """The first line on a worker's standard input. Later lines say "stop"; the end says "die"."""

    kind: JobKind
    plan: ShapePlan
    devices: tuple[str, ...]
    positions: tuple[int, ...]
    """Which of the plan's targets on these devices are wanted."""
    root: Path | None
    store: str | None
    baked: Path | None
    extra_roots: tuple[str, ...]
    sign_key: Path | None
    trust_keys: tuple[Path, ...]
    lock_timeout: float
    share: bool
    expected: str | None
    """The fingerprint that this machine must have."""
    profile: GpuProfile | None = None
    """Of a GPU that is not there and is compiled for; the worker was started without any in sight."""


class Identified(_Said):
    """The model is built, and its fingerprint known."""

    said: Literal["fingerprint"] = "fingerprint"
    digest: str
    components: dict[str, str] = {}
    """What the digest is over, where artifacts are made."""


class Doing(_Said):
    """A phase starts; ``key`` where it concerns one target."""

    said: Literal["doing"] = "doing"
    phase: str
    key: str | None
    what: str


class Finished(_Said):
    """A target has ended: what it has made is in the root, and in the store."""

    said: Literal["finished"] = "finished"
    row: TargetReport


class Trouble(_Said):
    """Something went wrong and was survived."""

    said: Literal["trouble"] = "trouble"
    text: str


class Explained(_Said):
    """What ``explain`` found."""

    said: Literal["explained"] = "explained"
    explanation: JsonValue


class Failed(_Said):
    """The order as a whole cannot be carried out."""

    said: Literal["failed"] = "failed"
    problem: str
    next_step: str


class Ended(_Said):
    """The last line of a worker that came to its end; ``stopped``: because it was asked to."""

    said: Literal["ended"] = "ended"
    stopped: bool


Said = Identified | Doing | Finished | Trouble | Explained | Failed | Ended

SAID: TypeAdapter[Said] = TypeAdapter(Annotated[Said, Field(discriminator="said")])
"""Reads one line of a worker."""

STOP = b"stop\n"
