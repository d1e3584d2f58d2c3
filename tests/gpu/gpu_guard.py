"""A fresh process of the GPU tests: what the seal and the gate do on real device indices.

Prints one JSON object: what every scenario saw, by name.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

from compilecache import Warm, ensure_warm
from compilecache.shapes import InputSpec
from compilecache.workload import Workload


class Net(nn.Module):
    """Two layers: one Triton kernel each way."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.second = nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, 64] → [B, 1]."""
        return self.second(torch.tanh(self.first(x)))


class ForwardOnly(Workload):
    """Forgets the backward."""

    def make_inputs(
        self, spec: InputSpec, module: nn.Module, device: torch.device
    ) -> Mapping[str, object]:
        return {"x": torch.ones(spec.size("batch"), 64, device=device)}

    def step(
        self, spec: InputSpec, module: nn.Module, inputs: Mapping[str, object]
    ) -> torch.Tensor | None:
        module(**inputs)
        return None


def rows(count: int, device: str = "meta") -> dict[str, torch.Tensor]:
    """An example."""
    return {"x": torch.linspace(-1, 1, count * 64, device=device).reshape(count, 64)}


def nets(devices: list[str]) -> list[nn.Module]:
    """One replica per device."""
    torch.manual_seed(0)
    first = Net()
    made: list[nn.Module] = []
    for device in devices:
        net = Net()
        net.load_state_dict(first.state_dict())
        made.append(net.to(device))
    return made


def warmed(models: list[nn.Module], **options: object) -> Warm:
    """Warm for three rows, training only."""
    return ensure_warm(models, [rows(3)], store=False, root=tempfile.mkdtemp(), **options)  # type: ignore[arg-type]


def told(function: Callable[[], object]) -> str:
    """The error a call in a new thread ends with."""
    heard: list[str] = []

    def run() -> None:
        try:
            function()
            heard.append("")
        except Exception as error:
            heard.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=run, name="worker 7")
    thread.start()
    thread.join()
    return heard[0]


def step(model: nn.Module, warm: Warm, device: str, count: int) -> list[float]:
    """One step in a thread of its own; the first row of the gradient."""
    warm.attach(device)
    with warm.step():
        made: torch.Tensor = model(**rows(count, device))
        made.square().sum().backward()
    gradient = model.get_parameter("first.weight").grad
    assert gradient is not None
    return [round(value, 5) for value in gradient[0, :4].tolist()]


def refused(devices: list[str]) -> dict[str, object]:
    """Sealed: planned steps on every device, and what is refused on the last."""
    models = nets(devices)
    last, model = devices[-1], models[-1]
    query = torch.ones(1, 1, 128, 64, device=last)
    with warmed(models) as warm:
        return {
            "planned": [
                told(lambda m=m, d=d: step(m, warm, d, 3))  # type: ignore[misc]
                for m, d in zip(models, devices, strict=True)
            ],
            "shape": told(lambda: step(model, warm, last, 5)),
            "flex": told(lambda: flex_attention(query, query, query)),
            "trace": told(lambda: torch.fx.symbolic_trace(nn.Identity())),
            "compiles": warm.compiles_after_prime,
        }


def other_device(devices: list[str]) -> str:
    """Warm on the first device only; the replica on the second is compiled, but not warm."""
    first, second = nets(devices)
    second.compile(dynamic=False)
    with warmed([first]):
        return told(lambda: second(**rows(3, devices[1])))


def lazy_backward(device: str, on_miss: str) -> dict[str, object]:
    """torch compiles a backward that it put off on a thread of autograd's own."""
    (model,) = nets([device])
    warm = ensure_warm(
        model, [InputSpec(dims={"batch": 3})], workload=ForwardOnly(), store=False,
        root=tempfile.mkdtemp(), on_miss=on_miss,  # type: ignore[arg-type]
        compile_options={"backend": "aot_eager"},
    )  # fmt: skip

    def run() -> None:
        with warm.step():
            model(**rows(3, device)).sum().backward()

    heard = told(run)
    warm.close()
    return {
        "heard": heard,
        "gradient": model.get_parameter("first.weight").grad is not None,
        "compiles": warm.compiles_after_prime,
    }


def serialized(devices: list[str]) -> dict[str, object]:
    """A thread for every device, all meeting new shapes at once, forward and backward."""
    models, eager = nets(devices), nets(devices)
    wrong: list[str] = []

    def work(number: int) -> None:
        device, model, plain = devices[number], models[number], eager[number]
        for count in (3, 5 + number, 9, 12, 5 + number):
            for net in (model, plain):
                net.zero_grad(set_to_none=True)
            with warm.step():
                model(**rows(count, device)).square().sum().backward()
            plain(**rows(count, device)).square().sum().backward()
            for (name, mine), theirs in zip(
                model.named_parameters(), plain.parameters(), strict=True
            ):
                if not torch.allclose(mine.grad, theirs.grad, rtol=1e-3, atol=1e-4):
                    wrong.append(f"{name} {count} {device}")

    with warmed(models, on_miss="serialize", gate_timeout=120.0) as warm:
        with warm.crew() as crew:
            for number, device in enumerate(devices):
                crew.start(work, number, device=device)
        return {
            "wrong": wrong,
            "targets": len(warm.report.targets),
            "gave_up": list(warm.report.gave_up),
        }


def main() -> None:
    """Arguments: devices."""
    devices = sys.argv[1].split(",")
    scenarios: dict[str, Callable[[], object]] = {
        "refused": lambda: refused(devices),
        "lazy_error": lambda: lazy_backward(devices[-1], "error"),
        "lazy_serialize": lambda: lazy_backward(devices[-1], "serialize"),
        "serialized": lambda: serialized(devices),
    }
    if len(devices) > 1:
        scenarios["other_device"] = lambda: other_device(devices)
    found = {}
    for name, scenario in scenarios.items():
        torch.compiler.reset()
        found[name] = scenario()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
