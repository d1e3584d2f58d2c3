"""A fresh process of the GPU tests: the trainer with a target on the first GPU, a drafter on each.

Prints one JSON object.
"""

from __future__ import annotations

import json
import sys

import torch
from torch import Tensor

from compilecache import ensure_warm
from compilecache.shapes import plan_of
from dflash_model.microbatch import MicroBatch
from dflash_model.rows import TokenRows
from dflash_model.trainer import Trainer, TrainSettings
from dflash_model.workload import tiny


class TableTarget:
    """Hidden states looked up by token, on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        generator = torch.Generator(device).manual_seed(1)
        config = tiny.drafter_config
        self._table = torch.randn(
            config.vocab_size, config.context_size, generator=generator, device=device
        )

    def hidden(self, batch: MicroBatch) -> Tensor:
        """``[B, S, T·H]``."""
        return self._table[batch.input_ids.to(self.device)]


def main() -> None:
    """Arguments: devices, folder."""
    devices, folder = sys.argv[1].split(","), sys.argv[2]
    starts = tuple(range(0, 200 * 41, 200))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(500, (starts[-1],), generator=generator, dtype=torch.int32)
    drafters = [tiny.build(torch.device(device)) for device in devices]
    plan = plan_of(tiny.specs([256], batch_sizes=[1], phases=["train"]))
    trainer = Trainer(
        TrainSettings(steps=15),
        plan=plan,
        rows=TokenRows(ids, torch.ones(starts[-1], dtype=torch.bool), starts, {}),
        drafters=drafters,
        targets=[TableTarget(torch.device(devices[0]))],
    )
    with ensure_warm(trainer.drafters, plan, store=False, root=folder) as warm:
        summary = trainer.run(warm)
    first = [p.detach().cpu() for p in drafters[0].parameters()]
    equal = all(
        torch.equal(p.detach().cpu(), mine)
        for other in drafters[1:]
        for p, mine in zip(other.parameters(), first, strict=True)
    )
    print(json.dumps({**json.loads(summary.json()), "equal": equal}))


if __name__ == "__main__":
    main()
