"""A fresh process of the GPU tests of offline programs; also the workload that they compile.

Arguments: plan, store ("none" for none), root, devices, words: "strict", "wrong" (a canary that lets
nothing pass). Says what it saw as JSON.
"""

from __future__ import annotations

import json
import sys

import torch
from gpu_timing import kernels_timed
from torch import nn

from compilecache import CompileCacheError, ShapePlan, ensure_warm, torch_names
from compilecache.engines import canary
from compilecache.examples import ExampleWorkload, specs_of_examples
from compilecache.guard.probe import trace_effect
from compilecache.shapes import plan_of

ROWS, WIDTH = 2048, 512


class Block(nn.Module):
    """A product, a sum with a transposed table, a norm: several kernels each way, some with a choice."""

    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.table = nn.Parameter(torch.randn(WIDTH, ROWS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[2048, 512] → the same."""
        table = self.table.t()  # so that tiles have two dimensions
        h = torch.nn.functional.gelu(self.product(x)) + table.cos()
        return torch.softmax(self.norm(h), -1).sin() * table


block = ExampleWorkload(build="gpu_offline:Block")


def plan() -> ShapePlan:
    """Training and evaluation of one shape, by programs."""
    example = {"x": torch.empty(ROWS, WIDTH, device="meta")}
    specs = specs_of_examples([example], Block())
    made = plan_of(specs, workload="gpu_offline:block")
    return made.model_copy(update={"engine": "program"})


def compared(model: nn.Module, device: str) -> float:
    """The largest difference of a gradient between the warm model and eager, relative to its norm."""
    x = torch.randn(ROWS, WIDTH, device=device)
    model.train()
    weights = torch.randn(ROWS, WIDTH, device=device)
    found = []
    for call in (model, lambda x: type(model).forward(model, x)):
        (call(x) * weights).sum().backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        model.zero_grad(set_to_none=True)
    return max(float((a - b).norm() / b.norm()) for a, b in zip(*found, strict=True))


def main() -> None:
    """See above."""
    plan_file, store, root, devices, *words = sys.argv[1:]
    if "wrong" in words:
        canary.EAGER = -1
    names = devices.split(",")
    models = [Block().to(name) for name in names]
    trace_effect()  # compiles a function of its own, once a process
    timed, before = kernels_timed(), torch_names.counts()
    try:
        warm = ensure_warm(
            models,
            ShapePlan.load(plan_file),
            store=None if store == "none" else store,
            root=root,
            strict="strict" in words,
        )
    except CompileCacheError as error:
        print(json.dumps({"error": str(error), "kind": type(error).__name__}))
        return
    said = {
        "report": json.loads(warm.report.model_dump_json()),
        "frames": torch_names.counts().since(before).frames,
        "timed": timed,
        "apart": [compared(*pair) for pair in zip(models, names, strict=True)],
    }
    print(json.dumps(said))


if __name__ == "__main__":
    main()
