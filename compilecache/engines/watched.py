"""What is looked at in every call of a program: that the module is still the one it was loaded for.

Plain comparisons of lists, done in C: a few microseconds for a model of a hundred parameters, and
no guard tree. Whatever differs makes the call a miss; ``Watch.why`` says what.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter, contains, getitem, is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from compilecache import state_names
from compilecache.engines.conditions import ABSENT, Cells, Scope, parsed
from compilecache.engines.programfile import Condition
from compilecache.errors import PlanError

_CONSTANT = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


_INSIDE = ("_parameters", "_buffers", "_modules", *state_names.HOOKS)


_Place = tuple[dict[str, Any], str, str]
"""A dictionary, a key in it, and what people call that."""


class Slots:
    """Places in dictionaries and what should be there."""

    def __init__(self, found: Iterable[tuple[dict[str, Any], str, Any, str]]) -> None:
        unique = {(id(where), key): (where, key, value, name) for where, key, value, name in found}
        rows = list(unique.values())
        self._where = tuple(row[0] for row in rows)
        self._keys = tuple(row[1] for row in rows)
        self._values = [row[2] for row in rows]
        self._names = tuple(row[3] for row in rows)

    def same(self) -> bool:
        """Whether the very same objects are there."""
        try:
            return all(map(is_, map(getitem, self._where, self._keys), self._values))
        except KeyError:
            return False

    def equal(self) -> bool:
        """Whether equal values are there."""
        try:
            return list(map(getitem, self._where, self._keys)) == self._values
        except KeyError:
            return False

    def changed(self) -> list[str]:
        """Names of the places whose content is another object, or gone."""
        rows = zip(self._where, self._keys, self._values, self._names, strict=True)
        return [
            f"{name} was replaced" if key in where else f"{name} is gone"
            for where, key, value, name in rows
            if where.get(key) is not value
        ]

    def differing(self) -> list[str]:
        """What differs in value, in words."""
        rows = zip(self._where, self._keys, self._values, self._names, strict=True)
        return [
            f"{name} is {where.get(key, ABSENT)!r}, was {value!r}"
            for where, key, value, name in rows
            if where.get(key, ABSENT) != value
        ]


class Sizes:
    """How much some containers hold: an item more is a layer, or a step, more."""

    def __init__(self, found: Iterable[tuple[Any, str]]) -> None:
        rows = list({id(container): (container, name) for container, name in found}.values())
        self._containers = tuple(container for container, _ in rows)
        self._names = tuple(name for _, name in rows)
        self._sizes = [len(container) for container in self._containers]

    def same(self) -> bool:
        """Whether they hold as many things as before."""
        return list(map(len, self._containers)) == self._sizes

    def differing(self) -> list[str]:
        """Which do not, in words."""
        rows = zip(self._containers, self._names, self._sizes, strict=True)
        return [f"{n} holds {len(c)} items, held {size}" for c, n, size in rows if len(c) != size]


class Getters:
    """Values that lie in no dictionary: of slots, properties, classes, lists, closures."""

    def __init__(self, found: Iterable[tuple[Callable[[Any], Any], Any, Any, str]]) -> None:
        rows = list({name: (get, base, value, name) for get, base, value, name in found}.values())
        self._get = [(get, base) for get, base, _, _ in rows]
        self._values = [value for _, _, value, _ in rows]
        self._names = [name for _, _, _, name in rows]

    def equal(self) -> bool:
        """Whether equal values are there."""
        try:
            return [get(base) for get, base in self._get] == self._values
        except (AttributeError, LookupError, TypeError):
            return False

    def differing(self) -> list[str]:
        """What differs, in words."""
        found = []
        for (get, base), value, name in zip(self._get, self._values, self._names, strict=True):
            try:
                now = get(base)
            except (AttributeError, LookupError, TypeError):
                now = ABSENT
            if now != value:
                found.append(f"{name} is {now!r}, was {value!r}")
        return found


class LiveTensors:
    """The tensors of a module that a program reads: the live ones, whoever wrote or replaced them.

    Replacing one by another of the same shape, dtype, strides, device and ties is fine (a loaded
    checkpoint), and so is freezing: a program then computes a gradient that nobody takes.
    """

    def __init__(self, module: nn.Module, more: Iterable[_Place] = ()) -> None:
        known = [*_tensors(module), *more]
        rows = list(
            {(id(where), key): (where, key, name) for where, key, name in reversed(known)}.values()
        )
        self._where = tuple(row[0] for row in rows)
        self._keys = tuple(row[1] for row in rows)
        self._names = tuple(row[2] for row in rows)
        self._tensors = [where[key] for where, key, _ in rows]
        self._shapes = [tensor.shape for tensor in self._tensors]
        self._dtypes = [tensor.dtype for tensor in self._tensors]
        self._devices = [tensor.device for tensor in self._tensors]
        self._strides = [tensor.stride() for tensor in self._tensors]
        self._ties = ties(self._tensors)
        self._trained = [tensor.requires_grad for tensor in self._tensors]

    def fit(self) -> bool:
        """Whether the program can take them."""
        try:
            now: list[Any] = list(map(getitem, self._where, self._keys))
        except KeyError:
            return False
        if not all(map(is_, now, self._tensors)):
            if self._misfits(now):
                return False
            self._tensors = now
            return True
        return (
            [tensor.dtype for tensor in now] == self._dtypes
            and [tensor.shape for tensor in now] == self._shapes
            and [tensor.device for tensor in now] == self._devices
            and (
                [tensor.requires_grad for tensor in now] == self._trained or not self._misfits(now)
            )
        )

    def why(self) -> list[str]:
        """What does not fit, in words."""
        gone = [
            f"{name} is gone"
            for where, key, name in zip(self._where, self._keys, self._names, strict=True)
            if key not in where
        ]
        return gone or self._misfits(list(map(getitem, self._where, self._keys)))

    def _misfits(self, now: Sequence[Any]) -> list[str]:
        found = []
        for place, (tensor, name) in enumerate(zip(now, self._names, strict=True)):
            if not isinstance(tensor, Tensor):
                found.append(f"{name} is {type(tensor).__name__}")
                continue
            pairs = (
                ("shape", list(tensor.shape), list(self._shapes[place])),
                ("dtype", tensor.dtype, self._dtypes[place]),
                ("device", tensor.device, self._devices[place]),
                ("strides", tensor.stride(), self._strides[place]),
            )
            found += [f"{name} has {what} {a}, had {b}" for what, a, b in pairs if a != b]
            if tensor.requires_grad and not self._trained[place]:
                found.append(f"{name} was frozen and is trained now")
        if not found and ties(now) != self._ties:
            found.append("parameters are tied in another way")
        return found


def _kind(tensor: Any) -> object:
    """What a program depends on of a tensor."""
    if not isinstance(tensor, Tensor):
        return type(tensor)
    return tensor.shape, tensor.dtype, tensor.device, tensor.stride(), tensor.requires_grad


def _tensors(module: nn.Module) -> Iterable[_Place]:
    for prefix, child in module.named_modules(remove_duplicate=False):
        for held in (child._parameters, child._buffers):
            for key, tensor in held.items():
                if tensor is not None:
                    yield held, key, f"{prefix}.{key}" if prefix else key


def tensors_digest(module: nn.Module) -> str:
    """Over names, shapes, dtypes, strides, requires_grad and ties; not over values."""
    rows = [(name, held[key]) for held, key, name in _tensors(module)]
    tied = ties([tensor for _, tensor in rows])
    lines = [
        f"{name} {tuple(t.shape)} {t.dtype} {t.stride()} {t.requires_grad} {place}"
        for (name, t), place in zip(rows, tied, strict=True)
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def ties(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """For each tensor the place of the first that is the same object."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(id(tensor), place) for place, tensor in enumerate(tensors))


@dataclass(slots=True)
class Watch:
    """Everything that is looked at in a call of one program."""

    tensors: LiveTensors
    objects: Slots
    """Submodules and other objects on the way to what the trace read."""
    constants: Slots
    """Numbers, strings and flags that the trace read."""
    others: Getters
    """The same, where they lie in no dictionary."""
    sizes: Sizes
    """Of lists of layers and other containers that the trace went through."""
    hooks: tuple[dict[Any, Any], ...]
    """All must stay empty: hooks are not part of a program."""
    forwards: tuple[dict[str, Any], ...]
    """Dictionaries of the modules: none may get a ``forward`` of its own."""
    state: state_names.State
    """Autocast, default dtype and the like."""

    def holds(self) -> bool:
        """Whether the program is right for a call now."""
        return (
            self.state.same()
            and self.objects.same()
            and self.constants.equal()
            and self.others.equal()
            and self.sizes.same()
            and not any(self.hooks)
            and not any(map(contains, self.forwards, repeat("forward")))
            and self.tensors.fit()
        )

    def why(self) -> list[str]:
        """Why it is not, in words; empty when it is."""
        hooks = ["a hook was registered on the model"] if any(self.hooks) else []
        patched = any("forward" in held for held in self.forwards)
        return [
            *self.state.differences(),
            *self.objects.changed(),
            *self.constants.differing(),
            *self.others.differing(),
            *self.sizes.differing(),
            *hooks,
            *(["a module has a forward of its own"] if patched else []),
            *self.tensors.why(),
        ]


def watch_of(
    module: nn.Module, conditions: Sequence[Condition], scope: Scope, state: state_names.State
) -> Watch:
    """What to look at from now on, taken as it is."""
    found = _Found()
    for condition in conditions:
        if condition.value != ABSENT:
            found.follow(parsed(condition.source), scope)
    children = list(module.modules())
    found.objects += [
        (child._modules, key, inner, key)
        for child in children
        for key, inner in child._modules.items()
    ]
    hooks = [held for child in children for held in state_names.hooks_of(child)]
    found.containers += [(child._modules, f"a {type(child).__name__}") for child in children]
    return Watch(
        LiveTensors(module, found.tensors),
        Slots(found.objects),
        Slots(found.constants),
        Getters(found.others),
        Sizes(found.containers),
        (*hooks, *state_names.global_hooks()),
        tuple(vars(child) for child in children),
        state,
    )


class _Found:
    """Places on the way to what a trace read, and what it read there."""

    def __init__(self) -> None:
        self.objects: list[tuple[dict[str, Any], str, Any, str]] = []
        self.constants: list[tuple[dict[str, Any], str, Any, str]] = []
        self.others: list[tuple[Callable[[Any], Any], Any, Any, str]] = []
        self._seen: dict[str, Any] = {}
        self.tensors: list[_Place] = []
        self.containers: list[tuple[Any, str]] = []

    def follow(self, node: ast.expr, scope: Scope) -> tuple[Any, str]:
        """What a source gives, and its text; every step that is a look-up is noted, once."""
        if isinstance(node, ast.Attribute):
            base, text = self.follow(node.value, scope)
            text = f"{text}.{node.attr}"
            if text not in self._seen:
                held = getattr(base, "__dict__", None)
                where = held if type(held) is dict and node.attr in held else None
                self._note(where, node.attr, attrgetter(node.attr), base, text)
                self._seen[text] = getattr(base, node.attr)
            return self._seen[text], text
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            base, text = self.follow(node.value, scope)
            key = node.slice.value
            text = f"{text}[{key!r}]"
            if text not in self._seen:
                where = scope.globals if base is scope and key in scope.globals else None
                where = base if isinstance(base, dict) and key in base else where
                if base is not scope or where is not None:
                    self._note(where, key, itemgetter(key), base, text)
                self._seen[text] = base[key]
            return self._seen[text], text
        return scope.evaluate(node), ast.unparse(node)

    def _note(
        self,
        where: dict[Any, Any] | None,
        key: Any,
        get: Callable[[Any], Any],
        base: Any,
        name: str,
    ) -> None:
        value = where[key] if where is not None else get(base)
        if key in _INSIDE:
            return  # nobody exchanges the dictionaries themselves
        if isinstance(value, list | dict | set):
            self.containers.append((value, name))
        if isinstance(value, Tensor):
            if where is None:
                self.others.append((lambda base: _kind(get(base)), base, _kind(value), name))
            else:  # parameters and buffers too: known twice is known once
                self.tensors.append((where, key, name))
            return
        constant = isinstance(value, _CONSTANT)
        if where is not None:
            (self.constants if constant else self.objects).append((where, key, value, name))
        elif constant or isinstance(base, Cells):
            self.others.append((get, base, value, name))


def refuse_unwatchable(module: nn.Module) -> None:
    """Raises PlanError for a module of which no program can be made, with the reason."""
    reason = _unwatchable(module)
    if reason is not None:
        raise PlanError(reason, next_step="Use engine='trace', or 'auto'", field="engine")


def _unwatchable(module: nn.Module) -> str | None:
    for name, child in module.named_modules():
        where = f"'{name}' ({type(child).__name__})" if name else type(child).__name__
        if any(state_names.hooks_of(child)):
            return f"{where} has hooks, which are not part of a program"
        if "forward" in vars(child):
            return f"{where} has a forward of its own, beside that of its class"
        if state_names.is_wrapper(child):
            return f"{where} is a wrapper for distributed training"
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if type(tensor) not in (Tensor, nn.Parameter) and not state_names.is_plain(tensor):
            return f"'{name}' is a {type(tensor).__name__}"
        if tensor.layout is not torch.strided:
            return f"'{name}' is a tensor of layout {tensor.layout}"
    if any(state_names.global_hooks()):
        return "hooks for all modules are registered"
    return None
