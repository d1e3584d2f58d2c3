"""The programs of one compiled function, looked up by what a call is called with.

Installed where ``nn.Module.compile()`` puts its own, so ``model(**batch)`` is unchanged. A call that
no program fits goes on to the function as ``torch.compile`` made it: after priming the seal says
what becomes of that.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from compilecache import torch_names
from compilecache.engines.callkey import CallKey, Undescribed, apart
from compilecache.engines.watched import Watch

_DISPATCHER = "_compilecache_programs"
"""Where an installed call keeps its dispatcher."""


_ARGUMENT = "an argument holds what no program can be looked up by"


@dataclass(slots=True)
class Program:
    """One program, loaded for one module."""

    call: Callable[..., Any]
    """Takes the module first."""
    watch: Watch | None = None
    """What must hold for it to be right; None where that was just checked."""


class NoProgram(Exception):
    """No program can be made of a target, or this one cannot be used; in words."""


Provide = Callable[[tuple[object, ...], Mapping[str, object], Hashable], Program]
"""Makes or loads the program of a call that has none."""


class Dispatcher:
    """Finds the program of a call in one look-up."""

    def __init__(self, function: nn.Module, compiled: Callable[..., Any]) -> None:
        self.function = function
        self.compiled = compiled
        """The function as torch.compile made it."""
        self.key = CallKey(type(function).forward)
        self.table: dict[Hashable, Program] = {}
        self.provide: Provide | None = None
        """Set while a target is warmed."""
        self.served = 0
        """Calls that were served meanwhile by programs that were there already."""

    def find(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Program | None:
        """The program that is right for a call now; None when none is.

        Raises NoProgram while a target is warmed of which none can be made.
        """
        try:
            key = self.key(args, kwargs)
        except Undescribed as error:
            if self.provide is not None:
                raise NoProgram(f"{_ARGUMENT}: {error}") from None
            return None
        program = self.table.get(key) or self.table.get(apart(key))
        fits = program is not None and (program.watch is None or program.watch.holds())
        if self.provide is None:
            return program if fits else None
        if fits:
            self.served += 1
            return program
        program = self.table[key] = self.provide(args, kwargs, key)
        return program

    def why(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> list[str]:
        """Why no program was taken for a call, in words; empty when none is like it."""
        try:
            key = self.key(args, kwargs)
            program = self.table.get(key) or self.table.get(apart(key))
        except Undescribed as error:
            return [f"{_ARGUMENT}: {error}"]
        return [] if program is None or program.watch is None else program.watch.why()


def of(function: nn.Module) -> Dispatcher | None:
    """The dispatcher that is installed for a function; None when there is none."""
    call = vars(function).get("_compiled_call_impl")
    while call is not None:
        found = vars(call).get(_DISPATCHER) if hasattr(call, "__dict__") else None
        if found is not None:
            return found if isinstance(found, Dispatcher) else None
        call = getattr(call, torch_names.INNER, None)
    return None


def attach(function: nn.Module) -> Dispatcher:
    """Installs a dispatcher for a function that was compiled in place, or gives the one it has."""
    present = of(function)
    if present is not None:
        return present
    compiled: Any = function._compiled_call_impl
    dispatcher = Dispatcher(function, compiled)
    find = dispatcher.find

    def call(*args: Any, **kwargs: Any) -> Any:
        # Not is_compiling(): while any thread compiles, that is true in all of them.
        program = None if torch.compiler.is_dynamo_compiling() else find(args, kwargs)
        if program is None:
            return compiled(*args, **kwargs)
        return program.call(function, *args, **kwargs)

    vars(call).update(vars(compiled))  # what Dynamo looks for when it meets the call in a trace
    vars(call)[torch_names.INNER] = compiled
    vars(call)[_DISPATCHER] = dispatcher
    function._compiled_call_impl = call
    _call_directly(type(function))
    return dispatcher


def attach_only(function: nn.Module, program: Program, note: Callable[[object], None]) -> None:
    """Every call of the function is this program, whatever it is called with; outputs are noted."""

    def call(*args: Any, **kwargs: Any) -> Any:
        output = program.call(function, *args, **kwargs)
        note(output)
        return output

    function._compiled_call_impl = call


def remove(function: nn.Module) -> None:
    """The function as ``torch.compile`` made it, without its programs."""
    dispatcher = of(function)
    if dispatcher is not None:
        function._compiled_call_impl = dispatcher.compiled


def _call_directly(cls: type[nn.Module]) -> None:
    """Lets instances with programs be called past ``nn.Module.__call__``.

    torch.fx replaces that for the whole process while any thread traces, and a call in another
    thread fails. Classes of torch's own stay as they are.
    """
    if cls.__module__.partition(".")[0] == "torch" or cls.__call__ is not nn.Module.__call__:
        return

    def past_module(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        call = self.__dict__.get("_compiled_call_impl")
        if call is not None and torch_names.INNER in call.__dict__:
            return call(*args, **kwargs)
        return nn.Module.__call__(self, *args, **kwargs)

    cls.__call__ = past_module  # type: ignore[method-assign]
