"""Shards: which part of a plan one of several equal jobs takes.

A shard takes whole specs, on all devices: a program that is compiled on one GPU serves the others of its
host. Where jobs share a store they are safe without: claims keep two of them from compiling one target.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from compilecache import PlanError, ShapePlan

ENVIRONMENTS = (
    ("JOB_COMPLETION_INDEX", "", ""),
    ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_MIN"),
    ("RANK", "WORLD_SIZE", ""),
)
"""Variables with a job's place, the number of jobs, and the place of the first, where there is one."""

_NEXT_STEP = "Write --shard I/N with I from 1 to N, auto, or auto/N"


@dataclass(frozen=True, slots=True)
class Shard:
    """One of several equal jobs."""

    place: int
    """From 0."""
    count: int
    """How many there are."""

    def __str__(self) -> str:
        return f"{self.place + 1}/{self.count}"

    def share(self, plan: ShapePlan) -> ShapePlan | None:
        """The plan of its own specs; None when there are more shards than specs."""
        mine = plan.specs[self.place :: self.count]
        return plan.model_copy(update={"specs": mine}) if mine else None


def parse_shard(text: str, environment: Mapping[str, str]) -> Shard:
    """``I/N`` from 1; ``auto`` and ``auto/N`` take the place, and N where it is known, from the scheduler.

    Raises PlanError.
    """
    match = re.fullmatch(r"(\d+|auto)(?:/(\d+))?", text)
    if match is None or (match[1] != "auto" and match[2] is None):
        raise PlanError(f"'{text}' is no shard", next_step=_NEXT_STEP, field="shard")
    count = int(match[2]) if match[2] else None
    if match[1] != "auto":
        return _checked(text, int(match[1]) - 1, count)
    place, known = _from_scheduler(environment)
    return _checked(text, place, count or known)


def _from_scheduler(environment: Mapping[str, str]) -> tuple[int, int | None]:
    for place, count, first in ENVIRONMENTS:
        if place not in environment:
            continue
        try:
            number = int(environment[place]) - int(environment.get(first, 0) if first else 0)
            known = int(environment[count]) if count in environment else None
        except ValueError as error:
            raise PlanError(
                f"variables of a scheduler beside {place} are no numbers: {error}",
                next_step="Name the shard: --shard I/N",
                field="shard",
            ) from error
        return number, known
    names = ", ".join(place for place, _, _ in ENVIRONMENTS)
    raise PlanError(
        f"no scheduler says which shard this is: none of {names} is set",
        next_step="Name the shard: --shard I/N",
        field="shard",
    )


def _checked(text: str, place: int, count: int | None) -> Shard:
    if count is None:
        raise PlanError(
            f"'{text}' does not say how many shards there are, and no variable does",
            next_step="Write --shard auto/N with the number of completions of the job",
            field="shard",
        )
    if not 0 <= place < count:
        raise PlanError(
            f"shard {place + 1} of {count} does not exist", next_step=_NEXT_STEP, field="shard"
        )
    return Shard(place, count)
