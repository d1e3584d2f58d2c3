"""A trainer in threads of one process: targets make hidden states, drafters learn from them.

Every target and every drafter has a thread and a device of its own. Micro-batch ``i`` is made by
target ``i mod T`` and goes to drafter ``i mod D`` through a bounded inbox; after each backward the
gradients of all drafters are averaged, so the replicas stay equal. Nothing depends on which thread
is faster: the same seed gives the same losses on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from compilecache import Crew
from compilecache.errors import CompileCacheError, PlanError
from compilecache.shapes import ShapePlan
from dflash_model.handover import Averaging, Inbox
from dflash_model.metrics import UNSTEADY_STEPS, Meter, Say, StepLog, Summary, spread
from dflash_model.microbatch import MicroBatches, training_plan
from dflash_model.model import Drafter
from dflash_model.optimizer import Optimizer, Schedule
from dflash_model.resume import (
    RunIdentity,
    check_free,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from dflash_model.rows import TokenRows
from dflash_model.target import Target
from dflash_model.workers import Course, DrafterWorker, TargetWorker

if TYPE_CHECKING:
    from compilecache import Warm


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """How to train."""

    steps: int | None = None
    """Optimizer steps of the whole run; None for one pass over the data."""
    batch_size: int = 1
    """Rows of a micro-batch; every drafter takes one micro-batch a step."""
    lr: float = 6e-4
    """Peak learning rate."""
    warmup_ratio: float = 0.04
    """Share of the steps in which the learning rate rises."""
    clip: float = 1.0
    """Largest norm of the averaged gradient."""
    seed: int = 0
    """Of data order and anchors."""
    queue_size: int = 2
    """Micro-batches that may wait for each drafter."""
    save: Path | None = None
    """Folder for checkpoints; None writes none."""
    save_every: int | None = None
    """Steps between two checkpoints; None writes one at the end only."""
    resume: Path | None = None
    """A checkpoint, or a folder of them whose newest is taken."""
    log: Path | None = None
    """JSONL file with one object a step."""


class Trainer:
    """Trains replicas of one drafter on what targets make of rows."""

    def __init__(
        self,
        settings: TrainSettings,
        *,
        plan: ShapePlan,
        rows: TokenRows,
        drafters: Sequence[Drafter],
        targets: Sequence[Target],
        say: Say = lambda line: None,
    ) -> None:
        """All replicas take the weights of the first, or those of the checkpoint to resume.

        Raises PlanError for rows, shapes and settings that cannot be used together, CheckpointError
        for a checkpoint that cannot be resumed or would be overwritten.
        """
        self._settings = settings
        self._batches = MicroBatches(
            rows,
            plan,
            batch_size=settings.batch_size,
            drafters=len(drafters),
            seed=settings.seed,
        )
        self._rows = rows
        self.drafters = list(drafters)
        """The replicas, for ``ensure_warm``."""
        self._targets = list(targets)
        self._say = say
        self._steps = settings.steps or self._batches.steps_in_a_pass
        self._identity = self._identify(plan)
        self._schedule = Schedule(settings.lr, self._steps, settings.warmup_ratio)
        _equalize(self.drafters)
        self._optimizers = [Optimizer(d, self._schedule, settings.clip) for d in self.drafters]
        self._done = self._resume()
        if settings.save is not None:
            check_free(settings.save, self._done)

    def run(self, warm: Warm | None = None) -> Summary:
        """Trains to the last step. Raises WorkerFailed, caused by what a thread raised.

        ``warm`` is what ``ensure_warm(trainer.drafters, plan)`` gave; without one the drafters run as
        they are. To be called once.
        """
        self._announce()
        with StepLog(self._settings.log, self._done) as log:
            meter = Meter(self._steps, self._say, log)
            with Crew() if warm is None else warm.crew() as crew:
                workers = self._workers(crew, warm)
                scribe = _Scribe(self, workers, meter)
                meter.begin()
                self._start(crew, workers, scribe, warm)
        return self._summarize(scribe, warm)

    def _workers(self, crew: Crew, warm: Warm | None) -> _Workers:
        count, settings = len(self.drafters), self._settings
        course = Course(
            self._batches, self._done + 1, self._steps, len(self._targets), count, settings.seed
        )
        first = self._done * count
        inboxes = [
            Inbox(settings.queue_size, crew, first=first + place, stride=count)
            for place in range(count)
        ]
        averaging = Averaging([list(o.trained.values()) for o in self._optimizers], crew)
        return _Workers(
            [
                TargetWorker(place, target, course, self.drafters, inboxes, crew)
                for place, target in enumerate(self._targets)
            ],
            [
                DrafterWorker(place, *own, averaging, course, warm=warm)
                for place, own in enumerate(
                    zip(self.drafters, self._optimizers, inboxes, strict=True)
                )
            ],
        )

    def _start(self, crew: Crew, workers: _Workers, scribe: _Scribe, warm: Warm | None) -> None:
        for target in workers.targets:
            crew.start(target.run, name=f"target {target.place}")
        for place, drafter in enumerate(workers.drafters):
            after = scribe.after if place == 0 else None
            device = None if warm is None else str(drafter.device)
            crew.start(drafter.run, after, name=f"drafter {place}", device=device)

    def _identify(self, plan: ShapePlan) -> RunIdentity:
        settings = self._settings
        return RunIdentity(
            seed=settings.seed,
            drafters=len(self.drafters),
            batch_size=settings.batch_size,
            anchors=self.drafters[0].anchors,
            seq_lens=training_plan(plan).sizes("seq_len"),
            data=self._rows.digest,
            steps=self._steps,
            lr=settings.lr,
            warmup_ratio=settings.warmup_ratio,
            clip=settings.clip,
        )

    def _resume(self) -> int:
        """Steps that are already done."""
        if self._settings.resume is None:
            return 0
        found = find_checkpoint(self._settings.resume)
        load_checkpoint(found, self.drafters, self._optimizers, self._identity)
        if found.step >= self._steps:
            raise PlanError(
                f"checkpoint '{found.folder}' is the end of its run",
                next_step="Start a new run, or resume from an earlier step-… folder",
                field="resume",
            )
        return found.step

    def _announce(self) -> None:
        rows, left_over = self._rows, self._batches.left_over
        dropped = [f"{count} dropped ({why})" for why, count in sorted(rows.dropped.items())]
        cut = [f"{rows.truncated} truncated"] if rows.truncated else []
        self._say(", ".join([f"{len(rows)} rows to train on", *dropped, *cut]))
        if left_over:
            self._say(f"{left_over} rows of each pass do not fill a step and are left out")
        if self._done:
            self._say(f"going on after step {self._done}")

    def saves_after(self, step: int) -> bool:
        """Whether a checkpoint follows this step."""
        if self._settings.save is None:
            return False
        every = self._settings.save_every
        return step == self._steps or (every is not None and step % every == 0)

    def save(self, step: int) -> Path:
        """Writes the checkpoint of a step, as the first drafter's thread may do after it."""
        assert self._settings.save is not None
        self._say(f"saving step {step}")
        return save_checkpoint(
            self._settings.save, step, self.drafters[0], self._optimizers[0], self._identity
        )

    def _summarize(self, scribe: _Scribe, warm: Warm | None) -> Summary:
        meter, drafters = scribe.meter, scribe.workers.drafters
        spreads = [found for own in drafters if (found := spread(own.peaks)) is not None]
        return Summary(
            steps=len(meter.done),
            last_step=meter.done[-1].step,
            tokens=meter.tokens,
            seconds=meter.seconds,
            tokens_per_second=meter.tokens_per_second() or 0.0,
            steady_tokens_per_second=meter.tokens_per_second(UNSTEADY_STEPS),
            first_loss=meter.done[0].loss,
            last_loss=meter.done[-1].loss,
            compiles_after_prime=None if warm is None else warm.compiles_after_prime,
            memory_peak=scribe.workers.memory_peak(),
            memory_spread=max(spreads, default=None),
            dropped={**self._rows.dropped, "left_over": self._batches.left_over},
            truncated=self._rows.truncated,
            checkpoint=None if scribe.saved is None else str(scribe.saved),
        )


@dataclass(frozen=True, slots=True)
class _Workers:
    targets: list[TargetWorker]
    drafters: list[DrafterWorker]

    def memory_peak(self) -> dict[str, int]:
        """Most bytes that torch held on each GPU."""
        held = [(own.target.device, 0) for own in self.targets]
        held += [(own.device, max(own.peaks, default=0)) for own in self.drafters]
        peaks: dict[str, int] = {}
        for device, peak in held:
            if device.type == "cuda":
                now = torch.cuda.max_memory_allocated(device)
                peaks[str(device)] = max(peaks.get(str(device), 0), peak, now)
        return peaks


class _Scribe:
    """Logs and saves after each step, in the thread of the first drafter."""

    def __init__(self, trainer: Trainer, workers: _Workers, meter: Meter) -> None:
        self._trainer = trainer
        self.workers = workers
        self.meter = meter
        self.saved: Path | None = None
        """The last checkpoint written."""

    def after(self, step: int, norm: Tensor) -> None:
        """Raises CompileCacheError when loss or gradient is not finite: nothing is saved then."""
        told = [own.told.pop(step) for own in self.workers.drafters]
        loss = sum(one.loss.item() for one in told) / len(told)
        if not (math.isfinite(loss) and math.isfinite(norm.item())):
            raise CompileCacheError(
                f"step {step} has the loss {loss} and a gradient of norm {norm.item()}",
                next_step="Go on from the last checkpoint with a smaller --lr, or mend the data",
            )
        peaks = self.workers.drafters[0].peaks
        self.meter.add(
            step,
            loss=loss,
            lr=self._trainer._schedule.rate(step),
            tokens=sum(one.tokens for one in told),
            grad_norm=norm.item(),
            memory=peaks[-1] if peaks else 0,
        )
        if self._trainer.saves_after(step):
            self.saved = self._trainer.save(step)


def _equalize(drafters: Sequence[Drafter]) -> None:
    """Gives every replica the weights of the first."""
    with torch.no_grad():
        for other in drafters[1:]:
            for mine, first in zip(other.parameters(), drafters[0].parameters(), strict=True):
                mine.copy_(first)
