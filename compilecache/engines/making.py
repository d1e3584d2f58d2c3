"""A program compiled for one call, and the header that says what it depends on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from pydantic import JsonValue
from torch import nn

from compilecache import aot_names, state_names
from compilecache.engines import dispatch
from compilecache.engines.conditions import Scope, conditions_of
from compilecache.engines.dispatch import NoProgram, Program
from compilecache.engines.fitting import hardware, source_digests, torch_build
from compilecache.engines.programfile import Header, sealed
from compilecache.engines.watched import tensors_digest
from compilecache.shapes import CompileTarget
from compilecache.workload import Workload

T = TypeVar("T")


def make_program(
    target: CompileTarget,
    function: nn.Module,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    options: Mapping[str, JsonValue],
) -> tuple[aot_names.Made, Header]:
    """Compiles the function for one call in this thread's grad mode.

    Raises whatever torch raises for what is no full graph, or cannot be saved.
    """
    made = aot_names.make(function, args, kwargs, options)
    scope = Scope(function, made.imports)
    conditions = conditions_of(made.guards, scope)
    unchecked = [c.source for c in conditions if scope.now(c.source) is None]
    header = Header(
        spec=target.spec,
        device=target.device,
        hardware=hardware(torch.device(target.device)),
        torch=torch_build(),
        parameters=tensors_digest(function),
        sources=source_digests(made.sources),
        imports=dict(made.imports),
        state=state_names.state_words(),
        conditions=tuple(c for c in conditions if c.source not in unchecked),
        unchecked=tuple(unchecked),
        reference=None,
        **sealed(made.data),
    )
    return made, header


class _Called(Exception):
    """Ends a step at the call that it was made for."""


def at_its_call(
    workload: Workload,
    target: CompileTarget,
    module: nn.Module,
    function: nn.Module,
    act: Callable[[tuple[object, ...], Mapping[str, object]], T],
) -> T:
    """Acts in place of the call that the workload's step makes of the function, in whatever state it makes it.

    Raises NoProgram when it makes none.
    """
    done: list[T] = []

    def call(module: nn.Module, *args: object, **kwargs: object) -> object:
        done.append(act(args, kwargs))
        raise _Called

    before = function._compiled_call_impl
    dispatch.attach_only(function, Program(call), lambda output: None)
    try:
        inputs = workload.make_inputs(target.spec, module, torch.device(target.device))
        workload.step(target.spec, module, inputs)
    except _Called:
        return done[0]
    finally:
        function._compiled_call_impl = before
    raise NoProgram("its step never calls the function")
