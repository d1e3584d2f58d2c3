"""A program compiled for one call, and the header that says what it depends on."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from pydantic import JsonValue
from torch import nn

from compilecache import aot_names, state_names
from compilecache.engines.conditions import Scope, conditions_of
from compilecache.engines.fitting import hardware, source_digests, torch_build
from compilecache.engines.programfile import Header, sealed
from compilecache.engines.watched import tensors_digest
from compilecache.shapes import CompileTarget


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
