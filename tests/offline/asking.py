"""Models of which only a GPU can say how they are compiled, and what a process without one says to each.

Arguments: cache root, names of cases. Prints, by case, what it was refused with; "" for none.
The line that asks ends in ``# asks``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import JsonValue
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from compilecache.gpuprofile import Answer, GpuProfile, Operation, versions


class Attention(nn.Module):
    """The kernel of attention is chosen by asking the device."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, heads, length, head] → the same."""
        return nn.functional.scaled_dot_product_attention(x, x, x)  # asks


class Overload(nn.Module):
    """The same by the name that exported graphs have."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, heads, length, head] → the same."""
        return torch.ops.aten.scaled_dot_product_attention.default(x, x, x)  # asks


class Checkpointed(nn.Module):
    """The same in a graph within the graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, heads, length, head] → the same."""
        return checkpoint(self.attend, x, use_reentrant=False)  # type: ignore[no-any-return]

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        """[B, heads, length, head] → the same."""
        return nn.functional.scaled_dot_product_attention(x, x, x).sin()  # asks


class Math(nn.Module):
    """Attention whose kernel needs nobody to be asked."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, heads, length, head] → the same."""
        return nn.functional.scaled_dot_product_attention(x, x, x)


class MathInside(nn.Module):
    """The same, but the graph itself says so."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, heads, length, head] → the same."""
        with sdpa_kernel(SDPBackend.MATH):
            return nn.functional.scaled_dot_product_attention(x, x, x)


class Folded(nn.Module):
    """Attention whose output can be folded as it lies in memory, by the kernel that was answered alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, length, heads, head] → [B, length, heads · head]."""
        heads = x.transpose(1, 2)
        output = nn.functional.scaled_dot_product_attention(heads, heads, heads)
        return output.transpose(1, 2).view(2, 8, -1)


class ByHand(nn.Module):
    """Attention written out, which torch replaces by its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, heads, length, head] → the same."""
        scores = torch.matmul(x.cos(), x.sin().transpose(-2, -1)).div(8.0)  # asks
        return torch.matmul(torch.softmax(scores, -1), x.tan())  # asks


class Encoder(nn.Module):
    """An operation of torch that has no code for fake tensors: torch runs it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(64, 2, 128, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, heads, length, 64] → [B · heads, length, 64]."""
        return self.layer(x.flatten(0, 1))  # type: ignore[no-any-return]  # asks


class Unaligned(nn.Module):
    """A matrix product that torch may pad."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1024, 1023))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, heads, length, head] → the same."""
        return x.reshape(-1, 1024) @ self.weight  # asks


class Plain(nn.Module):
    """Nothing to ask."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any shape → the same."""
        return x.sin() * 2


class Rounded(nn.Module):
    """A product that autocast computes in another precision."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, heads, length, 64] → the same."""
        return x.float() @ self.weight.float()


class Reading(Plain):
    """Its inputs depend on the GPU it is on."""

    def __init__(self, question: str) -> None:
        super().__init__()
        self.question = question

    def ask(self) -> None:
        """Asks torch.cuda."""
        if self.question == "benchmark":
            from torch._inductor.runtime.benchmarking import benchmarker

            benchmarker.benchmark_gpu(self.ask)  # asks
        getattr(torch.cuda, self.question)()  # asks


class Softmax(nn.Module):
    """A reduction whose one kernel needs shared memory."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any shape → the same."""
        y = x.cos()  # asks
        return torch.softmax(y.reshape(8, -1), -1)


def own_kernel() -> nn.Module:
    """One that launches a Triton kernel of its own."""
    from own_kernel import Own

    return Own()


def registered_kernel() -> nn.Module:
    """One whose kernel is behind an operator, which is traced only once there is a graph."""
    from own_kernel import Registered

    return Registered()


MODELS = {
    "attention": Attention,
    "attention by its overload": Overload,
    "attention in a checkpoint": Checkpointed,
    "attention by math alone": Math,
    "attention by math alone, said in the graph": MathInside,
    "attention, answered": Folded,
    "attention in a checkpoint, answered": Checkpointed,
    "attention written out": ByHand,
    "attention written out, answered": ByHand,
    "operation without fake tensors": Encoder,
    "attention, answered for another length": Attention,
    "unaligned product": Unaligned,
    "unaligned product, never padded": Unaligned,
    "unaligned product, answered": Unaligned,
    "max-autotune": Plain,
    "coordinate descent": Plain,
    "CUDA graphs": Plain,
    "own kernel": own_kernel,
    "own kernel behind an operator": registered_kernel,
    "memory": lambda: Reading("memory_allocated"),
    "free memory": lambda: Reading("mem_get_info"),
    "devices": lambda: Reading("device_count"),
    "stream": lambda: Reading("current_stream"),
    "random state": lambda: Reading("get_rng_state"),
    "seconds": lambda: Reading("benchmark"),
    "name": lambda: Reading("get_device_name"),
    "shared memory": Softmax,
}

OPTIONS: dict[str, dict[str, JsonValue]] = {
    "unaligned product, never padded": {"options": {"shape_padding": False}},
    "max-autotune": {"mode": "max-autotune-no-cudagraphs"},
    "coordinate descent": {"options": {"coordinate_descent_tuning": True}},
    "CUDA graphs": {"mode": "reduce-overhead"},
}


CALLED = {
    "attention, answered": b"_scaled_dot_product_flash_attention",
    "attention in a checkpoint, answered": b"_scaled_dot_product_flash_attention",
    "attention written out, answered": b"_scaled_dot_product_flash_attention",
    "attention by math alone, said in the graph": b"bmm",
    "unaligned product, answered": b"constant_pad_nd",
}
"""What must be in the code of a program."""


class Always(dict[str, Any]):
    """One answer to every question."""

    def __init__(self, answer: object) -> None:
        super().__init__()
        self.answer = answer

    def get(self, key: str, default: object = None) -> object:
        """The same for all."""
        return self.answer


def flash(shape: tuple[int, ...], strides: tuple[int, ...]) -> dict[str, Answer]:
    """As the H200 answers for one tensor as query, key and value, of which no gradient is wanted."""
    from compilecache.attention_names import Facts, Question

    facts = Facts(torch.bfloat16, shape, strides, grad=False)
    kernels = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH", "CUDNN_ATTENTION")
    question = Question((facts, facts, facts, None), 0.0, False, None, False, kernels)
    operation = Operation(
        name="aten._scaled_dot_product_flash_attention.default",
        arguments=({"tensor": "query"}, {"tensor": "key"}, {"tensor": "value"}),
        named={"scale": shape[-1] ** -0.5},
    )
    return {str(question): Answer(operations=(operation,), output={"tensor": 0, "item": 0})}


def answers(case: str) -> dict[str, Any]:
    """What the profile says of workloads."""
    if case == "unaligned product, answered":
        return {"padding": Always(True)}
    if case == "attention written out, answered":
        (answer,) = flash((2, 8, 1024, 64), (524288, 65536, 64, 1)).values()
        return {"attention": Always(answer)}
    if case == "attention, answered":
        return {"attention": flash((2, 1024, 8, 64), (524288, 64, 65536, 1))}
    if case == "attention in a checkpoint, answered":
        return {"attention": flash((2, 8, 1024, 64), (524288, 65536, 64, 1))}
    if case == "attention, answered for another length":
        return {"attention": flash((2, 8, 512, 64), (262144, 32768, 64, 1))}
    return {}


def main(root: Path, profile: GpuProfile, cases: list[str]) -> dict[str, str]:
    """What each is refused with."""
    from compilecache.offline import without_gpu

    with without_gpu(profile):
        return {case: _said(root, profile, case) for case in cases}


def _said(root: Path, profile: GpuProfile, case: str) -> str:
    from compilecache import absent_gpu
    from compilecache.cachedir import CacheDir
    from compilecache.engines.offline import OfflineEngine
    from compilecache.engines.programfile import program_among, read_program
    from compilecache.errors import CompileFailed
    from compilecache.examples import ExampleWorkload, specs_of_examples
    from compilecache.shapes import CompileTarget

    class Asking(ExampleWorkload):
        def make_inputs(
            self, spec: object, module: nn.Module, device: torch.device
        ) -> Mapping[str, object]:
            if isinstance(module, Reading):
                module.ask()
            return {"x": torch.ones(2, 8, 1024, 64, dtype=torch.bfloat16, device=device)}

    class ByMath(Asking):
        def step(self, *args: object) -> torch.Tensor | None:
            with sdpa_kernel(SDPBackend.MATH):
                return super().step(*args)  # type: ignore[arg-type]

    cache = CacheDir(root)
    cache.prepare(allow_network=True)
    cache.use()
    example = {"x": torch.empty(2, 8, 1024, 64, dtype=torch.bfloat16, device="meta")}
    with absent_gpu.faking():
        module = MODELS[case]().to("cuda:0", torch.bfloat16)
    kind = ByMath if case == "attention by math alone" else Asking
    workload = kind([example], module=module)
    spec = specs_of_examples([example], module, ("eval",))[0]
    engine = OfflineEngine(
        workload, cache, OPTIONS.get(case), profile.model_copy(update=answers(case))
    )
    try:
        run = engine.run(CompileTarget(device="cuda:0", spec=spec), module)
    except CompileFailed as error:
        return error.problem
    path = program_among(run.files)
    assert path is not None
    header, code = read_program(root / path)
    assert header.profile is not None
    assert not header.profile.attention
    return "" if CALLED.get(case, b"") in code else "its code calls something else"


if __name__ == "__main__":
    folder, *wanted = sys.argv[1:]
    h200 = GpuProfile.load("h200").model_copy(update=versions())
    if wanted == ["shared memory"]:
        h200 = h200.model_copy(update={"shared_memory_per_block_optin": 4})
    print(json.dumps(main(Path(folder), h200, wanted)))
