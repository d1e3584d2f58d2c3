"""One fresh process of a benchmark: warms a plan through us, or through torch alone.

``ours``: ensure_warm. ``torch``: the same modules compiled the same way and the same steps run
twice each, on whatever TORCHINDUCTOR_CACHE_DIR holds; then its artifacts are saved, if a file is
named. ``mega``: the same after loading that file. Prints one JSON object last.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import nn

from compilecache import ShapePlan, ensure_warm
from compilecache.loading_names import import_ahead
from compilecache.progress import LineProgress
from compilecache.shapes import InputSpec
from compilecache.torch_names import Limits, counts, raise_limits, takes_recompile_limit
from compilecache.workload import Workload, workload_of_plan

ENTRIES = 64


def main() -> None:
    """Builds the models, starts the clock, warms, stops it, and takes one checked step a spec."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("how", choices=["ours", "torch", "mega"])
    parser.add_argument("--plan", required=True)
    parser.add_argument("--devices", required=True)
    parser.add_argument("--store", default="")
    parser.add_argument("--root", required=True)
    parser.add_argument("--engine", default="trace")
    parser.add_argument("--ahead", action="store_true", help="import before the clock starts")
    parser.add_argument("--artifacts", type=Path, help="file of torch's own artifacts")
    arguments = parser.parse_args()
    plan = ShapePlan.load(arguments.plan)
    workload = workload_of_plan(plan)
    models = {name: workload.build(torch.device(name)) for name in arguments.devices.split(",")}
    said = Said()
    logger = logging.getLogger("compilecache")
    logger.setLevel(logging.INFO)
    logger.addHandler(said)
    if arguments.ahead:
        begin(models)
    synchronize(models)
    began = time.perf_counter()
    result: dict[str, object] = {}
    if arguments.how == "ours":
        warm = ensure_warm(
            list(models.values()),
            plan,
            store=arguments.store or False,
            root=arguments.root,
            engine=arguments.engine,
            progress=LineProgress(),
        )
        result["report"] = warm.report.model_dump(mode="json")
    else:
        if arguments.how == "mega":
            torch.compiler.load_cache_artifacts(arguments.artifacts.read_bytes())
        result["first_seconds"] = by_torch(workload, plan, models)
    synchronize(models)
    result["seconds"] = time.perf_counter() - began
    result["said"] = said.texts
    result["counts"] = {"hits": counts().hits, "misses": counts().misses}
    if arguments.how == "torch" and arguments.artifacts is not None:
        saved = torch.compiler.save_cache_artifacts()
        arguments.artifacts.write_bytes(saved[0] if saved else b"")
    result["steps"] = checked_steps(workload, plan, models)
    print(json.dumps(result))


class Said(logging.Handler):
    """What the library logged."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps the text."""
        self.texts.append(record.getMessage())


def begin(devices: Iterable[str]) -> None:
    """What every start needs, whatever it warms: imports, and a first operation of each device."""
    import torch._dynamo
    import torch._inductor.compile_fx

    import_ahead()
    for device in devices:
        torch.ones(8, device=device).sum().item()


def synchronize(models: Mapping[str, nn.Module]) -> None:
    """Waits for every GPU in use."""
    for device in models:
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)


def by_torch(
    workload: Workload, plan: ShapePlan, models: Mapping[str, nn.Module]
) -> dict[str, float]:
    """What somebody writes who knows torch well: the limit raised, every step run twice."""
    carried = {"recompile_limit": ENTRIES} if takes_recompile_limit() else {}
    raise_limits(Limits(0 if carried else ENTRIES, 256))
    first: dict[str, float] = {}
    for device, model in models.items():
        for function in workload.functions(model).values():
            function.compile(dynamic=False, **carried)
        for spec in plan.specs:
            began = time.perf_counter()
            step(workload, spec, model, device)
            synchronize({device: model})
            first[f"{spec} on {device}"] = time.perf_counter() - began
            step(workload, spec, model, device)
        for parameter in model.parameters():
            parameter.grad = None
    return first


def step(workload: Workload, spec: InputSpec, model: nn.Module, device: str) -> torch.Tensor | None:
    """One step in the spec's phase."""
    model.train(spec.phase == "train")
    with torch.set_grad_enabled(spec.phase == "train"):
        if device.startswith("cuda"):
            torch.cuda.set_device(device)
        inputs = workload.make_inputs(spec, model, torch.device(device))
        return workload.step(spec, model, inputs)


def checked_steps(
    workload: Workload, plan: ShapePlan, models: Mapping[str, nn.Module]
) -> dict[str, list[float]]:
    """Loss, gradient norm and milliseconds of one more step of every spec on every device."""
    seen: dict[str, list[float]] = {}
    for device, model in models.items():
        for spec in plan.specs:
            for parameter in model.parameters():
                parameter.grad = None
            synchronize({device: model})
            began = time.perf_counter()
            loss = step(workload, spec, model, device)
            synchronize({device: model})
            milliseconds = (time.perf_counter() - began) * 1e3
            grads = [p.grad.double().norm() for p in model.parameters() if p.grad is not None]
            norm = float(torch.stack(grads).norm()) if grads else 0.0
            seen[f"{spec} on {device}"] = [0.0 if loss is None else float(loss), norm, milliseconds]
    return seen


if __name__ == "__main__":
    main()
