"""Records, inside an observed process, what its compiled functions are called with.

Recorders stand outside the compiled functions. While Dynamo traces they are not there: it follows
``_torchdynamo_inline``, which ``functools.wraps`` copies, to the function that was compiled.
Nothing here may change the run: no random numbers, no imports of torch's parts, no exceptions.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import itertools
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from torch import Tensor, nn

    from compilecache.workload import Workload

RECORD_FORMAT = 1
SPEC_LIMIT = 4096
"""Distinct calls kept in one process; an argument that never repeats would fill memory."""
FAULT_LIMIT = 100
"""Distinct complaints kept in one process."""
WRITE_SECONDS = 1.0
"""Counts are written at most so often; a new shape is written at once."""

Leaves = Callable[[str, object], Iterator[tuple[str, object]]]
Function = Callable[..., object]
Json = dict[str, object]
Note = Callable[["_Subject", tuple[object, ...], Mapping[str, object]], None]


def install(torch: ModuleType, directory: Path, leaves: Leaves) -> None:
    """Replaces ``torch.compile``, by which ``nn.Module.compile`` goes too, with a recording one."""
    original = torch.compile
    recorder = Recorder(torch, directory, leaves)

    @functools.wraps(original)
    def compile(model: Function | None = None, *args: object, **kwargs: object) -> object:
        if model is None:
            return lambda function: compile(function, *args, **kwargs)
        compiled = original(model, *args, **kwargs)
        if compiled is model or kwargs.get("disable"):
            return compiled
        return recorder.attached(model, compiled)

    setattr(torch, "compile", compile)  # noqa: B010 - a module has no such attribute to mypy


class Recorder:
    """The calls seen so far in this process, and the file that holds them."""

    def __init__(self, torch: ModuleType, directory: Path, leaves: Leaves) -> None:
        self._torch = torch
        self._directory = directory
        self._leaves = leaves
        self._note: Note | None = None
        self._owners: weakref.WeakKeyDictionary[nn.Module, tuple[weakref.ref[nn.Module], str]]
        self._owners = weakref.WeakKeyDictionary()
        self._lock = threading.RLock()
        self._path = directory
        self._reset()
        atexit.register(self._finish)
        os.register_at_fork(after_in_child=self._reset)

    def attached(self, model: Function, compiled: object) -> object:
        """The compiled thing with a recorder in front of it, or as it is when that cannot be."""
        try:
            return self._attached(model, compiled)
        except Exception as error:
            self._fault(f"{model!r} is not recorded: {error!r}")
            return compiled

    def _attached(self, model: Function, compiled: object) -> object:
        subject = _Subject(self._torch, model)
        if subject.module is not None:
            self._own(subject.module)
        if isinstance(compiled, self._torch.nn.Module):
            # _forward: lazy modules put it in the place of forward at their first call.
            name = "_forward" if "_forward" in vars(compiled) else "forward"
            setattr(compiled, name, self._recording(subject, getattr(compiled, name)))
            return compiled
        if inspect.isclass(compiled) or not callable(compiled):
            return compiled
        return self._recording(subject, compiled)

    def _recording(self, subject: _Subject, compiled: Function) -> Function:
        note = self._quiet_note()
        # Bound, not looked up in globals: Dynamo would guard on those when it meets this frame.
        is_compiling = self._torch.compiler.is_compiling

        @functools.wraps(compiled)
        def recorded(*args: object, **kwargs: object) -> object:
            if not is_compiling():
                note(subject, args, kwargs)
            return compiled(*args, **kwargs)

        self._skip(cast("FunctionType", recorded))
        return recorded

    def _quiet_note(self) -> Note:
        """``note``, never traced: after a graph break it runs below a frame that Dynamo watches."""
        if self._note is None:
            note: Note = self._torch._dynamo.disable(self.note)
            self._note = note
        return self._note

    def _skip(self, function: FunctionType) -> None:
        """Keeps Dynamo from compiling the recorder's own frame; the code object is one for all."""
        eval_frame = sys.modules.get("torch._C._dynamo.eval_frame")
        skip_code = getattr(eval_frame, "skip_code", None)
        if skip_code is not None:
            skip_code(function.__code__)

    def _own(self, module: nn.Module) -> None:
        """Remembers which module's workload its separately compiled functions belong to."""
        make = getattr(module, "compile_workload", None)
        if make is None:
            return
        for name, function in make().functions(module).items():
            self._owners[function] = (weakref.ref(module), name)

    def note(
        self, subject: _Subject, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> None:
        """Counts one call; the first of its kind is described and written. Never raises."""
        try:
            named = subject.named(args, kwargs)
            flat = [leaf for name, value in named.items() for leaf in self._leaves(name, value)]
            phase = self._phase(subject, flat)
            leaves = (self._key(name, value) for name, value in flat)
            key = (subject.serial, phase, len(args), *leaves)
            with self._lock:
                self._count(key, subject, named, flat, phase, len(args))
        except Exception as error:
            self._fault(f"a call of {subject.name} is not recorded: {error!r}")

    def _count(
        self,
        key: tuple[object, ...],
        subject: _Subject,
        named: Mapping[str, object],
        flat: list[tuple[str, object]],
        phase: str,
        positional: int,
    ) -> None:
        call = self._calls.get(key)
        if call is None and len(self._calls) >= SPEC_LIMIT:
            self._fault(f"more than {SPEC_LIMIT} different calls; the rest is left out")
            return
        if call is None:
            call = self._described(subject, named, flat, phase)
            self._calls[key] = call = {**call, "positional": positional}
        count = self._counts[key] = self._counts.get(key, 0) + 1
        if count == 1 or time.monotonic() - self._written > WRITE_SECONDS:
            self._write()

    def _phase(self, subject: _Subject, flat: list[tuple[str, object]]) -> str:
        torch = self._torch
        if not torch.is_grad_enabled():
            return "eval"
        wanted = any(isinstance(v, torch.Tensor) and v.requires_grad for _, v in flat)
        return "train" if wanted or subject.trains() else "eval"

    def _key(self, name: str, value: object) -> tuple[object, ...]:
        if not isinstance(value, self._torch.Tensor):
            plain = value is None or type(value) in (bool, int, float, str)
            return (name, type(value), value if plain else None)
        if not self._is_plain(value):
            return (name, type(value))
        layout = (tuple(value.shape), value.stride())
        return (name, *layout, value.dtype, value.device, value.requires_grad)

    def _is_plain(self, tensor: Tensor) -> bool:
        torch = self._torch
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
        return plain and tensor.layout is torch.strided and not tensor.is_quantized

    def _described(
        self,
        subject: _Subject,
        named: Mapping[str, object],
        flat: list[tuple[str, object]],
        phase: str,
    ) -> Json:
        tensors = [value for _, value in flat if isinstance(value, self._torch.Tensor)]
        parameters = subject.tensors()
        arguments: Json = {}
        opaque: dict[str, str] = {}
        for name, value in flat:
            if isinstance(value, self._torch.Tensor) and self._is_plain(value):
                arguments[name] = _tensor(value)
            elif value is None or type(value) in (bool, int, float, str):
                arguments[name] = value
            else:
                opaque[name] = f"{type(value).__module__}.{type(value).__qualname__}"
        floating = [t for t in (*parameters, *tensors) if t.is_floating_point()]
        devices = {str(t.device) for t in (*tensors, *parameters)}
        call: Json = {
            "subject": subject.name,
            "function": subject.function,
            "phase": phase,
            "dtype": str(floating[0].dtype if floating else self._torch.get_default_dtype()),
            "devices": sorted(devices),
            "arguments": arguments,
            "opaque": {**opaque, **subject.unnamed(named)},
        }
        return call | self._workload_spec(subject, named, phase)

    def _workload_spec(self, subject: _Subject, named: Mapping[str, object], phase: str) -> Json:
        """The spec that the module's own workload gives the call, and what that workload is."""
        if subject.module is None or subject.module not in self._owners:
            return {}
        reference, function = self._owners[subject.module]
        owner = reference()
        if owner is None:
            return {}
        workload: Workload = owner.compile_workload()  # type: ignore[operator]
        spec = workload.spec_of(function, named, phase)
        if spec is None:
            return {}
        name, settings = getattr(workload, "origin", lambda: None)() or (None, {})
        return {
            "subject": _name_of(type(owner)),
            "spec": spec.model_dump(mode="json"),
            "workload": name,
            "settings": dict(settings),
        }

    def _fault(self, text: str) -> None:
        with self._lock:
            if text not in self._faults and len(self._faults) < FAULT_LIMIT:
                self._faults[text] = None
                self._write()

    def _write(self) -> None:
        """Replaces this process's file; whoever is killed has written every shape it ran."""
        record = {
            "format": RECORD_FORMAT,
            "pid": os.getpid(),
            "argv": sys.argv,
            "calls": [call | {"count": self._counts[key]} for key, call in self._calls.items()],
            "faults": list(self._faults),
        }
        temp = self._path.with_suffix(".tmp")
        # The folder is gone once the observer is; a daemon that outlives it runs on.
        with suppress(OSError):
            temp.write_text(json.dumps(record), encoding="utf-8")
            temp.replace(self._path)
        self._written = time.monotonic()

    def _finish(self) -> None:
        with suppress(Exception), self._lock:
            if self._calls:
                self._write()

    def _reset(self) -> None:
        """A new file, and a lock that nobody holds: at the start and in a forked child."""
        self._lock = threading.RLock()
        self._calls: dict[tuple[object, ...], Json] = {}
        self._counts: dict[tuple[object, ...], int] = {}
        self._faults: dict[str, None] = {}
        self._written = 0.0
        self._path = self._directory / f"{os.getpid()}-{os.urandom(4).hex()}.json"


class _Subject:
    """What was compiled: a module, or a function."""

    _serials = itertools.count()

    def __init__(self, torch: ModuleType, model: Function) -> None:
        owner = model.__self__ if isinstance(model, MethodType) else model
        self.serial = next(self._serials)
        """Told apart by this: an id would come back for another one once its module is gone."""
        self.module: nn.Module | None = owner if isinstance(owner, torch.nn.Module) else None
        # Module.compile compiles _call_impl; what it is called with are forward's arguments.
        inner = isinstance(model, MethodType) and model.__name__ not in ("_call_impl", "forward")
        if self.module is None or inner:
            self.name = f"{model.__module__}:{model.__qualname__}"
            self.function = model.__name__
            self._called = model
        else:
            self.name = _name_of(type(self.module))
            self.function = "forward"
            self._called = self.module.forward
        self._signature = inspect.signature(self._called)

    def named(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dict[str, object]:
        """The arguments by name; those of ``**kwargs`` by their own."""
        named: dict[str, object] = {}
        for name, value in self._signature.bind(*args, **kwargs).arguments.items():
            kind = self._signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_KEYWORD:
                named.update(value)
            else:
                named[name] = value
        return named

    def unnamed(self, named: Mapping[str, object]) -> dict[str, str]:
        """Arguments that cannot be passed by name."""
        kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY)
        parameters = self._signature.parameters
        return {
            name: "a positional-only argument"
            for name in named
            if name in parameters and parameters[name].kind in kinds
        }

    def trains(self) -> bool:
        """True when any parameter requires a gradient."""
        return self.module is not None and any(p.requires_grad for p in self.module.parameters())

    def tensors(self) -> list[Tensor]:
        """Parameters and buffers of the module; none of a function."""
        if self.module is None:
            return []
        return [*self.module.parameters(), *self.module.buffers()]


def _name_of(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _tensor(tensor: Tensor) -> Json:
    strides, step = list[int](), 1
    for size in reversed(tensor.shape):
        strides.insert(0, step)
        step *= max(size, 1)
    plain = tensor.numel() == 0 or strides == list(tensor.stride())
    return {
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "stride": None if plain else list(tensor.stride()),
        "requires_grad": tensor.requires_grad,
    }
