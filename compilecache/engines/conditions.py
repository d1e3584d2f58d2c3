"""What a trace depended on besides the arguments of the call: torch's guards, kept as words.

torch drops them with the program, or cannot load them again. They are recorded while a program is
compiled, written beside it, compared with the live module when it is loaded, and the cheap ones
looked at in every call (``watch``). A source is the expression that torch gives: ``self.scale``,
``self._modules['fc']._parameters['weight']``, ``G['SCALE']`` for a global of the module's file.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import cache
from inspect import CO_VARARGS
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from compilecache.aot_names import Guarded
from compilecache.engines.programfile import Condition
from compilecache.sources import import_name

ABSENT = "absent"
LISTED = 64
"""Items of a container that are described one by one."""
LONGEST = 120
"""Letters of a value; of longer ones the digest."""

_LOCAL = re.compile(r"\bL\['(\w+)'\]")
_OF_TORCH = re.compile(
    r"G\['(__builtins|__import_torch(?:_dot_|'))|G\['torch'\]|__import__\('torch'\)"
)
"""torch's own modules and Python's builtins: the fingerprint holds their versions."""


def conditions_of(guards: Iterable[Guarded], scope: Scope) -> tuple[Condition, ...]:
    """What torch's guards say of the module and of globals; arguments are in the key of the call."""
    found: dict[str, str] = {}
    for guard in guards:
        source = _named_source(guard.source, scope)
        if source is None:
            continue
        if guard.not_in_dict is not None:
            found[f"{source}.__dict__[{guard.not_in_dict!r}]"] = ABSENT
            continue
        described = described_value(guard.value) if guard.has_value else ABSENT
        if described is not None:
            found[source] = described
    return tuple(Condition(source, value) for source, value in sorted(found.items()))


def _named_source(source: str, scope: Scope) -> str | None:
    """A source with torch's names of locals replaced: the module is ``self``, its closure ``C``.

    None for what depends on arguments of the call, or on torch alone.
    """
    if not source or _OF_TORCH.search(source):
        return None
    source = source.replace(scope.first, "self")
    if set(_LOCAL.findall(source)) - set(scope.closure):
        return None
    return _LOCAL.sub(r"C['\1']", source)


def _first(code: CodeType) -> str:
    """How torch writes the first argument of a function."""
    if code.co_argcount:
        return f"L['{code.co_varnames[0]}']"
    rest = code.co_varnames[code.co_kwonlyargcount] if code.co_flags & CO_VARARGS else "self"
    return f"L['{rest}'][0]"


def described_value(value: object) -> str | None:
    """A value in words that are equal in every process where it means the same to a trace.

    None for parameters, which are compared all together.
    """
    if isinstance(value, nn.Parameter):
        return None
    text = _described(value)
    if len(text) <= LONGEST:
        return text
    return f"{type(value).__name__} #{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _described(value: object) -> str:
    kind = type(value)
    if isinstance(value, torch.device):
        return f"device {value.type}"  # an index may be rewritten
    if isinstance(value, Tensor):
        shape, stride = list(value.shape), value.stride() if value.layout is torch.strided else "-"
        return f"tensor {shape} {value.dtype} {stride} {value.device.type} {value.requires_grad}"
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | Enum):
        return f"{kind.__name__} {value!r}"
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return str(value)
    if isinstance(value, FunctionType):
        return f"function {_named(value)} {_code_digest(value.__code__)}"
    if isinstance(value, MethodType):
        return f"method {_named(value.__func__)}"
    if isinstance(value, CodeType):
        return f"code {_code_digest(value)}"
    if isinstance(value, type):
        return f"class {_named(value)}"
    if isinstance(value, ModuleType):
        return f"module {import_name(value.__name__)}"
    if isinstance(value, BuiltinFunctionType):
        return f"builtin {value.__name__}"
    if isinstance(value, Mapping):
        return f"{kind.__name__} {_items(value)}"
    if isinstance(value, list | tuple | set | frozenset):
        items = sorted(map(_item, value)) if isinstance(value, set | frozenset) else value
        shown = [_item(item) for item in list(items)[:LISTED]]
        return f"{kind.__name__} of {len(value)}: {', '.join(shown)}"
    return f"a {_named(kind)}"


def _items(value: Mapping[object, object]) -> str:
    pairs = list(value.items())[:LISTED]
    return f"of {len(value)}: " + ", ".join(f"{_item(k)}={_item(v)}" for k, v in pairs)


def _item(value: object) -> str:
    if isinstance(value, Tensor):
        return "a tensor"
    plain = value is None or isinstance(value, bool | int | float | str | bytes | Enum | type)
    return _described(value) if plain else f"a {_named(type(value))}"


def _named(thing: Any) -> str:
    return f"{import_name(thing.__module__ or '')}.{thing.__qualname__}"


def _code_digest(code: CodeType) -> str:
    """Over what the code does; where it stands and its comments do not count."""

    def parts(one: CodeType) -> Iterator[str]:
        yield from (one.co_code.hex(), repr(one.co_names), repr(one.co_varnames))
        for constant in one.co_consts:
            if isinstance(constant, CodeType):
                yield from parts(constant)
            elif isinstance(constant, frozenset):
                yield repr(sorted(map(repr, constant)))
            else:
                yield repr(constant)

    return hashlib.sha256("\n".join(parts(code)).encode()).hexdigest()[:12]


@cache
def parsed(source: str) -> ast.expr:
    """A source as an expression. Raises SyntaxError."""
    return ast.parse(source, mode="eval").body


class Cells(Mapping[str, Any]):
    """The variables that a function closes over, as they are now."""

    def __init__(self, cells: Mapping[str, CellType]) -> None:
        self._cells = cells

    def __getitem__(self, name: str) -> Any:
        return self._cells[name].cell_contents

    def __iter__(self) -> Iterator[str]:
        return iter(self._cells)

    def __len__(self) -> int:
        return len(self._cells)


class Scope:
    """Where sources are looked up: a live module and the globals of its forward.

    ``looked``: what was seen so far, for several programs of a module that stays as it is.
    """

    def __init__(
        self,
        module: nn.Module,
        imports: Mapping[str, str],
        looked: dict[str, str | None] | None = None,
    ) -> None:
        self._looked = looked
        forward: Any = type(module).forward
        self.module = module
        self.first = _first(forward.__code__)
        """How torch writes the module: as forward's first argument, or the first of its ``*args``."""
        self.globals: dict[str, Any] = forward.__globals__
        cells = zip(forward.__code__.co_freevars, forward.__closure__ or (), strict=True)
        self.closure = Cells({name: cell for name, cell in cells if name != "__class__"})
        self._imports = imports

    def __getitem__(self, name: str) -> Any:
        """A global, or a module that torch imported for the program under a name of its own."""
        if name in self.globals:
            return self.globals[name]
        if name in self._imports:
            return importlib.import_module(self._imports[name])
        raise KeyError(name)

    def look(self, source: str) -> Any:
        """What a source gives now. Raises whatever looking it up raises."""
        return self.evaluate(parsed(source))

    def evaluate(self, node: ast.expr) -> Any:
        """The same, of a parsed source."""
        if isinstance(node, ast.Name) and node.id == "self":
            return self.module
        if isinstance(node, ast.Name) and node.id == "G":
            return self
        if isinstance(node, ast.Name) and node.id == "C":
            return self.closure
        if isinstance(node, ast.Attribute):
            return getattr(self.evaluate(node.value), node.attr)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            return self.evaluate(node.value)[node.slice.value]
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "type"
            and len(node.args) == 1
        ):
            return type(self.evaluate(node.args[0]))
        raise LookupError(ast.unparse(node))

    def now(self, source: str) -> str | None:
        """What a source gives now, in words; ABSENT for nothing, None for what nobody can tell."""
        if self._looked is None:
            return self._now(source)
        if source not in self._looked:
            self._looked[source] = self._now(source)
        return self._looked[source]

    def _now(self, source: str) -> str | None:
        try:
            return described_value(self.look(source))
        except (AttributeError, KeyError, IndexError, TypeError):
            return ABSENT
        except (SyntaxError, LookupError):
            return None  # an expression of torch's own that names no place


def unmet(conditions: Sequence[Condition], scope: Scope) -> dict[str, tuple[str, str]]:
    """Source → (then, now) of every condition that does not hold."""
    looked = [(condition, scope.now(condition.source)) for condition in conditions]
    return {c.source: (c.value, now) for c, now in looked if now is not None and now != c.value}
