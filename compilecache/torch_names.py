"""Every private name of Dynamo that compiling needs, in one place, each behind a probe.

``missing()`` lists what this torch does not have; a test fails readably when that list is not
empty. Nothing here compares version numbers. Those of Inductor stand in ``inductor_names``.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Counts:
    """torch's own counters since the process started."""

    hits: int
    """AOTAutograd and FX-graph entries found."""
    misses: int
    """Entries looked up and not found."""
    bypasses: int
    """Graphs torch declined to look up."""
    frames: int
    """Frames Dynamo has traced."""

    def since(self, earlier: Counts) -> Counts:
        """What was added after ``earlier``."""
        return Counts(
            self.hits - earlier.hits,
            self.misses - earlier.misses,
            self.bypasses - earlier.bypasses,
            self.frames - earlier.frames,
        )


def counts() -> Counts:
    """A snapshot of ``torch._dynamo.utils.counters``."""
    from torch._dynamo.utils import counters

    autograd, inductor = counters["aot_autograd"], counters["inductor"]

    def total(kind: str) -> int:
        return int(autograd[f"autograd_cache_{kind}"]) + int(inductor[f"fxgraph_cache_{kind}"])

    return Counts(total("hit"), total("miss"), total("bypass"), int(counters["frames"]["total"]))


def takes_recompile_limit() -> bool:
    """Whether ``torch.compile`` itself takes the limit, so that it holds in every thread."""
    return "recompile_limit" in inspect.signature(torch.compile).parameters


def setting(module: str, name: str) -> object:
    """A setting of torch as this thread sees it; None where this torch does not have it."""
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


def stance() -> str:
    """What ``torch.compiler.set_stance`` was told last, for all threads; "default" at first."""
    from torch._dynamo.eval_frame import _stance

    return str(_stance.stance)


@dataclass(frozen=True, slots=True)
class Limits:
    """How many entries torch keeps for one code object before it stops compiling."""

    per_code: int
    """``recompile_limit``."""
    in_all: int
    """``accumulated_recompile_limit``: the second cap, across all regions of a code object."""


def limits() -> Limits:
    """The limits as this thread sees them (torch ≥ 2.12 keeps them per thread)."""
    import torch._dynamo.config as config

    return Limits(config.recompile_limit, config.accumulated_recompile_limit)


def raise_limits(needed: Limits) -> None:
    """Lifts this thread's limits to at least ``needed``; never lowers one."""
    import torch._dynamo.config as config

    config.recompile_limit = max(config.recompile_limit, needed.per_code)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, needed.in_all)


def cache_entries(code: CodeType) -> int:
    """How many compiled entries Dynamo holds for a code object."""
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    return len(_debug_get_cache_entry_list(code))


def entries_of(module: nn.Module) -> int:
    """The most entries Dynamo holds for any code object that compiling this module would use.

    By version that is its class's ``forward``, or one wrapper that all modules share.
    """
    return max(map(cache_entries, codes_of(module)))


def codes_of(module: nn.Module) -> list[CodeType]:
    """The code objects that hold the entries of a compiled module's own frame."""
    from torch._dynamo import external_utils

    codes = [type(module).forward.__code__]
    return codes + [
        code for code in external_utils.wrap_inline.__code__.co_consts if isinstance(code, CodeType)
    ]


def is_compiled(module: nn.Module) -> bool:
    """Whether calling the module goes through ``torch.compile`` already."""
    from torch._dynamo.eval_frame import OptimizedModule

    return isinstance(module, OptimizedModule) or module._compiled_call_impl is not None


def original(module: nn.Module) -> nn.Module:
    """The user's module behind ``torch.compile(module)``; any other module as it is."""
    from torch._dynamo.eval_frame import OptimizedModule

    if isinstance(module, OptimizedModule):
        inner = module._orig_mod
        assert isinstance(inner, nn.Module)
        return inner
    return module


def compile_in_place(module: nn.Module, **options: Any) -> None:
    """``module.compile``; also for bare modules of torch.nn, whose own frames Dynamo skips."""
    from torch._dynamo import external_utils, trace_rules

    if trace_rules.check(type(module).forward.__code__):
        inlined = external_utils.wrap_inline(module._call_impl)
        module._compiled_call_impl = torch.compile(inlined, **options)
    else:
        module.compile(**options)


def uses_cuda_graphs(module: nn.Module) -> bool:
    """Whether a compiled module records CUDA graphs (mode reduce-overhead, max-autotune, options)."""
    setting = _compiler_config(module).get("triton.cudagraphs")
    if setting is None:
        import torch._inductor.config as config

        return bool(config.triton.cudagraphs)
    return bool(setting)


def _compiler_config(module: nn.Module) -> dict[str, Any]:
    ask = getattr(_compiled_call(module), "get_compiler_config", None)
    answer = ask() if ask is not None else None
    return answer if isinstance(answer, dict) else {}


INNER = "_compilecache_inner"
"""Where a wrapper of ours round a compiled call keeps that call."""


def _compiled_call(module: nn.Module) -> Any:
    """What calling a compiled module runs, without wrappers of ours."""
    wrapped = original(module) is not module
    call = module.forward if wrapped else module._compiled_call_impl
    while hasattr(call, INNER):
        call = getattr(call, INNER)
    return call


def carried_limit(module: nn.Module) -> int | None:
    """The recompile limit that a compiled module carries; None when torch's setting holds for it."""
    limits = [getattr(part, "_recompile_limit", None) for part in _converters(module)]
    return next((limit for limit in limits if isinstance(limit, int)), None)


def raise_carried_limit(module: nn.Module, limit: int) -> None:
    """Lifts the recompile limit that a compiled module carries, if it carries one."""
    for part in _converters(module):
        if isinstance(getattr(part, "_recompile_limit", None), int):
            part._recompile_limit = max(part._recompile_limit, limit)


def _converters(module: nn.Module) -> Iterator[Any]:
    """The objects that turn frames of a compiled module into code, from the outermost in."""
    call = _compiled_call(module)
    names = getattr(getattr(call, "__code__", None), "co_freevars", ())
    cells = dict(zip(names, getattr(call, "__closure__", None) or (), strict=False))
    found = cells["callback"].cell_contents if "callback" in cells else None
    while found is not None:
        yield found
        if hasattr(found, "_inner_convert"):
            yield found._inner_convert
        found = getattr(found, "_torchdynamo_orig_backend", None)


def compile_again(module: nn.Module) -> None:
    """Undoes what reaching the limit did to the module's code: torch only ran it from then on."""
    from torch._C._dynamo.eval_frame import (
        _FrameAction,
        _FrameExecStrategy,
        set_code_exec_strategy,
    )

    strategy = _FrameExecStrategy(_FrameAction.DEFAULT, _FrameAction.DEFAULT)
    for code in codes_of(module):
        set_code_exec_strategy(code, strategy)


@contextmanager
def failing_at_limit() -> Iterator[None]:
    """Past the recompile limit torch raises instead of running the slow path in silence."""
    import torch._dynamo.config as config

    with config.patch(fail_on_recompile_limit_hit=True):
        yield


@contextmanager
def without_limits() -> Iterator[None]:
    """Eager attention compiles a wrapper of its own with an eager backend, an entry a shape."""
    import torch._dynamo.config as config

    with config.patch(recompile_limit=2**20, accumulated_recompile_limit=2**20):
        yield


def is_limit_error(error: BaseException) -> bool:
    """Whether an exception, or what caused it, says that the recompile limit was reached."""
    from torch._dynamo.exc import FailOnRecompileLimitHit

    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, FailOnRecompileLimitHit):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


@contextmanager
def on_compile(callback: Callable[[str], None]) -> Iterator[None]:
    """Calls back with the kind of every compilation that starts, in any thread."""
    from torch._dynamo.callback import callback_handler

    def started(args: Any) -> None:
        callback(str(args.callback_trigger.name))

    callback_handler.register_start_callback(started)
    try:
        yield
    finally:
        if started in callback_handler.start_callbacks:  # torch._dynamo.reset() drops them all
            callback_handler.remove_start_callback(started)


def missing() -> list[str]:
    """Names used here that this torch does not have; each as an import path."""
    return absent(
        {
            "torch._dynamo.utils": ["counters"],
            "torch._dynamo.config": [
                "recompile_limit",
                "accumulated_recompile_limit",
                "fail_on_recompile_limit_hit",
            ],
            "torch._dynamo.eval_frame": [
                "_debug_get_cache_entry_list",
                "OptimizedModule",
                "_stance",
            ],
            "torch._C._dynamo.eval_frame": [
                "set_code_exec_strategy",
                "_FrameAction",
                "_FrameExecStrategy",
            ],
            "torch._dynamo.exc": ["FailOnRecompileLimitHit"],
            "torch._dynamo.external_utils": ["wrap_inline"],
            "torch._dynamo.trace_rules": ["check"],
            "torch._dynamo.callback": ["callback_handler"],
            "torch.nn.modules.module": ["Module._compiled_call_impl", "Module._call_impl"],
        }
    )


def absent(places: Mapping[str, Sequence[str]]) -> list[str]:
    """Those of a list of names, module by module, that this torch does not have."""
    return [
        f"{path}.{name}" for path, names in places.items() for name in names if not _has(path, name)
    ]


def _has(path: str, name: str) -> bool:
    try:
        found: Any = importlib.import_module(path)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return False
    return True
