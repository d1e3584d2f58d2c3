"""Small models and the workloads of them, by name for the command line: ``workloads:two_layer``."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from torch import nn

from compilecache.examples import ExampleWorkload, specs_of_examples
from compilecache.shapes import InputSpec, ShapePlan, plan_of
from compilecache.workload import Workload


class TwoLayer(nn.Module):
    """Two linear layers and an activation: one C++ kernel each way."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, width] → [B, 1]."""
        return self.second(torch.relu(self.first(x)))


class Product(nn.Module):
    """One matrix product: compiled within a moment, since it needs no C++ kernel."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, width] → [B, width]."""
        return x @ self.weight


class Conv(nn.Module):
    """A convolution with batch norm: buffers that every training forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.norm = nn.BatchNorm2d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, 1, H, W] → [B, 2, H - 2, W - 2]."""
        return torch.relu(self.norm(self.conv(x)))


class Doubling(torch.autograd.Function):
    """A custom autograd function, which torch's AOTAutograd cache passes by."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


class PassedBy(Product):
    """A graph that torch never caches."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, width] → [B, width]."""
        return Doubling.apply(super().forward(x))  # type: ignore[no-untyped-call, no-any-return]


class Changing(Product):
    """Compiles again on every call: a Python number that is part of the graph counts up."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, width] → [B, width]."""
        self.calls += 1
        return super().forward(x) * self.calls


class Fragile(Product):
    """Fails for a batch of three."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, width] → [B, width]; not for B = 3."""
        if x.shape[0] == 3:
            return x @ self.weight[:3]
        return super().forward(x)


class Flaky(Product):
    """Compiles to another graph where the environment says so, which no fingerprint knows of."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, width] → [B, some]."""
        return x @ self.weight[:, : int(os.environ.get("FLAKY_COLUMNS", "3"))]


class Learning(Workload):
    """A workload whose step does what none should: it changes the parameters."""

    def make_inputs(
        self, spec: InputSpec, module: nn.Module, device: torch.device
    ) -> Mapping[str, object]:
        return {"x": torch.ones(spec.size("batch"), 8, device=device)}

    def step(
        self, spec: InputSpec, module: nn.Module, inputs: Mapping[str, object]
    ) -> torch.Tensor | None:
        loss = super().step(spec, module, inputs)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(1)
        return loss


two_layer = ExampleWorkload(build="workloads:TwoLayer")
product = ExampleWorkload(build="workloads:Product")
passed_by = ExampleWorkload(build="workloads:PassedBy")
flaky = ExampleWorkload(build="workloads:Flaky")
fragile = ExampleWorkload(build="workloads:Fragile")


def rows(count: int, width: int = 8) -> dict[str, torch.Tensor]:
    """An example of so many rows, without data."""
    return {"x": torch.empty(count, width, device="meta")}


def plan(name: str, counts: list[int], phases: tuple[str, ...] = ("train",)) -> ShapePlan:
    """A plan of one of the workloads above, a spec for each number of rows and phase."""
    examples = [rows(count) for count in counts]
    return plan_of(specs_of_examples(examples, Product(), phases), workload=f"workloads:{name}")
