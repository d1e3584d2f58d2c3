"""Where torch begins to compile or trace: the places that a seal hears of.

All private names of torch that the guard needs stand here; ``missing()`` lists those that this
torch does not have. The hooks are in place only while somebody listens, and none of them lies on
the path of a call that is compiled already.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Protocol

import torch
from torch import nn

from compilecache import torch_names
from compilecache.guard import calls
from compilecache.guard.attempt import Attempt


class Listener(Protocol):
    """Hears of every attempt that nobody has permitted."""

    def attempt(self, attempt: Attempt) -> AbstractContextManager[None]:
        """Raises to refuse it; else it happens inside the context."""
        ...


_PLACES = {
    "torch._dynamo.convert_frame": ["CatchErrorsWrapper", "has_tensor_in_frame"],
    "torch._dynamo.trace_rules": ["check"],
    "torch._dynamo.callback": ["callback_handler", "CallbackTrigger"],
    "torch._dynamo.eval_frame": ["_debug_get_cache_entry_list", "innermost_backend"],
    "torch._dynamo.types": ["ConvertFrameReturn", "GuardedCode"],
    "torch._dynamo.guards": ["get_and_maybe_log_recompilation_reasons"],
    "torch._dynamo": ["reset"],
    "torch.autograd.graph": ["_engine_run_backward"],
    "torch.fx._symbolic_trace": ["Tracer"],
    "torch._higher_order_ops.flex_attention": ["math_attention", "sdpa_dense_backward"],
}


def missing() -> list[str]:
    """Names used here that this torch does not have; each as an import path."""
    return torch_names.absent(_PLACES)


class _Permits(threading.local):
    depth = 0


_permits = _Permits()
_listeners: tuple[Listener, ...] = ()
_installed = ExitStack()
_changing = threading.RLock()


@contextmanager
def permitted() -> Iterator[None]:
    """Whatever this thread compiles in here is meant."""
    _permits.depth += 1
    try:
        yield
    finally:
        _permits.depth -= 1


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """The listener hears of attempts in any thread, until the context ends."""
    global _listeners
    with _changing:
        if not _listeners:
            _install()
        _listeners = (*_listeners, listener)
    try:
        yield
    finally:
        with _changing:
            _listeners = tuple(other for other in _listeners if other is not listener)
            if not _listeners:
                _installed.close()


def listeners() -> tuple[Listener, ...]:
    """Who hears of attempts, the oldest first."""
    return _listeners


@contextmanager
def _asked(attempt: Attempt) -> Iterator[None]:
    """All listeners agree; what happens inside is permitted."""
    with ExitStack() as stack:
        for listener in _listeners:
            stack.enter_context(listener.attempt(attempt))
        stack.enter_context(permitted())
        yield


def _install() -> None:
    _put("torch._dynamo.convert_frame", "CatchErrorsWrapper.__call__", _hears_compile)
    _put("torch._dynamo.callback", "callback_handler.install_callbacks", _hears_backward)
    _put("torch.fx._symbolic_trace", "Tracer.trace", _hears_trace)
    _put("torch._higher_order_ops.flex_attention", "math_attention", _hears_dense)
    _put("torch._dynamo", "reset", _hears_reset)


def _put(module: str, path: str, make: Callable[[Any], Any]) -> None:
    """Replaces something of a module until the hooks are taken out."""
    owner: Any = importlib.import_module(module)
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    own = name in vars(owner)
    original = getattr(owner, name)

    def restore() -> None:
        if own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)

    setattr(owner, name, make(original))
    _installed.callback(restore)


# -- Dynamo ---------------------------------------------------------------------------------


def _hears_compile(original: Callable[..., Any]) -> Callable[..., Any]:
    from torch._dynamo import convert_frame, trace_rules

    def convert(self: Any, frame: FrameType, *rest: Any) -> Any:
        if (
            _permits.depth
            or trace_rules.check(frame.f_code)
            or not convert_frame.has_tensor_in_frame(frame)
        ):
            return original(self, frame, *rest)
        if (entry := _overlooked(frame, self)) is not None:
            return _use(entry, frame)
        with _asked(_attempt_of(frame, self)):
            return original(self, frame, *rest)

    return convert


def _overlooked(frame: FrameType, callback: Any) -> Any:
    """An entry that fits the frame although torch found none.

    torch walks the list of entries and moves the one it finds to the front; the walk lets other
    threads run in between, so with several shapes in several threads it can miss the one it needs.
    """
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list, innermost_backend

    backend = innermost_backend(callback)
    for entry in _debug_get_cache_entry_list(frame.f_code):
        shared = getattr(entry, "isolate_recompiles_id", -1) == -1
        if shared and entry.backend == backend and entry.guard_manager.check(frame.f_locals):
            return entry
    return None


def _use(entry: Any, frame: FrameType) -> Any:
    """The call is made again, where that is possible; elsewhere the entry is given to torch."""
    from torch._dynamo.types import ConvertFrameReturn, GuardedCode

    if calls.can_be_made_again(frame.f_code):
        raise calls.Again
    code = GuardedCode(entry.code, entry.guard_manager, entry.compile_id)
    return ConvertFrameReturn(guarded_code=code)


def _attempt_of(frame: FrameType, callback: Any) -> Attempt:
    code, values = frame.f_code, frame.f_locals
    if code.co_name.startswith(_FLEX_FRAMES):
        return _dense_attempt(*values.get("args", ())[:2])
    return Attempt(
        "compile",
        f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})",
        tuple(_tensors(values)),
        lambda: reasons(code, frame, callback),
        code,
    )


_FLEX_FRAMES = ("_flex_attention_hop_wrapper", "flex_attention_hop")
"""What torch compiles for itself, without a kernel, when flex_attention is called uncompiled."""


def _dense_attempt(query: Any = None, key: Any = None, *_: Any) -> Attempt:
    shapes = tuple(_tensors({"query": query, "key": key}))
    return Attempt("dense", f"flex_attention, called {_call_site()}", shapes)


def _call_site() -> str:
    """Where the program called into torch."""
    inside = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<")
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(inside) and "contextlib" not in path:
            return f"in {frame.f_code.co_qualname} ({path}:{frame.f_lineno})"
        frame = frame.f_back
    return "by torch"


def reasons(code: CodeType, frame: FrameType, callback: Any) -> list[str]:
    """What torch says of each entry it holds for the code, and why it does not fit the frame."""
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list, innermost_backend
    from torch._dynamo.guards import get_and_maybe_log_recompilation_reasons

    try:
        entries = _debug_get_cache_entry_list(code)
        return get_and_maybe_log_recompilation_reasons(
            entries,
            frame,  # type: ignore[arg-type]
            innermost_backend(callback),
            skip_logging=True,
        )
    except Exception:  # only words; whatever goes wrong here must not hide the refusal
        return []


def _tensors(values: Mapping[str, object]) -> Iterator[str]:
    """The tensors of a frame in words; those within lists, tuples and dictionaries too."""
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
            kind = str(value.dtype).removeprefix("torch.")
            grad = " requires_grad" if value.requires_grad else ""
            yield f"{name} {list(value.shape)} {kind} {value.device}{grad}"
        elif isinstance(value, Mapping):
            yield from _tensors({str(key): inner for key, inner in value.items()})
        elif isinstance(value, list | tuple) and len(value) < 64:
            yield from _tensors({f"{name}[{i}]": inner for i, inner in enumerate(value)})


# -- AOTAutograd ----------------------------------------------------------------------------


def _hears_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    from torch._dynamo.callback import CallbackTrigger

    @contextmanager
    def install_callbacks(trigger: CallbackTrigger, compile_id: str) -> Iterator[None]:
        with ExitStack() as stack:
            if trigger is CallbackTrigger.LAZY_BACKWARD and not _permits.depth:
                stack.enter_context(_asked(Attempt("backward", f"graph {compile_id}")))
            stack.enter_context(original(trigger, compile_id))
            yield

    return install_callbacks


def is_foreign_thread() -> bool:
    """Whether Python did not start this thread: autograd runs backwards on threads of its own."""
    return isinstance(threading.current_thread(), threading._DummyThread)


def in_backward(ident: int) -> bool:
    """Whether a thread is waiting for autograd at this moment."""
    from torch.autograd.graph import _engine_run_backward

    frame = sys._current_frames().get(ident)
    while frame is not None:
        if frame.f_code is _engine_run_backward.__code__:
            return True
        frame = frame.f_back
    return False


# -- FX -------------------------------------------------------------------------------------


def _hears_trace(original: Callable[..., Any]) -> Callable[..., Any]:
    def trace(self: Any, root: Any, *rest: Any, **named: Any) -> Any:
        if _permits.depth:
            return original(self, root, *rest, **named)
        name = getattr(root, "__qualname__", type(root).__qualname__)
        with _asked(Attempt("trace", f"{name}, called {_call_site()}")):
            return original(self, root, *rest, **named)

    return trace


# -- flex_attention -------------------------------------------------------------------------


def _hears_dense(original: Callable[..., Any]) -> Callable[..., Any]:
    from torch._subclasses.fake_tensor import FakeTensor

    def math_attention(query: torch.Tensor, *rest: Any, **named: Any) -> Any:
        if isinstance(query, FakeTensor):
            return original(query, *rest, **named)
        with _asked(_dense_attempt(query, *rest)):
            return original(query, *rest, **named)

    return math_attention


def _hears_reset(original: Callable[..., Any]) -> Callable[..., Any]:
    def reset() -> None:
        with _asked(Attempt("reset", f"torch._dynamo.reset(), called {_call_site()}")):
            original()

    return reset
