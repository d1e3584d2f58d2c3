"""Every private name of torch that loading a program needs, each behind a probe.

How a function that was compiled ahead of time becomes one of this process, on this device index; how it was
made is in ``aot_names``, its kernels are in ``triton_names``. ``missing()`` lists what this torch does not have.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from compilecache import triton_names
from compilecache.rewriting import rewritten
from compilecache.torch_names import absent

_PLACES = {
    "torch._dynamo.aot_compile": ["AOTCompiledFunction.deserialize"],
    "torch._dynamo.package": ["load_guards_state", "load_guard_manager"],
    "torch._functorch._aot_autograd.aot_autograd_result": ["deserialize_bundled_cache_entry"],
    "torch._inductor.output_code": ["CompiledFxGraph"],
}


def missing() -> list[str]:
    """Names used here that this torch does not have; each as an import path."""
    return absent(_PLACES)


class _Moving(threading.local):
    ours = False
    again = False
    indices: tuple[int, int] | None = None
    moved: int = 0
    left: tuple[str, ...] = ()
    kernels: tuple[tuple[str, Any], ...] = ()
    sources: tuple[str, ...] = ()
    settled: Mapping[str, str] = {}
    built: dict[str, Any]


_moving = _Moving()
_hooking = threading.Lock()


@dataclass(frozen=True, slots=True)
class Loaded:
    """A program in this process."""

    call: Callable[..., Any]
    """Takes the module first, then what the module would be called with."""
    moved: int
    """Names of the old device index that were rewritten."""
    left: tuple[str, ...]
    """Lines that still name it; a program with any must not be used."""
    kernels: tuple[tuple[str, Any], ...] = ()
    """torch's key and object of every kernel that came ready to be launched."""
    built: Mapping[str, Any] = field(default_factory=dict)
    """Those that torch built anew while loading, by graph and name."""
    function: Any = None
    """torch's own object of it; to be saved once more only if it was loaded so."""
    sources: tuple[str, ...] = ()
    """Generated code of its graphs, as it is used here."""


def load(
    data: bytes,
    function: nn.Module,
    imports: Mapping[str, str],
    indices: tuple[int, int] | None = None,
    settled: Mapping[str, str] | None = None,
    *,
    again: bool = False,
) -> Loaded:
    """Loads what ``make`` made of such a module; no tracing.

    ``imports``: as it was made; ``indices``: (compiled on, to be used on) of the GPU; ``settled``: as
    it was tuned; ``again``: it may be saved once more, as it is on the index it is used on.

    Raises whatever torch raises for bytes that are not of its own making.
    """
    from torch._dynamo.aot_compile import AOTCompiledFunction

    _install()
    _moving.ours, _moving.indices, _moving.kernels = True, indices, ()
    _moving.moved, _moving.left, _moving.sources, _moving.again = 0, (), (), again
    _moving.settled, _moving.built = settled or {}, {}
    try:
        around = dict(type(function).forward.__globals__)
        around |= {alias: importlib.import_module(name) for alias, name in imports.items()}
        loaded = AOTCompiledFunction.deserialize(data, around, closed_over(function))
        return Loaded(
            loaded.fn,
            _moving.moved,
            _moving.left,
            _moving.kernels,
            _moving.built,
            loaded if again else None,
            _moving.sources,
        )
    finally:
        _moving.ours, _moving.indices, _moving.kernels, _moving.sources = False, None, (), ()
        _moving.built = {}


def _install() -> None:
    """Puts the rewriting where torch turns a bundled entry into a function; once a process."""
    from torch._dynamo import package
    from torch._functorch._aot_autograd import aot_autograd_result as results

    with _hooking:
        original = results.deserialize_bundled_cache_entry
        if getattr(original, "_compilecache", False):
            return

        def deserialize(entry: Any, *rest: Any, **named: Any) -> Any:
            if not _moving.ours:
                return original(entry, *rest, **named)
            if not _moving.again:
                # torch copies the whole entry, in case somebody wants to save it again.
                entry.__deepcopy__ = lambda memo: entry
            graphs = dict(graphs_of(entry))
            for graph in graphs.values():
                triton_names.rebase(graph)
                if _moving.indices is not None:
                    _move_graph(graph, *_moving.indices)
                _moving.kernels += tuple(triton_names.launched(graph))
                _moving.sources += (graph.source_code,)
            made = original(entry, *rest, **named)
            for part, graph in graphs.items():
                _note_built(part, graph)
            return made

        deserialize._compilecache = True  # type: ignore[attr-defined]
        results.deserialize_bundled_cache_entry = deserialize
        # No guard was kept: there is no tree of guards to build.
        package.load_guards_state = _unless_ours(package.load_guards_state)
        package.load_guard_manager = _unless_ours(package.load_guard_manager)


def _unless_ours(original: Callable[..., Any]) -> Callable[..., Any]:
    def load_other(*args: Any, **kwargs: Any) -> Any:
        return _NO_GUARDS if _moving.ours else original(*args, **kwargs)

    return load_other


_NO_GUARDS = object()


def graphs_of(entry: Any) -> Iterator[tuple[str, Any]]:
    """Forward and backward of a bundled entry."""
    for name, part in (("forward", entry.compiled_fw), ("backward", entry.compiled_bw)):
        if part is not None:
            yield name, part.result


def _note_built(part: str, graph: Any) -> None:
    for name, kernel in triton_names.built(graph):
        known = f"{part} {name}"
        _moving.built[known] = kernel
        if won := _moving.settled.get(known):
            triton_names.settle(kernel, won)


def _move_graph(graph: Any, old: int, new: int) -> None:
    before = graph.source_code
    after, count, left = rewritten(before, old, new)
    constants = getattr(graph, "constants", None) or {}
    left += tuple(
        f"constant {name} lies on {value.device}"
        for name, value in constants.items()
        if isinstance(value, Tensor) and value.device.type == "cuda"
    )
    _moving.moved += count
    _moving.left += left
    graph.source_code = after
    graph.device_idxs = type(graph.device_idxs)(new if i == old else i for i in graph.device_idxs)
    if count:
        graph.cache_key = f"{graph.cache_key}d{new}"
    triton_names.move(graph, before, after, (old, new))


def closed_over(function: nn.Module) -> dict[str, Any]:
    """The functions and classes that a decorated forward closes over, by where they are found.

    They are part of the process, not of the program: it names them, and is given the live ones.
    """
    found: dict[str, Any] = {}

    def visit(name: str, thing: Any) -> None:
        if any(thing is known for known in found.values()):
            return
        found[name] = thing
        code = getattr(thing, "__code__", None)
        cells = zip(
            getattr(code, "co_freevars", ()),
            getattr(thing, "__closure__", None) or (),
            strict=False,
        )
        for variable, cell in cells:
            try:
                value = cell.cell_contents
            except ValueError:
                continue  # not filled yet
            if isinstance(value, FunctionType | type):
                visit(f"{name}.{variable}", value)

    visit("forward", type(function).forward)
    del found["forward"]
    return found


# -- imports --------------------------------------------------------------------------------


def import_first() -> None:
    """Imports what other threads might import too, torch's compiler; before ``import_ahead``."""
    for name in ("torch._dynamo", "torch._inductor.config"):
        importlib.import_module(name)


def import_ahead() -> None:
    """Imports what loading a program needs; meant for a thread beside other work."""
    names = [
        "torch._dynamo.aot_compile",
        "torch._functorch._aot_autograd.aot_autograd_result",
        "torch._inductor.output_code",
        "torch._inductor.codecache",
        "torch._inductor.async_compile",
        "torch._inductor.select_algorithm",
        "torch._inductor.compile_fx",
    ]
    if torch.cuda.is_available():
        names += ["torch._inductor.runtime.triton_heuristics", "triton"]
    for name in names:
        with suppress(ImportError, AttributeError):  # it is imported where it is needed, then
            importlib.import_module(name)
