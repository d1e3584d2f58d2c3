"""Operations of torch, written down as they are called, and called again from what was written."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from pydantic import JsonValue
from torch import Tensor

from compilecache.gpuprofile import Answer, Operation

_NAMED = torch.dtype | torch.layout | torch.memory_format
"""What is written by its name in torch."""


@dataclass
class Recorder:
    """Writes down what is called while it is entered."""

    tensors: Mapping[str, Tensor]
    _made: list[Operation] = field(default_factory=list)
    _places: dict[int, JsonValue] = field(default_factory=dict)
    """Of a tensor, by its id, as the latest call left it."""
    _alive: list[object] = field(default_factory=list)
    """So that no id is used twice."""

    def __post_init__(self) -> None:
        self._places |= {id(t): {"tensor": name} for name, t in self.tensors.items()}

    def __enter__(self) -> Recorder:
        base: Any = importlib.import_module("torch.utils._python_dispatch").TorchDispatchMode
        recorder = self

        class Mode(base):  # type: ignore[misc]
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                if func.namespace != "aten":  # asks for its device, and the like
                    return func(*args, **(kwargs or {}))
                named = {name: recorder._written(value) for name, value in (kwargs or {}).items()}
                arguments = tuple(map(recorder._written, args))
                result = func(*args, **(kwargs or {}))
                recorder._note(Operation(name=str(func), arguments=arguments, named=named), result)
                return result

        self._mode: Any = Mode()
        self._mode.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._mode.__exit__(*error)

    def leading_to(self, output: Tensor) -> Answer:
        """The calls that the output depends on."""
        if (place := self._places.get(id(output))) is None or _number(place) is None:
            raise ValueError("its output is none of an operation")
        needed, left = set[int](), list[JsonValue]([place])
        while left:
            number = _number(left.pop())
            if number is not None and number not in needed:
                needed.add(number)
                made = self._made[number]
                left += _places_in([*made.arguments, *made.named.values()])
        order = {number: new for new, number in enumerate(sorted(needed))}
        kept = tuple(_renumbered(self._made[number], order) for number in order)
        return Answer(operations=kept, output=_moved(place, order))

    def _note(self, operation: Operation, result: object) -> None:
        number = len(self._made)
        self._made.append(operation)
        self._alive.append(result)
        if isinstance(result, Tensor):
            self._places[id(result)] = {"tensor": number}
        elif isinstance(result, tuple | list):
            for item, part in enumerate(result):
                if isinstance(part, Tensor):
                    self._places[id(part)] = {"tensor": number, "item": item}

    def _written(self, value: object) -> JsonValue:
        if isinstance(value, Tensor):
            if (place := self._places.get(id(value))) is None:
                raise ValueError("it takes a tensor of its own")
            return place
        if isinstance(value, _NAMED):
            return {"torch": word(value)}
        if isinstance(value, torch.device):
            return {"device": "query"}
        if isinstance(value, float) and not math.isfinite(value):
            return {"number": str(value)}
        if isinstance(value, tuple | list):
            return [self._written(item) for item in value]
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise ValueError(f"{type(value).__name__} is no plain value")


def carry_out(answer: Answer, tensors: Mapping[str, Tensor]) -> Tensor:
    """Calls its operations on these tensors. Raises ValueError for what this torch does not take."""
    made: list[Any] = []

    def read(value: JsonValue) -> Any:
        if isinstance(value, list):
            return [read(item) for item in value]
        if not isinstance(value, dict):
            return value
        if "tensor" in value:
            place: Any = value["tensor"]
            item: Any = value.get("item")
            found = tensors[place] if isinstance(place, str) else made[place]
            return found if item is None else found[item]
        if "torch" in value:
            named_so = getattr(torch, str(value["torch"]))
            if not isinstance(named_so, _NAMED):
                raise ValueError(f"torch.{value['torch']} is no type or layout")
            return named_so
        return tensors["query"].device if "device" in value else float(str(value["number"]))

    try:
        for one in answer.operations:
            function: Any = reduce(getattr, one.name.split("."), torch.ops)
            named = {name: read(value) for name, value in one.named.items()}
            made.append(function(*map(read, one.arguments), **named))
        output = read(answer.output)
    except (AttributeError, LookupError, TypeError, RuntimeError) as error:
        raise ValueError(str(error)) from error
    if not isinstance(output, Tensor):
        raise ValueError("its output is no tensor")
    return output


def word(thing: object) -> str:
    """Of a dtype and the like: "bfloat16"."""
    return str(thing).removeprefix("torch.")


def _number(place: JsonValue) -> int | None:
    """Of the call that made it; None for a tensor of the question."""
    number = place.get("tensor") if isinstance(place, dict) else None
    return number if isinstance(number, int) else None


def _places_in(values: Iterable[JsonValue]) -> Iterator[JsonValue]:
    for value in values:
        if isinstance(value, list):
            yield from _places_in(value)
        elif isinstance(value, dict):
            yield value


def _renumbered(operation: Operation, order: Mapping[int, int]) -> Operation:
    return Operation(
        name=operation.name,
        arguments=tuple(_moved(value, order) for value in operation.arguments),
        named={name: _moved(value, order) for name, value in operation.named.items()},
    )


def _moved(value: JsonValue, order: Mapping[int, int]) -> JsonValue:
    """The same place or places, after calls have got other numbers."""
    if isinstance(value, list):
        return [_moved(item, order) for item in value]
    number = _number(value)
    return {**value, "tensor": order[number]} if number is not None else value  # type: ignore[dict-item]
