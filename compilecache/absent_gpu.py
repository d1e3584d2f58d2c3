"""Every name of torch and Triton that is replaced so that code can be compiled for a GPU that is not there.

``install`` replaces them in this process for good, so it belongs in a process of its own, before
``torch._dynamo`` is imported. Nothing can be launched: tensors are fake, what a GPU would be asked
the profile answers, and what only a GPU can answer is refused. ``missing()`` lists what this torch
and this Triton do not have.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor

from compilecache import absent_context, absent_driver, attention_names, padding_names, undecided
from compilecache.errors import PlanError
from compilecache.gpuprofile import GpuProfile
from compilecache.torch_names import absent
from compilecache.undecided import Refused, Unplaced

_CUDA_PLACES = {
    "torch": ["_TorchCompileInductorWrapper.__call__"],
    "torch.cuda": [
        "is_available",
        "device_count",
        "current_device",
        "get_device_properties",
        "get_rng_state",
        "set_rng_state",
        "is_current_stream_capturing",
        "memory_stats",
        "_exchange_device",
        "_maybe_exchange_device",
        "_lazy_init",
    ],
    "torch.cuda.memory": ["memory_stats"],
}
_PLACES = {
    **_CUDA_PLACES,
    "torch._subclasses.fake_impls": ["run_fallback_kernel"],
    "torch._subclasses.fake_tensor": ["FakeTensorMode.avoid_device_init", "run_fallback_kernel"],
    "torch._subclasses.meta_utils": ["MetaConverter"],
    "torch._inductor.async_compile": [
        "AsyncCompile.wait_pool_ready",
        "get_compile_threads",
        "shutdown_compile_workers",
    ],
    "torch._inductor.fx_passes.joint_graph": ["UniformValueConstantFolder.run"],
    "torch._inductor.graph": ["GraphLowering.run"],
    "torch._inductor.runtime.benchmarking": ["benchmarker.benchmark", "benchmarker.benchmark_gpu"],
    "torch._inductor.runtime.triton_heuristics": ["CachingAutotuner._make_launchers"],
    "torch.utils._python_dispatch": ["_disable_current_modes"],
}


def missing() -> list[str]:
    """Names used here that this torch or this Triton does not have; each as an import path."""
    parts = (absent_driver, absent_context, attention_names, padding_names)
    return [*absent(_PLACES), *(name for part in parts for name in part.missing())]


def install(profile: GpuProfile) -> None:
    """Lets this process compile for the profile's GPU. Raises PlanError where that cannot be.

    Only before ``torch._dynamo`` is imported: it copies some of these names.
    """
    if "torch._dynamo" in sys.modules:
        raise RuntimeError("torch._dynamo is imported already: install() belongs before that")
    _refuse_lacking(absent(_CUDA_PLACES))  # before they are set
    _replace_device(profile)
    _refuse_lacking(missing())
    attention_names.note_own_order()
    _replace_generator()
    absent_driver.install(profile)
    _replace_fake_tensors()
    absent_context.install()
    _replace_folding()
    _replace_timing()


def _refuse_lacking(names: list[str]) -> None:
    if names:
        raise PlanError(
            f"this torch has no {', '.join(names)}",
            next_step="Compile on the GPU itself, or with a torch of docs/offline-compile.md",
            field="gpu_profile",
        )


def start_workers() -> None:
    """Forks the compile workers, which inherit what was replaced, while there is but one thread.

    Started otherwise they would look for a GPU of their own.
    """
    for name in ("torch._inductor.runtime.triton_heuristics", "triton.compiler.compiler"):
        importlib.import_module(name)
    from torch._inductor.async_compile import AsyncCompile, get_compile_threads

    if get_compile_threads() > 1:
        AsyncCompile.wait_pool_ready()


def end_workers() -> None:
    """Ends them."""
    from torch._inductor.async_compile import shutdown_compile_workers

    shutdown_compile_workers()


@contextmanager
def faking() -> Iterator[None]:
    """Tensors made in here have no data, whatever device they are for."""
    with _fake_mode():
        yield


@functools.cache
def _fake_mode() -> Any:
    """One for the whole process: a model of one mode takes inputs of the same."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def plainly() -> Iterator[None]:
    """No fake tensors meanwhile: for what looks at this thread as a trainer's would be."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        yield


# -- torch.cuda -------------------------------------------------------------------------------


def _replace_device(profile: GpuProfile) -> None:
    cuda: Any = torch.cuda
    properties = SimpleNamespace(**profile.properties())
    cuda.is_available = lambda: True
    cuda.current_device = lambda: 0
    cuda.get_device_properties = lambda device=None: properties
    cuda._exchange_device = lambda device: 0
    cuda._maybe_exchange_device = lambda device: 0
    cuda.is_current_stream_capturing = lambda: False
    cuda.set_rng_state = lambda state, device=0: None
    cuda._lazy_init = _refuse_cuda
    for name, answer in (("device_count", lambda: 1), ("get_rng_state", _no_random_state)):
        setattr(cuda, name, _for_torch_alone(name, answer))
    memory: Any = importlib.import_module("torch.cuda.memory")
    for module in (cuda, memory):
        module.memory_stats = _for_torch_alone("memory_stats", dict)


_COMPILER = f"{os.sep}torch{os.sep}_dynamo{os.sep}"


def _no_random_state(device: object = 0) -> Tensor:
    """Dynamo keeps it, and gives it back: any will do."""
    with plainly():
        return torch.zeros(16, dtype=torch.uint8)


def _for_torch_alone(name: str, answer: Any) -> Any:
    """An answer that will do for torch's own use; a workload would get one of no GPU."""

    def asked(*args: Any, **named: Any) -> Any:
        frames = traceback.extract_stack()
        frames.pop()
        asking = next(frame for frame in reversed(frames) if frame.filename not in _CUDA)
        if undecided.is_users(asking.filename):
            _refuse(name, frames)
        return answer(*args, **named)

    return asked


_CUDA = tuple(str(Path(torch.cuda.__file__).parent / name) for name in ("__init__.py", "memory.py"))
"""Where a workload's questions come in."""


def _refuse_cuda() -> None:
    """A workload that reads CUDA state would get an answer of no GPU; torch's compiler only waits for it."""
    frames = traceback.extract_stack()
    frames.pop()
    if not any(_COMPILER in frame.filename for frame in frames):
        _refuse("_lazy_init", frames)


def _refuse(name: str, frames: traceback.StackSummary) -> NoReturn:
    """``frames``: from the start of the process to the one that called the function of this name."""
    names = [frame.name for frame in frames]
    asked = next(
        (i for i in reversed(range(len(frames))) if undecided.is_users(frames[i].filename)), -1
    )
    words = [*names, name][asked + 1]
    raise Refused(f"torch.cuda.{words} needs the GPU itself, at {undecided.user_line(frames)}")


def _replace_generator() -> None:
    """Random numbers are never drawn, only their generator is asked for its device."""
    real = torch.Generator

    class Generator(real):  # type: ignore[misc, valid-type]
        def __new__(cls, device: Any = "cpu") -> Any:
            made = super().__new__(cls, "cpu")
            made.__dict__["_device"] = torch.device(device)
            return made

        def __init__(self, device: Any = "cpu") -> None:
            pass

        @property
        def device(self) -> torch.device:
            found: torch.device = self.__dict__["_device"]
            return found

    torch.Generator = Generator  # type: ignore[misc]


# -- fake tensors ------------------------------------------------------------------------------


def _replace_fake_tensors() -> None:
    fakes: Any = importlib.import_module("torch._subclasses.fake_tensor")
    fakes.FakeTensorMode.avoid_device_init = property(lambda self: True)
    if hasattr(fakes, "init_gpu_context"):
        fakes.init_gpu_context = lambda *args, **named: None
    run_it = fakes.run_fallback_kernel

    def run_fallback_kernel(mode: Any, func: Any, arguments: Any, *rest: Any) -> Any:
        """What an operation gives that has no code for fake tensors: torch runs it, on zeros."""
        if any(isinstance(value, Tensor) and value.device.type == "cuda" for value in arguments):
            raise Unplaced(undecided.plain(func), undecided.UNKNOWN)
        return run_it(mode, func, arguments, *rest)

    fakes.run_fallback_kernel = run_fallback_kernel
    impls: Any = importlib.import_module("torch._subclasses.fake_impls")
    impls.run_fallback_kernel = run_fallback_kernel
    swap: Any = torch.utils.swap_tensors

    def swap_tensors(one: Tensor, other: Tensor) -> None:
        """Also of tensors that the mode remembers having made, as those of any module are."""
        _fake_mode().fake_tensor_converter.meta_converter.tensor_memo.clear()
        swap(one, other)

    torch.utils.swap_tensors = swap_tensors


def _replace_folding() -> None:
    """Tiny uniform tensors that torch computes while it compiles are computed on the CPU."""
    from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder
    from torch.utils._pytree import tree_map

    base: Any = importlib.import_module("torch.utils._python_dispatch").TorchDispatchMode

    def moved(value: Any) -> Any:
        on_gpu = isinstance(value, torch.device) and value.type == "cuda"
        return torch.device("cpu") if on_gpu else value

    class OnCPU(base):  # type: ignore[misc]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*tree_map(moved, args), **tree_map(moved, kwargs or {}))

    original = UniformValueConstantFolder.run

    def run(self: Any, *args: Any, **named: Any) -> Any:
        with OnCPU():
            return original(self, *args, **named)

    UniformValueConstantFolder.run = run  # type: ignore[method-assign]


# -- what is refused -----------------------------------------------------------------------------


@contextmanager
def refusing(profile: GpuProfile) -> Iterator[None]:
    """While a graph is compiled, what a GPU would have to decide is an error that names its line.

    Unless the profile answers it.
    """
    import torch._inductor.config as config
    from torch._inductor.graph import GraphLowering

    wrapper: Any = torch._TorchCompileInductorWrapper
    compile_graph, lower = wrapper.__call__, GraphLowering.run
    asked: list[attention_names.Question] = []

    def compile_checked(self: Any, graph: Any, inputs: Any) -> Any:
        undecided.refuse_settings(self.config, config)
        undecided.refuse_operations(graph, len(asked))
        try:
            return compile_graph(self, graph, inputs)
        except Exception as error:
            if kernel := _too_large(error):
                line = undecided.kernel_line(error, kernel, graph)
                raise Refused(f"{kernel}, at {line}: {undecided.MEMORY}") from error
            raise

    def lower_checked(self: Any, *args: Any) -> Any:
        undecided.refuse_operations(self.module)  # of an operator that is traced only now
        return lower(self, *args)

    wrapper.__call__, GraphLowering.run = compile_checked, lower_checked  # type: ignore[method-assign]
    try:
        with (
            attention_names.answering(profile.attention, asked),
            padding_names.answering(profile.padding),
        ):
            yield
    finally:
        wrapper.__call__, GraphLowering.run = compile_graph, lower  # type: ignore[method-assign]


def _too_large(error: BaseException) -> str | None:
    """The kernel of which no configuration fits, where that is what went wrong."""
    if _OVER_LIMIT not in str(error):
        return None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name == "_make_launchers":
            kernel = frame.f_locals["self"]
            return str(kernel.inductor_meta.get("kernel_name"))
    return None


_OVER_LIMIT = "out of resource: shared memory"
"""Triton's words, which torch passes on."""


def _replace_timing() -> None:
    """Nothing is timed: nobody is to take what comes first for the fastest."""
    from torch._inductor.runtime.benchmarking import benchmarker

    def refuse(*args: Any, **named: Any) -> Any:
        raise Refused(f"torch would time kernels on the GPU, at {_line_here()}")

    for kind in type(benchmarker).__mro__:
        for name in {"benchmark", "benchmark_gpu"} & vars(kind).keys():
            setattr(kind, name, refuse)


def _line_here() -> str:
    return undecided.user_line(traceback.extract_stack())
