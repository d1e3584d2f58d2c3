"""What fresh processes do in these tests: make a model warm, then train with it and say what they saw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import workloads
from torch import nn

from compilecache import torch_names
from compilecache.ensure import ensure_warm
from compilecache.report import Report
from compilecache.shapes import ShapePlan
from compilecache.torch_names import Counts


@dataclass(frozen=True)
class Trained:
    """What one process saw."""

    report: Report
    """Of its warm-up."""
    losses: list[float]
    """One for each step."""
    gradients: list[list[torch.Tensor]]
    """Of every parameter, for each step."""
    later: Counts
    """What torch counted after the warm-up."""


def model_of(name: str) -> nn.Module:
    """A model of these tests, the same numbers in it every time."""
    torch.manual_seed(0)
    model: nn.Module = getattr(workloads, name)()
    return model


def inputs_of(count: int) -> torch.Tensor:
    """[count, 8], the same numbers every time."""
    return torch.arange(count * 8, dtype=torch.float32).reshape(count, 8) / 10


def train(model: nn.Module, counts: Sequence[int], report: Report) -> Trained:
    """One step for each number of rows, gradients not accumulated."""
    before, losses, gradients = torch_names.counts(), [], []
    model.train()
    for count in counts:
        loss = model(inputs_of(count)).sum()
        loss.backward()
        losses.append(loss.item())
        gradients.append([parameter.grad for parameter in model.parameters()])
        model.zero_grad(set_to_none=True)
    return Trained(report, losses, gradients, torch_names.counts().since(before))


def warm_and_train(
    shapes: ShapePlan | Path,
    root: Path,
    store: object,
    *,
    counts: Sequence[int] = (2, 3),
    model: str = "TwoLayer",
    **options: object,
) -> Trained:
    """``ensure_warm`` with a plan, then training steps."""
    made = model_of(model)
    warm = ensure_warm(
        made,
        shapes,
        store=store,  # type: ignore[arg-type]
        root=root,
        workload=f"workloads:{_workload_name(model)}",
        **options,  # type: ignore[arg-type]
    )
    return train(made, counts, warm.report)


def _workload_name(model: str) -> str:
    return {"TwoLayer": "two_layer", "PassedBy": "passed_by"}.get(model, model.lower())
