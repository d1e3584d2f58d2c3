"""Trains two replicas of a drafter in two threads of one process, after ensure_warm.

The layout of a speculative-decoding trainer in small: one thread a device (here two on the CPU),
rows of all lengths, padded to planned shapes. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

from compilecache import PlannedCollate, ShapePlan, Warm, ensure_warm
from dflash_model.model import Drafter
from dflash_model.workload import tiny

Row = dict[str, torch.Tensor]


def read_rows(path: Path, count: int, seed: int) -> list[Row]:
    """Rows of random tokens with the lengths of the file; real data would come with hidden states."""
    lengths = [json.loads(line)["length"] for line in path.read_text().splitlines()]
    generator = torch.Generator().manual_seed(seed)
    config = tiny.drafter_config
    rows = []
    for index in range(count):
        length = lengths[(index * 37 + seed) % len(lengths)]
        tokens = torch.randint(0, config.vocab_size - 1, (length,), generator=generator)
        hidden = torch.randn(length, config.context_size, generator=generator)
        rows.append({"input_ids": tokens, "hidden_states": hidden, "loss_mask": torch.ones(length)})
    return rows


def train(
    model: Drafter, warm: Warm, lengths: Path, steps: int, losses: list[float], seed: int
) -> None:
    """What each thread runs: one row a step, as in any trainer."""
    collate = PlannedCollate(warm.plan)
    generator = torch.Generator().manual_seed(seed)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=6e-4)
    model.train()
    for row in read_rows(lengths, steps, seed):
        with warm.step():
            batch = model.prepare(**collate([row]), generator=generator)
            loss = model(**batch)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())


def main() -> None:
    """Warms, trains and reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--lengths", type=Path, required=True)
    parser.add_argument("--store", required=True)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    plan = ShapePlan.load(arguments.plan)
    models = [Drafter.random(tiny.drafter_config, torch.device("cpu"), seed=s, anchors=tiny.anchors)
              for s in (0, 1)]  # fmt: skip
    began = time.perf_counter()
    warm = ensure_warm(models, plan, store=arguments.store, root=arguments.root)
    warm_seconds = time.perf_counter() - began
    losses: list[list[float]] = [[] for _ in models]
    with warm, warm.crew() as crew:
        for seed, model in enumerate(models):
            work = (model, warm, arguments.lengths, arguments.steps, losses[seed], seed)
            crew.start(train, *work, device="cpu", name=f"drafter {seed}")
    print(warm.report.table(), file=sys.stderr)
    json.dump(
        {
            "warm_seconds": warm_seconds,
            "compiles_after_prime": warm.compiles_after_prime,
            "losses": losses,
            "report": warm.report.model_dump(mode="json"),
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()
