"""A trainer in threads that starts on what ``warmup pull`` brought; the ``baked`` part of the offline benchmark.

A target on the first device, a drafter on each, no store: from the first step on the process is sealed. Prints
one JSON object last.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from itertools import accumulate, cycle, islice
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from compilecache import ShapePlan, ensure_warm
from compilecache.progress import LineProgress
from compilecache.watch import watching
from compilecache.workload import workload_of_plan
from dflash_model.microbatch import MicroBatch, training_plan
from dflash_model.model import Drafter
from dflash_model.rows import TokenRows
from dflash_model.trainer import Trainer, TrainSettings

KNOWN = 256
"""Different token ids in the rows."""
ROWS = 48
SHORT = 8
"""Tokens by which a row is shorter than the planned length that it is padded to."""


class TableTarget:
    """Hidden states looked up by token."""

    def __init__(self, drafter: Drafter, device: torch.device) -> None:
        self.device = device
        chance = torch.Generator(device).manual_seed(1)
        size = (KNOWN, drafter.config.context_size)
        self._table = torch.randn(size, generator=chance, device=device)
        self._table = self._table.to(drafter.fc.weight.dtype)

    def hidden(self, batch: MicroBatch) -> Tensor:
        """``[B, S, T·H]``."""
        return self._table[batch.input_ids.to(self.device)]


def rows_for(plan: ShapePlan) -> TokenRows:
    """Of every planned length as many."""
    sizes = training_plan(plan).sizes("seq_len")
    starts = tuple(accumulate((n - SHORT for n in islice(cycle(sizes), ROWS)), initial=0))
    chance = torch.Generator().manual_seed(0)
    ids = torch.randint(KNOWN, (starts[-1],), generator=chance, dtype=torch.int32)
    return TokenRows(ids, torch.ones(starts[-1], dtype=torch.bool), starts, {})


def main() -> None:
    """Meets the devices, trains, counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--devices", required=True)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    options = parser.parse_args()
    plan = ShapePlan.load(options.plan)
    workload = workload_of_plan(plan)
    devices = [torch.device(name) for name in options.devices.split(",")]
    drafters = [cast(Drafter, workload.build(device)) for device in devices]
    trainer = Trainer(
        TrainSettings(steps=options.steps),
        plan=plan,
        rows=rows_for(plan),
        drafters=drafters,
        targets=[TableTarget(drafters[0], devices[0])],
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    began = time.perf_counter()
    with (
        watching(options.root) as seen,
        ensure_warm(
            trainer.drafters, plan, store=False, root=options.root, progress=LineProgress()
        ) as warm,
    ):
        seconds = time.perf_counter() - began
        summary = trainer.run(warm)
        answer = {
            "report": warm.report.model_dump(mode="json"),
            "summary": json.loads(summary.json()),
            "refused": warm.refused,
            "launched": seen.launches,
            "seconds": seconds,
        }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
