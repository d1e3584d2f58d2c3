"""What tells one call of a program from another: the shapes, kinds and values of its arguments.

A program was compiled for one such call. Everything that the arguments can differ in is part of the
key, down to the cells of a ``mask_mod``; what cannot be described makes no key, and no program.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping
from enum import Enum
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor

_PLAIN = frozenset(
    {
        bool,
        bytes,
        int,
        str,
        type(None),
        type(Ellipsis),
        torch.device,
        torch.dtype,
        torch.layout,
        torch.memory_format,
        torch.Size,
    }
)
"""Kinds whose values say everything."""

DEEPEST = 16
"""Containers within containers; beyond it something refers to itself."""


class Undescribed(Exception):
    """An argument holds something that a key cannot tell from something else."""


class _Again(tuple[int, ...]):
    """For each tensor of a call the first that is the same one; last in a key, where any is."""


Key = tuple[Hashable, ...]


def apart(key: Key) -> Key:
    """The key of the same call with tensors of their own. Its program is right for both.

    No program changes its inputs, so it cannot tell; one made for a single tensor could.
    """
    return key[:-1] if isinstance(key[-1], _Again) else key


class CallKey:
    """Makes the keys of one function's calls; by position or by name is the same call."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        # As it is called: what decorates it may tell arguments by position from those by name.
        parameters = list(inspect.signature(forward, follow_wrapped=False).parameters.values())
        if parameters and parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL:
            parameters = parameters[1:]  # the module
        self._named = [
            (parameter.name, parameter.default)
            for parameter in parameters
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ]
        self._names = frozenset(name for name, _ in self._named)
        self._by_position = sum(
            parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
            for parameter in parameters
        )

    def __call__(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Key:
        """The key of a call in this thread's grad mode. Raises Undescribed."""
        out: list[Any] = [torch.is_grad_enabled(), torch.is_inference_mode_enabled()]
        tensors: list[Tensor] = []
        count, given = len(args), 0
        for index, (name, default) in enumerate(self._named):
            if index < count and index < self._by_position:
                _describe(args[index], out, tensors, 0)
            elif name in kwargs:
                given += 1
                _describe(kwargs[name], out, tensors, 0)
            else:
                _describe(default, out, tensors, 0)
        if count > self._by_position:
            _describe(args[self._by_position :], out, tensors, 0)
        if given < len(kwargs):
            more = {name: kwargs[name] for name in sorted(kwargs.keys() - self._names)}
            _describe(more, out, tensors, 0)
        if len({id(tensor) for tensor in tensors}) < len(tensors):
            first: dict[int, int] = {}
            places = (first.setdefault(id(t), place) for place, t in enumerate(tensors))
            out.append(_Again(places))
        return tuple(out)

    def words(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dict[str, str]:
        """Each argument in a few words, for messages."""
        named = {name: value for (name, _), value in zip(self._named, args, strict=False)}
        return {name: _words(value) for name, value in {**named, **kwargs}.items()}


def _describe(value: Any, out: list[Any], tensors: list[Tensor], depth: int) -> None:
    kind = type(value)
    if kind is Tensor:
        tensors.append(value)
        out += (value.shape, value.dtype, value.device, value.requires_grad, _strides(value))
    elif kind in _PLAIN:
        out += (kind, value)
    elif kind is float or kind is complex:
        out += (kind, repr(value))  # 0.0 equals -0.0, and nan not itself
    elif depth > DEEPEST:
        raise Undescribed(f"a {kind.__name__} that holds itself")
    elif isinstance(value, list | tuple):
        out += (kind, len(value))
        for item in value:
            _describe(item, out, tensors, depth + 1)
    elif isinstance(value, dict):
        out += (kind, len(value))
        for name, item in value.items():
            _describe(name, out, tensors, depth + 1)
            _describe(item, out, tensors, depth + 1)
    else:
        _describe_object(value, out, tensors, depth)


def _describe_object(value: Any, out: list[Any], tensors: list[Tensor], depth: int) -> None:
    kind = type(value)
    if isinstance(value, FunctionType):
        # The code object itself: it stays alive in the key, so its id is nobody else's.
        out += (kind, id(value.__code__), value.__code__)
        _describe((value.__defaults__, value.__kwdefaults__), out, tensors, depth + 1)
        for cell in value.__closure__ or ():
            _describe(_content(cell), out, tensors, depth + 1)
    elif isinstance(value, MethodType):
        out.append(kind)
        _describe(value.__func__, out, tensors, depth + 1)
        _describe(value.__self__, out, tensors, depth + 1)
    elif isinstance(value, type | Enum) or kind.__module__ == "builtins":
        if kind.__hash__ is None or not isinstance(value, type | Enum | Hashable):
            raise Undescribed(f"a {kind.__name__}")
        if not isinstance(value, type | Enum) and kind.__name__ != "builtin_function_or_method":
            raise Undescribed(f"a {kind.__name__}")
        out += (kind, value)
    elif isinstance(value, Tensor | torch.nn.Module) or not hasattr(value, "__dict__"):
        raise Undescribed(f"a {kind.__qualname__}")
    else:
        out.append(kind)
        _describe(vars(value), out, tensors, depth + 1)


def _content(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:
        return None  # not filled yet


def _strides(tensor: Tensor) -> object:
    """None for a plain contiguous tensor; strides of dimensions of one element mean nothing."""
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        raise Undescribed(f"a tensor of layout {tensor.layout}, conjugated or negated")
    if tensor.is_contiguous():
        return None
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return tuple(stride if size != 1 else 1 for size, stride in pairs)


def _words(value: object) -> str:
    if isinstance(value, Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        return f"{list(value.shape)} {kind} {value.device}"
    return repr(value)[:60] if type(value) in _PLAIN else type(value).__name__
