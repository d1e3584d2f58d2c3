"""Runs steps on a live model and leaves it bit for bit as it was."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from compilecache.errors import CompileFailed


@contextmanager
def preserving(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Parameters, buffers, gradients, train/eval modes and random states are the same afterwards.

    Raises CompileFailed when a step changed a parameter in place: that cannot be undone, and a
    warm-up step has no business doing it.
    """
    with ExitStack() as stack:
        stack.enter_context(_random_states(device))
        stack.enter_context(_modes(module))
        stack.enter_context(_buffers(module))
        stack.enter_context(_gradients(module))
        yield


@contextmanager
def _random_states(device: torch.device) -> Iterator[None]:
    cuda = [device] if device.type == "cuda" else []
    python, numpy = random.getstate(), sys.modules.get("numpy.random")
    legacy = numpy.get_state() if numpy else None
    with torch.random.fork_rng(devices=cuda, device_type="cuda"):
        try:
            yield
        finally:
            random.setstate(python)
            if numpy:
                numpy.set_state(legacy)


@contextmanager
def _modes(module: nn.Module) -> Iterator[None]:
    modes = [(child, child.training) for child in module.modules()]
    try:
        yield
    finally:
        for child, training in modes:
            child.training = training


@contextmanager
def _buffers(module: nn.Module) -> Iterator[None]:
    saved = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    objects = [(child, dict(child._buffers)) for child in module.modules() if child._buffers]
    try:
        yield
    finally:
        for child, buffers in objects:
            child._buffers.update(buffers)
        with torch.no_grad():
            for buffer, value in saved:
                if not _same(buffer, value):
                    buffer.copy_(value)


def _same(buffer: torch.Tensor, value: torch.Tensor) -> bool:
    return buffer.is_meta or bool(torch.equal(buffer, value))


@contextmanager
def _gradients(module: nn.Module) -> Iterator[None]:
    parameters = [*module.named_parameters(remove_duplicate=True)]
    gradients = [parameter.grad for _, parameter in parameters]
    hooks = [_take_accumulate_hooks(parameter) for _, parameter in parameters]
    versions = [_version(parameter) for _, parameter in parameters]
    for _, parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for (_, parameter), gradient, taken in zip(parameters, gradients, hooks, strict=True):
            parameter.grad = gradient
            _give_accumulate_hooks(parameter, taken)
    _refuse_changed(parameters, versions)


def _version(parameter: nn.Parameter) -> int | None:
    """How often it was written to; tensors made in inference mode do not count."""
    return None if parameter.is_inference() else parameter._version


def _refuse_changed(parameters: list[tuple[str, nn.Parameter]], versions: list[int | None]) -> None:
    changed = [
        name
        for (name, parameter), version in zip(parameters, versions, strict=True)
        if _version(parameter) != version
    ]
    if changed:
        raise CompileFailed(
            f"a warm-up step changed parameters in place: {', '.join(changed[:5])}",
            next_step="Let the workload's step run forward and backward only, no optimizer",
            target=changed[0],
        )


def _take_accumulate_hooks(parameter: nn.Parameter) -> dict[object, object]:
    """Sets aside hooks that run when a gradient is ready: an optimizer in backward would step.

    Emptied in place, since autograd holds on to the very dictionary.
    """
    hooks = parameter._post_accumulate_grad_hooks
    taken = dict(hooks or {})
    if hooks:
        hooks.clear()
    return taken


def _give_accumulate_hooks(parameter: nn.Parameter, taken: dict[object, object]) -> None:
    if taken and parameter._post_accumulate_grad_hooks is not None:
        parameter._post_accumulate_grad_hooks.update(taken)
