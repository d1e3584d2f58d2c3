"""Models for programs, and what fresh processes do with them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.nn.utils import parametrize
from workloads import Doubling, Product

from compilecache import torch_names
from compilecache.ensure import ensure_warm
from compilecache.errors import CompileCacheError, FingerprintMismatch, UnexpectedCompile
from compilecache.guard.warm import Warm
from compilecache.report import Report

SCALE = 1.0
"""A global that a model reads."""


class Scaled(Product):
    """Reads a number of its own, one of a list, one of a config, and a global."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.powers = [2, 3]
        self.sizes = Sizes()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, width] → [B, width]."""
        return super().forward(x) * self.scale * SCALE + self.powers[0] + self.sizes.shift


class Sizes:
    """A config whose fields lie in slots."""

    __slots__ = ("shift",)

    def __init__(self) -> None:
        self.shift = 1.0


class Dropping(Product):
    """Does something else in training than in evaluation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, width] → [B, width]."""
        return super().forward(x) * (2.0 if self.training else 1.0)


class Nested(nn.Module):
    """A layer in a layer, tied to another."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        with torch.no_grad():
            self.first.weight.copy_(torch.eye(8) * 2)
            self.second.weight.copy_(torch.eye(8) * 2)
        if tied:
            self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, 8] → [B, 8]."""
        return self.second(self.first(x))


class Breaking(Product):
    """A graph break in the middle."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, width] → [B, width]."""
        y = super().forward(x)
        torch._dynamo.graph_break()
        return y + 1


class Deciding(Product):
    """Which way it goes depends on the data."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, width] → [B, width]."""
        y = super().forward(x)
        return y + 1 if y.sum() > 0 else y - 1


class Custom(Product):
    """A custom autograd function in the middle."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, width] → [B, width]."""
        return Doubling.apply(super().forward(x))  # type: ignore[no-untyped-call, no-any-return]


class Writing(Product):
    """Changes its input in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, width] → [B, width]."""
        x.add_(1)
        return super().forward(x)


class Counting(Product):
    """Counts in a buffer, as batch norm does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, width] → [B, width]."""
        self.count += 1
        return super().forward(x) + self.count


def hooked() -> nn.Module:
    """A model with a hook from the start."""
    model = Product()
    model.register_forward_hook(lambda module, args, output: output * 3)
    return model


def hooked_inside() -> nn.Module:
    """The same, on a layer of it."""
    model = Nested()
    model.first.register_forward_pre_hook(lambda module, args: (args[0] * 3,))
    return model


def patched() -> nn.Module:
    """A model whose instance has a forward of its own."""
    model = Product()
    model.forward = lambda x: x @ model.weight * 5  # type: ignore[method-assign]
    return model


def parametrized() -> nn.Module:
    """A weight that is computed anew at every use."""
    model = Product()
    parametrize.register_parametrization(model, "weight", nn.ReLU())
    return model


def compiled_before() -> nn.Module:
    """A model that its owner compiled."""
    model = Product()
    model.compile(dynamic=False)
    return model


def rows(count: int = 2) -> torch.Tensor:
    """[count, 8]."""
    return torch.arange(count * 8, dtype=torch.float32).reshape(count, 8) / 10


def make_warm(
    model: nn.Module,
    root: Path,
    *,
    counts: tuple[int, ...] = (2,),
    store: Path | None = None,
    engine: str = "program",
    **options: object,
) -> Warm:
    """``ensure_warm`` with rows of eight."""
    return ensure_warm(
        model,
        [{"x": rows(count)} for count in counts],
        store=store or False,
        root=root,
        engine=engine,  # type: ignore[arg-type]
        **options,  # type: ignore[arg-type]
    )


@dataclass
class Saw:
    """What a process saw of one model."""

    report: Report
    equal: bool
    """Outputs and gradients are those of an eager copy."""
    frames: int = 0
    """That Dynamo traced meanwhile."""
    refused: list[str] = field(default_factory=list)


def same_as_eager(model: nn.Module, make: Callable[[], nn.Module], x: torch.Tensor) -> bool:
    """Whether one training step gives the output and the gradients of an eager copy of the model."""
    twin = make()
    twin.load_state_dict(model.state_dict())
    twin.train(model.training)
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        theirs.requires_grad_(mine.requires_grad)
        mine.grad = None
    out, expected = model(x.clone()), twin(x.clone())
    if expected.requires_grad:
        out.sum().backward()
        expected.sum().backward()
    pairs = [(out, expected)]
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        if (mine.grad is None) != (theirs.grad is None):
            return False
        if mine.grad is not None and theirs.grad is not None:
            pairs.append((mine.grad, theirs.grad))
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in pairs)


def warm_and_compare(make: Callable[[], nn.Module], root: Path, **options: object) -> Saw:
    """Makes a model warm and compares a training step with an eager one."""
    model = make()
    with make_warm(model, root, **options) as warm:  # type: ignore[arg-type]
        before = torch_names.counts()
        model.train()
        equal = same_as_eager(model, make, rows())
        return Saw(warm.report, equal, torch_names.counts().since(before).frames)


def called_after(
    make: Callable[[], nn.Module], change: Callable[[nn.Module], object], root: Path
) -> tuple[str, bool]:
    """What a call says after a change to a warm model, and whether it is right once unsealed."""
    model = make()
    warm = make_warm(model, root)
    model.train()
    change(model)
    said = "it went through"
    try:
        model(rows())
    except UnexpectedCompile as error:
        said = str(error)
    warm.close()
    torch_names.counts()
    return said, same_values(model)


def same_values(model: nn.Module) -> bool:
    """Whether a compiled call gives what the same module gives without its compiled call."""
    dtype = next(model.parameters()).dtype
    with torch.no_grad():
        mine = model(rows().to(dtype))
        compiled, model._compiled_call_impl = model._compiled_call_impl, None
        expected = model(rows().to(dtype))
        model._compiled_call_impl = compiled
    return torch.allclose(mine, expected, rtol=1e-5, atol=1e-6)


def mismatch(make: Callable[[], nn.Module], root: Path) -> FingerprintMismatch | None:
    """The error that a strict start raises; None when it raises none."""
    try:
        make_warm(make(), root, strict=True).close()
    except FingerprintMismatch as error:
        return error
    except CompileCacheError as error:
        raise AssertionError(f"{type(error).__name__}: {error}") from error
    return None


def trace_without_pause(done: threading.Event, tracing: threading.Event) -> None:
    """What a thread does that disturbs every other: torch.fx traces, again and again."""
    stack = nn.Sequential(*[nn.Linear(4, 4) for _ in range(20)])
    while not done.is_set():
        torch.fx.symbolic_trace(stack)
        tracing.set()
