"""Small models that are compiled where their GPU is not, by name for plans."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from compilecache.examples import ExampleWorkload, specs_of_examples
from compilecache.shapes import InputSpec, ShapePlan, plan_of


class Norm(nn.Module):
    """A product and a normalisation: several kernels each way, some in more than one configuration."""

    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(256, 256, bias=False)
        self.norm = nn.LayerNorm(256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, 256] → [B, 256]."""
        return torch.softmax(self.norm(self.product(x)), -1).sin()


class Long(nn.Module):
    """So many operations in one kernel that their names together make no name of a file."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, 256] → [B, 256]."""
        y = torch.nn.functional.leaky_relu(torch.nn.functional.softplus(x))
        y = torch.nn.functional.hardsigmoid(y).logical_not().float().floor_divide(3)
        y = torch.nn.functional.hardswish(torch.nn.functional.threshold(y, 1.0, 2.0))
        return (
            torch.logaddexp(torch.special.entr(y), y).remainder(2).heaviside(y).fmod(3).copysign(x)
        )


class Attending(nn.Module):
    """Two attentions, of which the device says what they become: causal, and with a mask."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, 256] → [B, 256]."""
        heads = x.view(1, -1, 4, 64).transpose(1, 2)
        mask = torch.ones(x.shape[0], x.shape[0], dtype=torch.bool, device=x.device).tril()
        attend = nn.functional.scaled_dot_product_attention
        y = attend(heads, heads, heads, is_causal=True) + attend(heads, heads, heads, mask)
        return y.transpose(1, 2).reshape(x.shape)


class Breaking(nn.Module):
    """No full graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, 256] → [B, 256]."""
        torch._dynamo.graph_break()
        return x.sin()


class Autocast(ExampleWorkload):
    """Steps in autocast, as trainers do."""

    def step(
        self, spec: InputSpec, module: nn.Module, inputs: dict[str, object]
    ) -> torch.Tensor | None:
        """Forward and backward."""
        with torch.autocast("cuda", torch.bfloat16):
            return super().step(spec, module, inputs)


class Switched(Autocast):
    """Steps in autocast only where the environment says so, which no fingerprint knows of."""

    def step(
        self, spec: InputSpec, module: nn.Module, inputs: dict[str, object]
    ) -> torch.Tensor | None:
        """Forward and backward."""
        if os.environ.get("SWITCHED"):
            return super().step(spec, module, inputs)
        return ExampleWorkload.step(self, spec, module, inputs)


class Waiting(ExampleWorkload):
    """Writes the number of its process into the cache root, and waits, unless it may go on."""

    def make_inputs(
        self, spec: InputSpec, module: nn.Module, device: torch.device
    ) -> Mapping[str, object]:
        """Inputs, one day."""
        if not os.environ.get("GO_ON"):
            written = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"], "writing")
            written.write_text(str(os.getpid()))
            written.rename(written.with_name("waiting"))
            time.sleep(300)
        return super().make_inputs(spec, module, device)


norm = ExampleWorkload(build="offline_models:Norm")
autocast = Autocast(build="offline_models:Norm")
switched = Switched(build="offline_models:Norm")
waiting = Waiting(build="offline_models:Norm")
long = ExampleWorkload(build="offline_models:Long")
attending = ExampleWorkload(build="offline_models:Attending")
breaking = ExampleWorkload(build="offline_models:Breaking")


def plan(name: str, phase: str = "train", rows: int = 64) -> ShapePlan:
    """A plan of one of the workloads above."""
    example = {"x": torch.empty(rows, 256, device="meta")}
    specs = specs_of_examples([example], Norm(), [phase])
    made = plan_of(specs, workload=f"offline_models:{name}")
    return made.model_copy(update={"engine": "program"})
