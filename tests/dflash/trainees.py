"""What the tests of the trainer train with: a target that is a table, rows, and threads that fail."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from compilecache.shapes import ShapePlan, plan_of
from dflash_model.config import DrafterConfig
from dflash_model.metrics import Summary
from dflash_model.microbatch import MicroBatch
from dflash_model.model import Drafter
from dflash_model.rows import TokenRows
from dflash_model.trainer import Trainer, TrainSettings
from dflash_model.workload import DFlashWorkload

CPU = torch.device("cpu")
ANCHORS = 6


class TableTarget:
    """Hidden states looked up by token: a target without a model."""

    def __init__(self, config: DrafterConfig, pause: Callable[[], float] = lambda: 0.0) -> None:
        generator = torch.Generator().manual_seed(1)
        self._table = torch.randn(config.vocab_size, config.context_size, generator=generator)
        self._pause = pause
        self.made: list[int] = []
        """Numbers of the micro-batches."""

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return CPU

    def hidden(self, batch: MicroBatch) -> Tensor:
        """``[B, S, T·H]``, after a pause."""
        time.sleep(self._pause())
        self.made.append(batch.number)
        return self._table[batch.input_ids]


def plan_for(config: DrafterConfig, *lengths: int, batch: int = 1) -> ShapePlan:
    """A plan of training shapes."""
    workload = DFlashWorkload(config, anchors=ANCHORS)
    return plan_of(workload.specs(lengths, batch_sizes=[batch], phases=["train"]))


def rows_of(*lengths: int, vocab_size: int = 64) -> TokenRows:
    """Rows of random tokens with loss everywhere."""
    generator = torch.Generator().manual_seed(len(lengths))
    total = sum(lengths)
    ids = torch.randint(vocab_size, (total,), generator=generator, dtype=torch.int32)
    starts = tuple(sum(lengths[:index]) for index in range(len(lengths) + 1))
    return TokenRows(ids, torch.ones(total, dtype=torch.bool), starts, {})


def jittery(seed: int) -> Callable[[], float]:
    """Pauses of up to 20 ms."""
    chance = random.Random(seed)
    return lambda: chance.random() / 50


@dataclass(frozen=True)
class Trained:
    """A run that ended well."""

    summary: Summary
    drafters: list[Drafter]
    log: list[str]
    """Its lines for people."""


def train(
    config: DrafterConfig,
    *,
    drafters: int = 2,
    targets: list[TableTarget] | None = None,
    rows: TokenRows | None = None,
    settings: TrainSettings | None = None,
    spoil: Callable[[list[Drafter]], None] = lambda drafters: None,
) -> Trained:
    """A run on the CPU; replicas come with different weights, and ``spoil`` may change them."""
    made = [Drafter.random(config, CPU, seed=seed, anchors=ANCHORS) for seed in range(drafters)]
    said: list[str] = []
    trainer = Trainer(
        settings or TrainSettings(steps=6),
        plan=plan_for(config, 32, 64),
        rows=rows or rows_of(*range(20, 60, 3)),
        drafters=made,
        targets=targets or [TableTarget(config)],
        say=said.append,
    )
    spoil(made)
    return Trained(trainer.run(), made, said)


def log_of(path: Path) -> list[dict[str, float]]:
    """A run's log without what the clock decides."""
    import json

    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: line[name] for name in line if name != "seconds"} for line in lines]
