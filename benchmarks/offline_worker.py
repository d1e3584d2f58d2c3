"""One fresh process of the offline benchmark; prints one JSON object last.

``first``: models on all devices, warmed from a store that was filled without a GPU. ``pair``: on one device
a model of such programs, settled by now, and one of the same weights by native programs.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn
from worker import synchronize

from compilecache import ShapePlan, ensure_warm, loading_names
from compilecache.engines.harness import phase
from compilecache.engines.programfile import read_program
from compilecache.guard.warm import Warm
from compilecache.progress import LineProgress
from compilecache.rewriting import kernel_sources
from compilecache.shapes import InputSpec
from compilecache.workload import Workload, workload_of_plan

Inputs = Mapping[str, object]
STEPS = 8
"""Between two synchronisations."""


def warmed(models: list[nn.Module], plan: ShapePlan, store: Path, root: Path) -> Warm:
    """By programs, and not sealed."""
    warm = ensure_warm(
        models, plan, store=str(store), root=root, engine="program", progress=LineProgress()
    )
    warm.close()
    return warm


def timed(root: Path) -> int:
    """Kernels of which several configurations were timed there."""
    return sum(1 for _ in root.rglob("*.best_config"))


def first(options: argparse.Namespace) -> dict[str, object]:
    """Meets the GPUs."""
    plan = ShapePlan.load(options.plan)
    workload = workload_of_plan(plan)
    models = [workload.build(torch.device(device)) for device in options.devices.split(",")]
    began = time.perf_counter()
    warm = warmed(models, plan, options.store, options.root)
    seconds = time.perf_counter() - began
    report = warm.report.model_dump(mode="json")
    return {"report": report, "seconds": seconds, "timed": timed(options.root)}


class Pair:
    """The same model twice on one device."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.plan = ShapePlan.load(options.plan)
        self.workload: Workload = workload_of_plan(self.plan)
        self.device = options.devices
        torch.cuda.set_device(self.device)
        self.roots = options.root / "offline", options.root / "native"
        stores = options.store, options.native
        self.models: list[nn.Module] = []
        self.warm: list[Warm] = []
        for store, root in zip(stores, self.roots, strict=True):
            root.mkdir(parents=True, mode=0o700, exist_ok=True)
            model = self.workload.build(torch.device(self.device))
            self.warm.append(warmed([model], self.plan, store, root))
            self.models.append(model)
        self.repeats = options.repeats

    def odd(self) -> list[str]:
        """What the start by offline programs should not have done."""
        report = self.warm[0].report
        rows = [f"{r.target}: {r.status} {r.notes}" for r in report.targets
                if r.status not in ("restored", "rewritten") or r.notes]  # fmt: skip
        return [*rows, *report.gave_up]

    def compare(self, spec: InputSpec) -> dict[str, float]:
        """Outputs, gradients, kernels, and seconds of a step."""
        inputs = self.workload.make_inputs(spec, self.models[0], torch.device(self.device))
        mine, other = (self._once(spec, model, inputs) for model in self.models)
        seen = {"loss": apart(mine[0], other[0]), **self._kernels(spec)}
        if spec.phase != "train":
            return seen
        worst = max(((apart(a, mine[1][n]), n) for n, a in other[1].items()), default=(0.0, ""))
        print(f"largest gradient difference: {worst}", file=sys.stderr, flush=True)
        largest = max(float(a.float().norm()) for a in other[1].values())
        small = [n for n, a in other[1].items() if float(a.float().norm()) < 1e-3 * largest]
        kept = [apart(mine[1][n], a) for n, a in other[1].items() if n not in small]
        return seen | {"gradients": max(kept), **self._steps(inputs)}

    def _once(
        self, spec: InputSpec, model: nn.Module, inputs: Inputs
    ) -> tuple[Tensor, dict[str, Tensor]]:
        outputs = []
        function = self.workload.functions(model)[spec.function]
        with phase(spec, model):
            out = function(**inputs)
            outputs = [
                t.detach().float().reshape(-1) for t in (out if isinstance(out, tuple) else (out,))
            ]
            if spec.phase == "train":
                torch.autograd.backward(out)
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad(set_to_none=True)
        return torch.cat(outputs), gradients

    def _kernels(self, spec: InputSpec) -> dict[str, float]:
        (mine, unsettled), (other, _) = (self._sources(spec, place) for place in (0, 1))
        return {
            "unsettled": unsettled,
            "kernels": sum(other.values()),
            "missing": sum((other - mine).values()),
            "more": sum((mine - other).values()),
        }

    def _sources(self, spec: InputSpec, place: int) -> tuple[Counter[str], int]:
        """Every Triton kernel of the spec's program, as generated for this device; how many of them have
        configurations to choose from."""
        device = torch.device(self.device)
        function = self.workload.functions(self.models[place])[spec.function]
        for path in sorted((self.roots[place] / "programs").iterdir()):
            header, data = read_program(path)
            if header.spec == spec:
                indices = torch.device(header.device).index, device.index
                moved = indices if indices[0] != indices[1] else None
                loaded = loading_names.load(data, function, header.imports, moved)
                texts = Counter(text for code in loaded.sources for text in kernel_sources(code))
                return texts, sum(len(k.compile_results) > 1 for _, k in loaded.kernels)
        raise SystemExit(f"error: no program of '{spec}' in {self.roots[place]}")

    def _steps(self, inputs: Inputs) -> dict[str, float]:
        for model in self.models * 2:
            self._seconds(model, inputs)
        mine: list[float] = []
        others: list[float] = []
        both = [(self.models[0], mine), (self.models[1], others)]
        for number in range(self.repeats):
            one, two = reversed(both) if number % 2 else both
            for model, seconds in (one, two, two, one):
                seconds.append(self._seconds(model, inputs))
        pairs = zip(in_twos(mine), in_twos(others), strict=True)
        ratio = median(a / b for a, b in pairs)
        return {
            "ratio": ratio,
            "offline_ms": median(mine) * 1e3,
            "native_ms": median(others) * 1e3,
        }

    def _seconds(self, model: nn.Module, inputs: Inputs) -> float:
        """Of one step; several are on their way at once, as in training."""
        model.train()
        synchronize({self.device: model})
        began = time.perf_counter()
        for _ in range(STEPS):
            torch.autograd.backward(model(**inputs))
            model.zero_grad(set_to_none=True)
        synchronize({self.device: model})
        return (time.perf_counter() - began) / STEPS


def in_twos(values: list[float]) -> list[float]:
    """Sums of two and two."""
    return [a + b for a, b in zip(values[::2], values[1::2], strict=True)]


def apart(mine: Tensor, other: Tensor) -> float:
    """Norm of the difference, relative to the other's norm."""
    mine, other = mine.float(), other.float()
    scale = float(other.norm())
    gap = float((mine - other).norm())
    return gap / scale if scale else gap


def pair(options: argparse.Namespace) -> dict[str, object]:
    """Compares on the one device."""
    both = Pair(options)
    odd = both.odd()
    return {"odd": odd, "specs": {str(spec): both.compare(spec) for spec in both.plan.specs}}


def main() -> None:
    """Runs one kind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("how", choices=["first", "pair"])
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--devices", required=True)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--native", type=Path)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=0)
    options = parser.parse_args()
    options.root.mkdir(parents=True, mode=0o700, exist_ok=True)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    print(json.dumps(first(options) if options.how == "first" else pair(options)))


if __name__ == "__main__":
    main()
