"""Whether a program does on another device what it did on the one it was compiled on.

Both run on the same parameters, drawn anew from a seed on the device itself, and on the workload's
own inputs. Of every output and every gradient the norm and its products with fixed random signs are
kept: if those agree, the tensors do (the product of an error with random signs is about as large as
the error). So the reference travels with the program, and no second device is needed to check one.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from compilecache import torch_names
from compilecache.engines import dispatch
from compilecache.engines.dispatch import Program
from compilecache.engines.harness import phase
from compilecache.engines.programfile import Summary
from compilecache.shapes import CompileTarget
from compilecache.workload import Workload

SEED = 20_240_601
PROJECTIONS = 3
"""Products with random signs that are kept of each tensor."""

TOLERANCES = {"float64": 1e-9, "float32": 1e-3}
TOLERANCE = 2e-2
"""Relative to a tensor's norm; for half precisions, where kernels that add up in another order differ
by a few thousandths."""

EAGER = 5
"""How many times as much where eager is the reference: it rounds between operations, fused code does not."""

SMALL = 1e-3
"""A gradient this small beside the largest is noise: it is compared on the largest one's scale."""


Reference = dict[str, Summary]
"""Output or gradient, by name."""


def tolerance(dtype: str) -> float:
    """What differences are allowed for a floating dtype, relative to each tensor's norm."""
    return TOLERANCES.get(dtype, TOLERANCE)


def reference(
    workload: Workload, target: CompileTarget, module: nn.Module, program: Program
) -> Reference:
    """What the program computes on a copy of the module with parameters from the seed.

    The module itself is not touched. Raises whatever the step raises, torch.OutOfMemoryError too.
    """
    device = torch.device(target.device)
    with _random_states(device), _twin(module, device) as twin:
        function = workload.functions(twin)[target.spec.function]
        outputs: list[object] = []
        dispatch.attach_only(function, program, outputs.append)
        with phase(target.spec, twin):
            inputs = workload.make_inputs(target.spec, twin, device)
            workload.step(target.spec, twin, inputs)
        return dict(_summaries(outputs, twin))


def difference(mine: Reference, theirs: Reference) -> tuple[str, float]:
    """The output or gradient that differs most, and by how much of its norm; inf for a missing one."""
    worst = ("", 0.0)
    largest = max(
        (s.norm for name, s in theirs.items() if name.startswith("gradient")), default=0.0
    )
    for name in sorted({*mine, *theirs}):
        here, there = mine.get(name), theirs.get(name)
        if here is None or there is None or here.elements != there.elements:
            return name, math.inf
        floor = SMALL * largest if name.startswith("gradient") else 0.0
        scale = max(there.norm, floor)
        pairs = zip((here.norm, *here.products), (there.norm, *there.products), strict=True)
        gap = max(abs(a - b) for a, b in pairs)
        relative = gap / scale if scale else (0.0 if gap == 0 else math.inf)
        if not math.isfinite(relative):
            return name, math.inf
        if relative > worst[1]:
            worst = (name, relative)
    return worst


@contextmanager
def _twin(module: nn.Module, device: torch.device) -> Iterator[nn.Module]:
    """A copy of the module on its device, whose floating parameters and buffers come from the seed."""
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        twin = copy.deepcopy(torch_names.original(module))
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
    generator = torch.Generator(device).manual_seed(SEED)
    with torch.no_grad():
        for tensor in [*twin.parameters(), *twin.buffers()]:
            if tensor.is_floating_point():
                _draw(tensor, generator)
    yield twin


def _draw(tensor: Tensor, generator: torch.Generator) -> None:
    """Values that keep numbers in range: near one for vectors, small and centred for matrices."""
    if tensor.dim() <= 1:
        tensor.uniform_(0.5, 1.5, generator=generator)
    else:
        tensor.normal_(0.0, tensor.shape[-1] ** -0.5, generator=generator)


@contextmanager
def _random_states(device: torch.device) -> Iterator[None]:
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices, device_type="cuda"):
        torch.manual_seed(SEED)
        yield


def _summaries(outputs: list[object], module: nn.Module) -> Iterator[tuple[str, Summary]]:
    for place, tensor in enumerate(_tensors(outputs)):
        yield f"output {place}", _summary(tensor)
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            yield f"gradient {name}", _summary(parameter.grad)


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from _tensors([getattr(value, field.name) for field in dataclasses.fields(value)])


@torch.no_grad()
def _summary(tensor: Tensor) -> Summary:
    flat = tensor.detach().reshape(-1)
    flat = flat.abs() if flat.is_complex() else flat
    flat = flat.to(torch.float32 if flat.dtype != torch.float64 else torch.float64)
    generator = torch.Generator(flat.device).manual_seed(SEED)
    products = []
    for _ in range(PROJECTIONS):
        signs = torch.randint(
            0, 2, flat.shape, generator=generator, device=flat.device, dtype=torch.int8
        )
        products.append(float((flat * (signs.to(flat.dtype) * 2 - 1)).sum(dtype=torch.float64)))
    norm = float(torch.linalg.vector_norm(flat, dtype=torch.float64))
    if not all(map(math.isfinite, (norm, *products))):
        raise ValueError("the canary's numbers are not finite")
    return Summary(flat.numel(), norm, tuple(products))
