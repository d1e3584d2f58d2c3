"""A fresh process of the GPU tests: warms the tiny drafter, trains it in threads, says what it saw."""

from __future__ import annotations

import json
import sys

import torch

from compilecache import ShapePlan, Warm, WorkerFailed, ensure_warm
from dflash_model.model import Drafter
from dflash_model.workload import tiny


def train(warm: Warm, model: Drafter, device: str, lengths: list[int], losses: list[float]) -> None:
    """Two steps of every length in the thread's own device."""
    generator = torch.Generator(device).manual_seed(5)
    config = model.config
    model.train()
    for length in lengths * 2:
        tokens = torch.randint(0, 500, (1, length), generator=generator, device=device)
        hidden = torch.randn(1, length, config.context_size, generator=generator, device=device).to(
            model.fc.weight.dtype
        )
        with warm.step():
            batch = model.prepare(
                tokens, hidden, torch.ones(1, length, device=device), generator=generator
            )
            loss = model(**batch)
            loss.backward()
        losses.append(loss.item())
        model.zero_grad(set_to_none=True)


def main() -> None:
    """Arguments: plan, store, root, devices."""
    plan_file, store, root, devices = sys.argv[1:5]
    plan = ShapePlan.load(plan_file)
    names = devices.split(",")
    models = [
        Drafter.random(tiny.drafter_config, torch.device(name), seed=1, anchors=tiny.anchors)
        for name in names
    ]
    before = [torch.cuda.get_rng_state(name).sum().item() for name in names]
    weights = [m.fc.weight.detach().double().sum().item() for m in models]
    warm = ensure_warm(models, plan, store=store, root=root)
    unchanged = before == [torch.cuda.get_rng_state(name).sum().item() for name in names]
    unchanged &= weights == [m.fc.weight.detach().double().sum().item() for m in models]
    unchanged &= all(p.grad is None for m in models for p in m.parameters())
    losses: list[list[float]] = [[] for _ in names]
    errors: list[str] = []

    try:
        with warm, warm.crew() as crew:
            for number, name in enumerate(names):
                crew.start(
                    train, warm, models[number], name, list(plan.sizes()), losses[number],
                    device=name,
                )  # fmt: skip
    except WorkerFailed as error:
        errors.append(repr(error))
    print(
        json.dumps(
            {
                "report": warm.report.model_dump(mode="json"),
                "compiles_after_prime": warm.compiles_after_prime,
                "unchanged": unchanged,
                "losses": losses,
                "errors": errors,
            }
        )
    )


if __name__ == "__main__":
    main()
