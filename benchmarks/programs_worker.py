"""One fresh process of the programs benchmark; prints one JSON object last.

``step``: a model that torch.compile compiled cold, and one of the same weights warmed by programs, on
one device: training steps in turn, then AdamW on both. ``threads``: models warmed by programs train
and are evaluated in a thread each, while another thread traces and compiles without pause.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn
from worker import by_torch, synchronize

from compilecache import ShapePlan, ensure_warm, torch_names
from compilecache.engines import dispatch
from compilecache.guard.warm import Warm
from compilecache.progress import LineProgress
from compilecache.shapes import InputSpec
from compilecache.workload import Workload, workload_of_plan
from dflash_model.batch import Rows
from dflash_model.model import Drafter

OPTIMIZER_STEPS = 50
LEARNING_RATE = 1e-4
STEPS_A_SAMPLE = 5
"""Between two synchronizations, as in training: what one does on the CPU hides behind the one before."""
TRACES_A_COMPILE = 20
"""How often torch.fx traces between two compilations."""

Inputs = Mapping[str, object]


@dataclass
class Given:
    """What the command line says."""

    devices: list[str]
    plan: ShapePlan
    workload: Workload
    store: str
    root: str
    repeats: int
    calls: int

    def build(self, device: str) -> nn.Module:
        """A model there; always of the same weights."""
        return self.workload.build(torch.device(device))

    def inputs(self, spec: InputSpec, model: nn.Module, device: str) -> Inputs:
        """Of one training step."""
        return self.workload.make_inputs(spec, model, torch.device(device))

    def warmed(self, models: Sequence[nn.Module]) -> Warm:
        """By programs, and not sealed."""
        warm = ensure_warm(
            models,
            self.plan,
            store=self.store or False,
            root=self.root,
            engine="program",
            progress=LineProgress(),
        )
        warm.close()
        return warm


def training_steps(plan: ShapePlan) -> ShapePlan:
    """Only the forwards that train."""
    specs = [spec for spec in plan.specs if spec.phase == "train"]
    return plan.model_copy(update={"specs": tuple(specs)})


def use(device: str) -> None:
    """Makes a GPU the current one of this thread."""
    if device.startswith("cuda"):
        torch.cuda.set_device(device)


# -- steps ------------------------------------------------------------------------------------


class Pair:
    """The same model twice on one device: by programs, and as torch.compile made it cold."""

    def __init__(self, given: Given, device: str) -> None:
        self._given = given
        self._device = device
        use(device)
        self._cold = given.build(device)
        by_torch(given.workload, given.plan, {device: self._cold})
        os.environ.pop("TRITON_CACHE_DIR", None)  # from here on it lies below the other root
        self._program = given.build(device)
        self.warm = given.warmed([self._program])
        for model in (self._program, self._cold):
            model.train()

    def inputs(self, spec: InputSpec) -> Inputs:
        """The same for both. Raises SystemExit when no program would take them."""
        inputs = self._given.inputs(spec, self._program, self._device)
        programs = dispatch.of(self._program)
        if programs is None or programs.find((), inputs) is None:
            rows = [row.notes for row in self.warm.report.targets]
            raise SystemExit(f"error: no program serves '{spec}': {rows}")
        return inputs

    def compare(self, spec: InputSpec) -> dict[str, float]:
        """Median milliseconds of a steady step of both, and the median ratio of rounds ABBA."""
        inputs = self.inputs(spec)
        for model in (self._program, self._cold) * 2:
            self._seconds(model, inputs)
        before = torch_names.counts().frames
        mine: list[float] = []
        others: list[float] = []
        pair = [(self._program, mine), (self._cold, others)]
        for number in range(self._given.repeats):
            first, second = reversed(pair) if number % 2 else pair
            for model, seconds in (first, second, second, first):
                seconds.append(self._seconds(model, inputs))
        if torch_names.counts().frames != before:
            raise SystemExit(f"error: something was traced while steps of '{spec}' were timed")
        ratios = [a / b for a, b in zip(in_twos(mine), in_twos(others), strict=True)]
        return {
            "program_ms": median(mine) * 1e3,
            "cold_ms": median(others) * 1e3,
            "ratio": median(ratios),
        }

    def _seconds(self, model: nn.Module, inputs: Inputs) -> float:
        synchronize({self._device: model})
        began = time.perf_counter()
        for _ in range(STEPS_A_SAMPLE):
            torch.autograd.backward(model(**inputs))
            model.zero_grad(set_to_none=True)
        synchronize({self._device: model})
        return (time.perf_counter() - began) / STEPS_A_SAMPLE

    def losses(self) -> dict[str, list[float]]:
        """Of both under AdamW on the same rows, and of the cold one once more from the same weights."""
        state = {name: value.clone() for name, value in self._cold.state_dict().items()}
        batches = [self._batch(number) for number in range(OPTIMIZER_STEPS)]
        seen = {
            "program": self._curve(self._program, batches),
            "cold": self._curve(self._cold, batches),
        }
        self._cold.load_state_dict(state)
        return {**seen, "again": self._curve(self._cold, batches)}

    def _batch(self, number: int) -> Inputs:
        """Rows that no other step has, as in training; of the plan's shapes in turn."""
        specs, drafter = self._given.plan.specs, self._program
        assert isinstance(drafter, Drafter)
        spec, device = specs[number % len(specs)], torch.device(self._device)
        draw = torch.Generator(device).manual_seed(number)
        shape = (spec.size("batch"), spec.size("seq_len"))
        config, dtype = drafter.config, drafter.fc.weight.dtype
        tokens = torch.randint(config.vocab_size, shape, generator=draw, device=device)
        size = (*shape, config.context_size)
        hidden = torch.randn(size, generator=draw, device=device, dtype=dtype)
        rows = Rows(tokens, hidden, torch.ones(shape, device=device))
        return {**drafter.batch_of(rows, drafter.block_masks.forward, draw)}

    def _curve(self, model: nn.Module, batches: Sequence[Inputs]) -> list[float]:
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE)
        kept: list[Tensor] = []
        for batch in batches:
            loss = model(**batch)
            torch.autograd.backward(loss)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            kept.append(loss.detach())
        return torch.stack(kept).tolist()  # type: ignore[no-any-return]


def in_twos(values: list[float]) -> list[float]:
    """Sums of two and two."""
    return [a + b for a, b in zip(values[::2], values[1::2], strict=True)]


def step(given: Given) -> dict[str, object]:
    """Compares on the one device."""
    pair = Pair(given, given.devices[0])
    return {
        "targets": [row.model_dump(mode="json") for row in pair.warm.report.targets],
        "lengths": {spec.size("seq_len"): pair.compare(spec) for spec in given.plan.specs},
        "losses": pair.losses(),
    }


# -- threads ----------------------------------------------------------------------------------


@dataclass
class Storm:
    """A thread that does what crashed the incident's runs, again and again."""

    device: str
    traces: int = 0
    compiles: int = 0
    failed: list[str] = field(default_factory=list)
    stopping: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Until it is told to stop."""
        use(self.device)
        stack = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        ones = torch.ones(8, device=self.device)
        while not self.stopping.is_set():
            try:
                for _ in range(TRACES_A_COMPILE):
                    torch.fx.symbolic_trace(stack)
                    self.traces += 1
                # Code of its own: torch's limit of entries never stops it.
                fresh: Callable[[Tensor], Tensor] = eval(f"lambda x: x * {self.compiles} + 1")
                torch.compile(fresh)(ones)
                self.compiles += 1
            except Exception as error:
                self.failed.append(words_of(error))


def prepared(model: Drafter, row: Inputs) -> Inputs:
    """A batch of the row, for the mode that the model is in."""
    return {**model.prepare(row["input_ids"], row["hidden_states"], row["loss_mask"])}  # type: ignore[arg-type]


def train(given: Given, model: nn.Module, device: str, done: list[int], errors: list[str]) -> None:
    """One thread's share of the calls: steps from rows to gradients, each then evaluated.

    Of a step's calls of programs the forwards are counted, and the block mask of the evaluation.
    """
    use(device)
    assert isinstance(model, Drafter)
    specs = given.plan.specs
    masks = int(any(spec.function == "block_mask" for spec in specs))
    rows = [given.inputs(spec, model, device) for spec in specs if spec.phase == "train"]
    for number in range(-(-given.calls // (len(given.devices) * (2 + masks)))):
        row = rows[number % len(rows)]
        try:
            model.train()
            torch.autograd.backward(model(**prepared(model, row)))
            done.append(1)
            model.eval()
            with torch.no_grad():
                model(**prepared(model, row))
            done.append(1 + masks)
        except Exception as error:  # the run would be over here; count on instead
            errors.append(words_of(error))
        model.zero_grad(set_to_none=True)
    synchronize({device: model})


def threads(given: Given) -> dict[str, object]:
    """Trains in the storm; two threads at least."""
    if len(given.devices) == 1:
        given.devices *= 2
    if given.devices[0] == "cpu":
        torch.set_num_threads(1)
    models = [given.build(device) for device in given.devices]
    warm = given.warmed(models)
    storm = Storm(given.devices[0])
    errors: list[str] = []
    done: list[int] = []
    workers = [
        threading.Thread(target=train, args=(given, model, device, done, errors))
        for model, device in zip(models, given.devices, strict=True)
    ]
    blowing = threading.Thread(target=storm.run)
    began = time.perf_counter()
    blowing.start()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    seconds = time.perf_counter() - began
    storm.stopping.set()
    blowing.join()
    return {
        "targets": [row.model_dump(mode="json") for row in warm.report.targets],
        "seconds": seconds,
        "calls": sum(done),
        "errors": len(errors),
        "kinds": Counter(errors).most_common(3),
        "entries": max(torch_names.entries_of(model) for model in models),
        "traces": storm.traces,
        "compiles": storm.compiles,
        "storm_failed": Counter(storm.failed).most_common(3),
    }


def words_of(error: Exception) -> str:
    """Type and first line."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first[:160]}"


def main() -> None:
    """Runs one kind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("how", choices=["step", "threads"])
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--devices", required=True)
    parser.add_argument("--store", default="")
    parser.add_argument("--root", required=True)
    parser.add_argument("--repeats", type=int, default=0)
    parser.add_argument("--calls", type=int, default=0)
    options = parser.parse_args()
    devices = options.devices.split(",")
    plan = ShapePlan.load(options.plan)
    if options.how == "step":
        plan = training_steps(plan)
    given = Given(
        devices,
        plan,
        workload_of_plan(plan),
        options.store,
        options.root,
        options.repeats,
        options.calls,
    )
    print(json.dumps(step(given) if options.how == "step" else threads(given)))


if __name__ == "__main__":
    main()
