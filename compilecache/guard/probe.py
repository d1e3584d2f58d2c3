"""What a trace in one thread does to the others, found out by trying (126024, 118260)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from compilecache.guard.hooks import permitted

DEADLINE = 60.0
"""Seconds after which the probe gives up and expects the worst."""


@dataclass(frozen=True, slots=True)
class TraceEffect:
    """On a thread that does not trace, while another does."""

    refuses_compiled_calls: bool
    """A compiled function raises, since the flag of torch.fx is one for the whole process."""
    disturbs_modules: bool
    """A plain module cannot be called, since torch.fx replaces ``nn.Module.__call__`` for all."""

    @property
    def harmless(self) -> bool:
        """Nothing that the probe tries goes wrong."""
        return not (self.refuses_compiled_calls or self.disturbs_modules)


@cache
def trace_effect() -> TraceEffect:
    """Traces in a thread and calls a compiled function and a module in this one; once a process."""
    with permitted(), torch.no_grad():
        module, compiled = nn.Identity(), torch.compile(_double, backend="eager")
        argument = torch.ones(1)
        compiled(argument)
        tracing, done = threading.Event(), threading.Event()
        thread = threading.Thread(target=_trace, args=(tracing, done), daemon=True)
        thread.start()
        try:
            if not tracing.wait(DEADLINE):
                return TraceEffect(refuses_compiled_calls=True, disturbs_modules=True)
            return TraceEffect(_fails(compiled, argument), _fails(module, argument))
        finally:
            done.set()
            thread.join(DEADLINE)


def _double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def _trace(tracing: threading.Event, done: threading.Event) -> None:
    def traced(x: torch.Tensor) -> torch.Tensor:
        tracing.set()
        done.wait(DEADLINE)
        return x + 1

    with permitted():
        torch.fx.symbolic_trace(traced)


def _fails(function: Callable[..., Any], argument: torch.Tensor) -> bool:
    try:
        return not isinstance(function(argument), torch.Tensor)
    except Exception:  # whatever it raises: the call did not work
        return True
