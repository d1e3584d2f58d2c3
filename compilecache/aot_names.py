"""Every private name of torch that making and loading a program needs, each behind a probe.

Ahead-of-time compiled functions are a new part of torch ("experimental"): how they are made, loaded
and moved to another device index stands here and nowhere else; their kernels in ``triton_names``, what
their guards would look at in ``state_names``. ``missing()`` lists what this torch does not have.
"""

from __future__ import annotations

import dataclasses
import importlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from compilecache import state_names, triton_names
from compilecache.rewriting import rewritten
from compilecache.torch_names import absent

_PLACES = {
    "torch._dynamo.aot_compile": [
        "AOTCompiledFunction.serialize",
        "AOTCompiledFunction.deserialize",
    ],
    "torch._dynamo.config": ["enable_aot_compile"],
    "torch._dynamo.package": ["load_guards_state", "load_guard_manager"],
    "torch._functorch._aot_autograd.aot_autograd_result": ["deserialize_bundled_cache_entry"],
    "torch._inductor": ["list_mode_options"],
    "torch._inductor.output_code": ["CompiledFxGraph"],
}


def missing() -> list[str]:
    """Names that programs need and this torch does not have; each as an import path."""
    return [*absent(_PLACES), *triton_names.missing(), *state_names.missing()]


# -- making ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Guarded:
    """Something that the trace depended on, as torch's guards say."""

    source: str
    """The expression that gives it: ``L['self'].scale``, ``G['SCALE']``, ``L['x']``."""
    value: object
    has_value: bool
    """False where torch could not look it up, or it is not there."""
    not_in_dict: str | None = None
    """An attribute that must not be in the object's own dictionary."""


@dataclass(frozen=True, slots=True)
class Made:
    """A function compiled ahead of time."""

    data: bytes
    """What ``load`` takes."""
    guards: tuple[Guarded, ...]
    """Everything that torch would have guarded on."""
    sources: tuple[str, ...]
    """Names of the Python modules that were traced."""
    imports: Mapping[str, str]
    """Names under which torch imported modules for it."""
    function: Any = None
    """torch's own object of it, to be saved once more."""


def make(
    function: nn.Module,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    options: Mapping[str, Any],
) -> Made:
    """Compiles ``type(function).forward`` for one call in this thread's grad mode, to bytes.

    ``options``: those of ``torch.compile``. Raises whatever torch raises for what is no full graph.
    """
    import torch._dynamo.config as config

    noted: list[Guarded] = []

    def note(entries: Sequence[Any]) -> list[bool]:
        noted.extend(_guarded(entry) for entry in entries)
        return [False for _ in entries]

    choice = dict(options)
    chosen = dict(choice.pop("options", None) or {})
    if (mode := choice.pop("mode", None)) not in (None, "default"):
        chosen = {**torch._inductor.list_mode_options(mode, False), **chosen}
    chosen["guard_filter_fn"] = note
    choice |= {"fullgraph": True, "dynamic": False, "options": chosen}

    def compile_it() -> Any:
        noted.clear()
        compiled: Any = torch.compile(type(function).forward, **choice)
        return compiled.aot_compile(((function, *args), dict(kwargs)))

    with (
        config.patch(enable_aot_compile=True),
        triton_names.short_names(),
        triton_names.binaries_only(),
    ):
        try:
            with _one_rank():
                made = compile_it()
        except Exception as error:
            if _NO_INDEX not in str(error):
                raise
            made = compile_it()
    info = made.source_info()
    sources = tuple(sorted({source.module for source in info.inlined_sources}))
    # Each of them holds the whole text of its file, only for messages.
    info.inlined_sources = {dataclasses.replace(s, content="") for s in info.inlined_sources}
    data = _saved(made, function)
    environment = made._artifacts.runtime_env
    imports = dict(environment.import_sources)
    around = type(function).forward.__globals__
    for name in environment.external_refs:
        if isinstance(module := around.get(name), ModuleType):
            imports[name] = module.__name__  # put there for this very code
    return Made(data, tuple(noted), sources, imports, made)


_NO_INDEX = "current_device"
"""Operation of code that names no device index; torch 2.14.1 cannot split some graphs that have it."""


def _saved(made: Any, function: nn.Module) -> bytes:
    data: bytes = type(made).serialize(made, closed_over(function)).serialized_data
    return data


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


@dataclass(frozen=True, slots=True)
class Tuned:
    """A function whose kernels need not be timed again."""

    data: bytes
    """What ``load`` takes."""
    settled: Mapping[str, str]
    """Configurations of the kernels that are no part of the data; ``load`` takes these, too."""
    untuned: tuple[str, ...]
    """What could not be settled, and why."""


def tuned(made: Any, loaded: Loaded, function: nn.Module) -> Tuned:
    """The same function, each of its kernels in the one configuration that won where it has run.

    ``made``: torch's own object of it; ``kernels``: as ``load`` gives them.

    Else torch compiles a variant of some reductions, and times it against the first, in every process
    that loads them. So there is less to read, nothing to time, and one result on all devices.
    """
    untuned = [why for graph in _kept(made) for why in triton_names.tune(graph, loaded.kernels)]
    settled: dict[str, str] = {}
    for name, kernel in loaded.built.items():
        if len(kernel.compile_results) > 1:
            won = triton_names.winner(kernel)
            if won is None:
                untuned.append(f"{name}: it has not run")
            else:
                settled[name] = won
    return Tuned(_saved(made, function), settled, tuple(untuned))


def completed(made: Any, loaded: Loaded, function: nn.Module) -> tuple[bytes, list[str]]:
    """The same function, each of its kernels in every configuration that could be launched.

    As ``tuned``, for where nothing has run: whoever runs it first has only to time them.
    """
    lacking = [why for graph in _kept(made) for why in triton_names.complete(graph, loaded.kernels)]
    return _saved(made, function), lacking


def _kept(made: Any) -> Iterator[Any]:
    """The graphs that torch keeps of a function to save it once more."""
    serialize = getattr(made._artifacts.compiled_fn, "serialize", None)
    if serialize is not None:
        yield from dict(_graphs(serialize())).values()


def _guarded(entry: Any) -> Guarded:
    created = getattr(entry.orig_guard.create_fn, "keywords", None) or {}
    missing_attribute = created.get("attr") if entry.guard_type.startswith("NOT_PRESENT") else None
    name = entry.orig_guard.name
    return Guarded(
        source=name() if callable(name) else name,
        value=entry.value if entry.has_value else None,
        has_value=bool(entry.has_value),
        not_in_dict=missing_attribute,
    )


@contextmanager
def _one_rank() -> Iterator[None]:
    """Code that names no device index, in a torch that can generate it."""
    config: Any = getattr(torch.compiler, "config", None)
    if not hasattr(config, "compile_on_one_rank"):
        yield
        return
    with config.patch(compile_on_one_rank=True):
        yield


# -- loading --------------------------------------------------------------------------------


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
            graphs = dict(_graphs(entry))
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


def _graphs(entry: Any) -> Iterator[tuple[str, Any]]:
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
