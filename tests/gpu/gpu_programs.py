"""A fresh process of the GPU tests of programs: warms tiny drafters and says what it saw as JSON.

Arguments: plan, store, root, devices, and what to do besides: "train", "threads".
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Sequence

import torch
from gpu_timing import kernels_timed
from torch import nn

from compilecache import ShapePlan, Warm, ensure_warm, torch_names
from compilecache.guard.probe import trace_effect
from dflash_model.model import Drafter
from dflash_model.workload import tiny

CALLS = 400
"""Of every worker while another thread traces."""


def inputs(model: Drafter, device: str, length: int) -> dict[str, object]:
    """One step's batch, the same numbers on every device."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 500, (1, length), generator=generator).to(device)
    hidden = torch.randn(1, length, model.config.context_size, generator=generator)
    hidden = hidden.to(device, model.fc.weight.dtype)
    drawn = torch.Generator(device).manual_seed(5)
    return {**model.prepare(tokens, hidden, torch.ones(1, length, device=device), generator=drawn)}


def train(model: Drafter, device: str, length: int) -> dict[str, object]:
    """Loss and gradient norms of one step, and where its memory was."""
    model.train()
    others = [i for i in range(torch.cuda.device_count()) if i != torch.device(device).index]
    batch = inputs(model, device, length)
    torch.cuda.synchronize()
    before = [torch.cuda.memory_allocated(i) for i in others]
    for index in others:
        torch.cuda.reset_peak_memory_stats(index)
    with torch.cuda.device(device):
        loss = model(**batch)
        loss.backward()
        torch.cuda.synchronize()
    elsewhere = [torch.cuda.max_memory_allocated(i) for i in others]
    norms = {
        n: p.grad.double().norm().item() for n, p in model.named_parameters() if p.grad is not None
    }
    model.zero_grad(set_to_none=True)
    return {"loss": loss.item(), "norms": norms, "elsewhere": elsewhere == before}


def trace_and_compile(done: threading.Event, begun: threading.Event, turns: list[int]) -> None:
    """torch.fx traces and torch.compile compiles, again and again."""
    stack = nn.Sequential(*[nn.Linear(4, 4) for _ in range(20)])
    while not done.is_set():
        torch.fx.symbolic_trace(stack)
        made: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}
        exec(f"def fresh(x): return x * {len(turns)} + 1", made)  # a new code object
        torch.compile(made["fresh"], backend="eager")(torch.ones(2))
        turns.append(1)
        begun.set()


def in_threads(models: Sequence[Drafter], names: Sequence[str], length: int) -> dict[str, object]:
    """Programs called on every device while another thread traces."""
    errors: list[str] = []
    done, begun, turns = threading.Event(), threading.Event(), list[int]()

    def work(model: Drafter, name: str, batch: dict[str, object]) -> None:
        torch.cuda.set_device(name)
        for _ in range(CALLS):
            try:
                model(**batch).backward()
                model.zero_grad(set_to_none=True)
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error}"[:300])
                return

    batches = [inputs(model, name, length) for model, name in zip(models, names, strict=True)]
    tracer = threading.Thread(target=trace_and_compile, args=(done, begun, turns))
    tracer.start()
    begun.wait(60)
    workers = [
        threading.Thread(target=work, args=(model, name, batch))
        for model, name, batch in zip(models, names, batches, strict=True)
    ]
    _all(threading.Thread.start, workers)
    _all(threading.Thread.join, workers)
    done.set()
    tracer.join()
    return {"errors": errors, "turns": len(turns)}


def _all(act: Callable[[threading.Thread], object], threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        act(thread)


def report(warm: Warm) -> dict[str, object]:
    """Rows and troubles."""
    return json.loads(warm.report.model_dump_json())  # type: ignore[no-any-return]


def main() -> None:
    """See above."""
    plan_file, store, root, devices, *more = sys.argv[1:]
    plan, names = ShapePlan.load(plan_file), devices.split(",")
    models = [
        Drafter.random(tiny.drafter_config, torch.device(name), seed=1, anchors=tiny.anchors)
        for name in names
    ]
    weights = [model.fc.weight.detach().double().sum().item() for model in models]
    trace_effect()
    timed = kernels_timed()
    before = torch_names.counts()
    warm = ensure_warm(models, plan, store=store, root=root)
    frames = torch_names.counts().since(before).frames
    said: dict[str, object] = {"report": report(warm), "frames": frames, "timed": timed}
    said["unchanged"] = weights == [m.fc.weight.detach().double().sum().item() for m in models]
    length = plan.sizes()[0]
    if "train" in more:
        pairs = list(zip(models, names, strict=True))
        said["steps"] = [train(model, name, length) for model, name in pairs]
        said["compiles"] = warm.compiles_after_prime
    warm.close()
    if "threads" in more:
        said["threads"] = in_threads(models, names, length)
    print(json.dumps(said))


if __name__ == "__main__":
    main()
