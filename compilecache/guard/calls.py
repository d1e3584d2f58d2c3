"""The planned functions of a sealed process: each call says what it is before it goes on."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import nn

from compilecache import torch_names
from compilecache.guard.failure import Failure
from compilecache.guard.gate import Gate
from compilecache.shapes import InputSpec
from compilecache.workload import Workload


@dataclass(frozen=True, slots=True, eq=False)
class PlannedFunction:
    """One compiled function of one replica."""

    name: str
    """As the plan calls it."""
    device: str
    """Where its replica lives."""
    function: nn.Module
    """What the trainer calls."""
    replica: nn.Module
    """The model it belongs to."""
    codes: frozenset[CodeType]
    """What Dynamo looks up first when it is called."""

    @property
    def words(self) -> str:
        """Its class, and where that stands."""
        forward = type(torch_names.original(self.function)).forward
        code = forward.__code__
        return f"{forward.__qualname__} ({code.co_filename}:{code.co_firstlineno})"


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a planned function that is under way."""

    planned: PlannedFunction
    args: tuple[object, ...]
    kwargs: Mapping[str, object]

    def spec(self, workload: Workload) -> InputSpec | None:
        """The spec that the call belongs to; None when the workload cannot tell."""
        phase = "train" if torch.is_grad_enabled() else "eval"
        signature = inspect.signature(torch_names.original(self.planned.function).forward)
        try:
            inputs = dict(signature.bind(*self.args, **self.kwargs).arguments)
            for name, parameter in signature.parameters.items():
                if parameter.kind is parameter.VAR_KEYWORD:
                    inputs.update(inputs.pop(name, {}))
            spec = workload.spec_of(self.planned.name, inputs, phase)
        except Exception:  # only words: what a workload cannot describe is still refused
            return None
        if spec is not None and spec.example is not None:
            return spec.model_copy(update={"positional": len(self.args)})
        return spec


class Again(BaseException):
    """Leaves a call of which nothing has run yet, to be made again after ``first``.

    Not an Exception: nothing between the call and where torch looked for its entry may catch it.
    """

    def __init__(self, first: Callable[[], None] | None = None) -> None:
        self.first = first
        super().__init__("the call is made again")


class _Current(threading.local):
    call: tuple[PlannedFunction, tuple[object, ...], dict[str, object]] | None = None
    tries = 0


_current = _Current()

TRIES = 1000
"""How often a call is made again. Each time torch overlooked an entry that fits, which is rare."""


def can_be_made_again(code: CodeType) -> bool:
    """Whether the frame is the own one of the call that this thread is in, so nothing of it ran."""
    call = _current.call
    return call is not None and code in call[0].codes and _current.tries < TRIES


def tries() -> int:
    """How often this thread's call has been made again."""
    return _current.tries


def current() -> Call | None:
    """The call that this thread is in."""
    return None if _current.call is None else Call(*_current.call)


@contextmanager
def announced(planned: PlannedFunction, failure: Failure, gate: Gate | None) -> Iterator[None]:
    """Until the context ends, calls of the function are known, stop with the run, pass the gate."""
    holder, name = _slot(planned.function)
    compiled = holder[name]
    ended = threading.Event()
    announcing = _announcing(planned, compiled, failure, gate, ended)
    holder[name] = announcing
    try:
        yield
    finally:
        ended.set()
        if holder.get(name) is announcing:  # else somebody compiled it anew, or sealed it again
            holder[name] = compiled


def _slot(function: nn.Module) -> tuple[dict[str, Any], str]:
    """Where a compiled module keeps what calling it runs."""
    wrapped = torch_names.original(function) is not function
    return vars(function), "forward" if wrapped else "_compiled_call_impl"


def _announcing(
    planned: PlannedFunction,
    compiled: Callable[..., Any],
    failure: Failure,
    gate: Gate | None,
    ended: threading.Event,
) -> Callable[..., Any]:
    stopping = failure.stopping
    inner = compiled if gate is None else _gated(compiled, gate, planned.device)

    def call(*args: Any, **kwargs: Any) -> Any:
        if ended.is_set():
            return compiled(*args, **kwargs)
        if stopping.is_set():
            failure.check()
        before = _current.call
        _current.call = (planned, args, kwargs)
        try:
            return inner(*args, **kwargs)
        except Again as left:
            return _again(left, inner, args, kwargs)
        finally:
            _current.call = before

    vars(call).update(vars(compiled))  # what Dynamo looks for when it meets the call in a trace
    vars(call)[torch_names.INNER] = compiled
    return call


def _again(left: Again, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    before = _current.tries
    try:
        while True:
            _current.tries += 1
            if left.first is not None:
                left.first()
            try:
                return inner(*args, **kwargs)
            except Again as another:
                left = another
    finally:
        _current.tries = before


def _gated(compiled: Callable[..., Any], gate: Gate, device: str) -> Callable[..., Any]:
    """A call that is in a step; the step lasts until a call that was left has been made again."""

    def call(*args: Any, **kwargs: Any) -> Any:
        gate.enter(device)
        try:
            return compiled(*args, **kwargs)
        except Again as left:
            return _again(left, compiled, args, kwargs)
        finally:
            gate.leave()

    return call
