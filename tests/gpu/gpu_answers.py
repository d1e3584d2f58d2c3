"""A fresh process of the GPU tests of a profile's answers; also the workload that asks.

Arguments: plan, store, root of the native program. Says what it saw as JSON.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path

import torch
from torch import nn

from compilecache import ShapePlan, ensure_warm, loading_names
from compilecache.engines.programfile import read_program
from compilecache.examples import ExampleWorkload, specs_of_examples
from compilecache.rewriting import kernel_sources
from compilecache.shapes import plan_of

ROWS, WIDTH, ODD = 1024, 512, 1023
DEVICE = "cuda:0"


class Asking(nn.Module):
    """Attention with and without a mask, and a product of sizes that torch may pad."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, 3 * WIDTH, bias=False, dtype=torch.bfloat16)
        self.out = nn.Linear(WIDTH, ODD, bias=False, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """[2, 1024, 512], [1024, 1024] → [2, 1024, 1023]."""
        q, k, v = self.into(x).view(2, ROWS, 3, 8, 64).permute(2, 0, 3, 1, 4)
        attend = nn.functional.scaled_dot_product_attention
        y = attend(q, k, v, is_causal=True).transpose(1, 2).reshape(2, ROWS, WIDTH)
        z = attend(q, k, v, attn_mask=mask).transpose(1, 2).reshape(2, ROWS, WIDTH)
        return self.out(y.sin() + z)  # type: ignore[no-any-return]


asking = ExampleWorkload(build="gpu_answers:Asking")


def example(device: str) -> dict[str, torch.Tensor]:
    """What one step is called with."""
    return {
        "x": torch.randn(2, ROWS, WIDTH, dtype=torch.bfloat16, device=device),
        "mask": torch.ones(ROWS, ROWS, dtype=torch.bool, device=device),
    }


def plan() -> ShapePlan:
    """Training and evaluation of one shape, by programs."""
    specs = specs_of_examples([example("meta")], Asking())
    made = plan_of(specs, workload="gpu_answers:asking")
    return made.model_copy(update={"engine": "program"})


def compared(model: nn.Module) -> float:
    """The largest difference of a gradient between the warm model and eager, relative to its norm."""
    batch = example(DEVICE)
    weights = torch.randn(2, ROWS, ODD, device=DEVICE, dtype=torch.bfloat16)
    found = []
    for call in (model, lambda **batch: type(model).forward(model, **batch)):
        (call(**batch).float() * weights).sum().backward()
        found.append([p.grad.float() for p in model.parameters() if p.grad is not None])
        model.zero_grad(set_to_none=True)
    return max(float((a - b).norm() / b.norm()) for a, b in zip(*found, strict=True))


def called(root: Path, phase: str) -> tuple[Counter[str], Counter[str]]:
    """Kernels of torch's own that a program calls, and texts of the Triton kernels in it."""
    for path in sorted((root / "programs").iterdir()):
        header, data = read_program(path)
        if header.spec.phase == phase:
            loaded = loading_names.load(data, Asking().to(DEVICE), header.imports)
            calls = Counter[str]()
            for code in loaded.sources:
                calls.update(re.findall(r"torch\.ops\.aten\.\w+|extern_kernels\.\w+", code))
            return calls, Counter(text for code in loaded.sources for text in kernel_sources(code))
    raise SystemExit(f"error: no program for '{phase}' in {root}")


def main() -> None:
    """See above."""
    plan_file, store, native = sys.argv[1:]
    root = Path(native).with_name("first")
    torch.manual_seed(0)
    model = Asking().to(DEVICE)
    warm = ensure_warm(model, ShapePlan.load(plan_file), store=store, root=root)
    said: dict[str, object] = {"report": json.loads(warm.report.model_dump_json())}
    said["apart"] = compared(model)
    for phase in ("train", "eval"):
        (mine, texts), (other, natives) = (called(place, phase) for place in (root, Path(native)))
        said[phase] = {
            "calls": mine,
            "native_calls": other,
            "missing": sum((natives - texts).values()),
            "more": sum((texts - natives).values()),
        }
    print(json.dumps(said))


if __name__ == "__main__":
    main()
