"""Names for what is inside the arguments of a call, so that a plan can list them flat.

A list, tuple or dictionary argument is written as its leaves: ``states[0]`` is in a list,
``states(0)`` in a tuple, ``states["h"]`` in a dictionary. An empty one is ``states[]``,
``states()`` or ``states{}``. The kind of container is part of the name because Dynamo guards on it.

Only the standard library is imported here: the observed process loads this file by its path.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

_STEP = re.compile(r'\[(?P<list>\d+)\]|\((?P<tuple>\d+)\)|\[(?P<dict>"(?:[^"\\]|\\.)*")\]')
_NAME = re.compile(r"[^\[({]+")
_EMPTY: dict[str, type[list[object]] | type[tuple[object, ...]] | type[dict[str, object]]] = {
    "[]": list,
    "()": tuple,
    "{}": dict,
}

Step = tuple[str, int | str]


def leaves(name: str, value: object) -> Iterator[tuple[str, object]]:
    """Every leaf of an argument with its name. Anything but a plain container is a leaf."""
    if type(value) in (list, tuple) and isinstance(value, list | tuple):
        opening, closing = "[]" if isinstance(value, list) else "()"
        if not value:
            yield name + opening + closing, None
        for index, item in enumerate(value):
            yield from leaves(f"{name}{opening}{index}{closing}", item)
    elif type(value) is dict and all(isinstance(key, str) for key in value):
        if not value:
            yield name + "{}", None
        for key, item in value.items():
            yield from leaves(f"{name}[{json.dumps(key)}]", item)
    else:
        yield name, value


def rebuild(flat: Mapping[str, object]) -> dict[str, object]:
    """The arguments that ``leaves`` took apart. Raises ValueError for names that fit nothing."""
    root = _Node("dict")
    for name, value in flat.items():
        argument, steps, empty = _parse(name)
        root.put([("dict", argument), *steps], _EMPTY[empty]() if empty else value)
    built = root.build()
    assert isinstance(built, dict)
    return built


def _parse(name: str) -> tuple[str, list[Step], str]:
    empty = name[-2:] if name[-2:] in _EMPTY else ""
    path = name.removesuffix(empty) if empty else name
    start = _NAME.match(path)
    if start is None:
        raise ValueError(f"'{name}' names no argument")
    position, steps = start.end(), list[Step]()
    while position < len(path):
        step = _STEP.match(path, position)
        if step is None or step.lastgroup is None:
            raise ValueError(f"'{name}' cannot be read from '{path[position:]}' on")
        text = step[step.lastgroup]
        steps.append((step.lastgroup, json.loads(text)))
        position = step.end()
    return start[0], steps, empty


class _Node:
    """A container being put together."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._items: dict[int | str, object] = {}

    def put(self, steps: list[Step], value: object) -> None:
        kind, key = steps[0]
        if kind != self._kind:
            raise ValueError(f"'{key}' is named both as part of a {self._kind} and of a {kind}")
        if len(steps) == 1:
            self._items[key] = value
            return
        child = self._items.setdefault(key, _Node(steps[1][0]))
        if not isinstance(child, _Node):
            raise ValueError(f"'{key}' is named both as a value and as a {steps[1][0]}")
        child.put(steps[1:], value)

    def build(self) -> object:
        built = {k: v.build() if isinstance(v, _Node) else v for k, v in self._items.items()}
        if self._kind == "dict":
            return built
        if sorted(built, key=str) != sorted(range(len(built)), key=str):
            raise ValueError(f"a {self._kind} lacks items: only {list(built)} are named")
        items = [built[index] for index in range(len(built))]
        return items if self._kind == "list" else tuple(items)
