"""Every private name of torch that making a program needs, each behind a probe.

Ahead-of-time compiled functions are a new part of torch ("experimental"): how they are made stands here,
how they are loaded and moved to another device index in ``loading_names``, their kernels in ``triton_names``,
what their guards would look at in ``state_names``. ``missing()`` lists what this torch does not have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn

from compilecache import loading_names, state_names, triton_names
from compilecache.loading_names import Loaded, closed_over, graphs_of
from compilecache.torch_names import absent

_PLACES = {
    "torch._dynamo.aot_compile": ["AOTCompiledFunction.serialize"],
    "torch._dynamo.config": ["enable_aot_compile"],
    "torch._inductor": ["list_mode_options"],
}


def missing() -> list[str]:
    """Names that programs need and this torch does not have; each as an import path."""
    parts = (loading_names, triton_names, state_names)
    return [*absent(_PLACES), *(name for part in parts for name in part.missing())]


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
        yield from dict(graphs_of(serialize())).values()


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
