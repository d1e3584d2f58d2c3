"""Every name of torch and Triton that is replaced so that code can be compiled for a GPU that is not there.

``install`` replaces them in this process for good, so it belongs in a process of its own, before
``torch._dynamo`` is imported. Nothing can be launched: tensors are fake, what a GPU would be asked
the profile answers, and what only a GPU can answer is refused. ``missing()`` lists what this torch
and this Triton do not have.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from compilecache.errors import PlanError
from compilecache.gpuprofile import GpuProfile
from compilecache.torch_names import absent

_PLACES = {
    "torch": ["_TorchCompileInductorWrapper.__call__"],
    "torch.cuda": [
        "is_available",
        "device_count",
        "current_device",
        "get_device_properties",
        "get_rng_state",
        "set_rng_state",
        "is_current_stream_capturing",
        "_exchange_device",
        "_maybe_exchange_device",
        "_lazy_init",
    ],
    "torch._C": ["_ensureCUDADeviceGuardSet"],
    "torch._subclasses.fake_tensor": ["FakeTensorMode.avoid_device_init"],
    "torch._subclasses.meta_utils": ["MetaConverter"],
    "torch._inductor.async_compile": [
        "AsyncCompile.wait_pool_ready",
        "get_compile_threads",
        "shutdown_compile_workers",
    ],
    "torch._inductor.fx_passes.joint_graph": ["UniformValueConstantFolder.run"],
    "torch._inductor.runtime.static_triton_launcher": [
        "StaticallyLaunchedTritonKernel.load_kernel"
    ],
    "torch.utils._python_dispatch": ["_disable_current_modes"],
    "triton.backends.compiler": ["GPUTarget"],
    "triton.backends.nvidia.driver": ["CudaDriver"],
    "triton.runtime.errors": ["OutOfResources"],
    "triton.runtime": ["driver.set_active"],
}

_HOOKS_HEADER = Path("ATen", "detail", "AcceleratorHooksInterface.h")
_HOOKS = "_ZN2at6detail12getCUDAHooksEv"
"""``at::detail::getCUDAHooks()``."""
_CONTEXT = "hasPrimaryContext"


class Refused(Exception):
    """Something that only a real GPU can answer was asked; in words, with the line that asked."""


def missing() -> list[str]:
    """Names used here that this torch or this Triton does not have; each as an import path."""
    found = absent(_PLACES)
    if not hasattr(_library("libtorch_cpu.so"), _HOOKS):
        found.append("at::detail::getCUDAHooks")
    if _slot() is None:
        found.append(f"at::AcceleratorHooksInterface::{_CONTEXT}")
    return found


def install(profile: GpuProfile) -> None:
    """Lets this process compile for the profile's GPU. Raises PlanError where that cannot be.

    Only before ``torch._dynamo`` is imported: it copies some of these names.
    """
    if "torch._dynamo" in sys.modules:
        raise RuntimeError("torch._dynamo is imported already: install() belongs before that")
    _replace_device(profile)
    if lacking := missing():
        raise PlanError(
            f"this torch has no {', '.join(lacking)}",
            next_step="Compile on the GPU itself, or with a torch of docs/offline-compile.md",
            field="gpu_profile",
        )
    _replace_generator()
    _replace_driver(profile)
    _replace_fake_tensors()
    _replace_context()
    _replace_launcher(profile)
    _replace_folding()


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
    cuda.device_count = lambda: 1
    cuda.current_device = lambda: 0
    cuda.get_device_properties = lambda device=None: properties
    cuda._exchange_device = lambda device: 0
    cuda._maybe_exchange_device = lambda device: 0
    cuda.is_current_stream_capturing = lambda: False
    cuda.get_rng_state = _no_random_state
    cuda.set_rng_state = lambda state, device=0: None
    cuda._lazy_init = _refuse_cuda


_COMPILER = f"{os.sep}torch{os.sep}_dynamo{os.sep}"


def _no_random_state(device: object = 0) -> Tensor:
    """Dynamo keeps it, and gives it back: any will do."""
    with plainly():
        return torch.zeros(16, dtype=torch.uint8)


def _refuse_cuda() -> None:
    """A workload that reads CUDA state would get an answer of no GPU; torch's compiler only waits for it."""
    frames = traceback.extract_stack()
    frames.pop()
    if any(_COMPILER in frame.filename for frame in frames):
        return
    asked = next(frame.name for frame in reversed(frames) if frame.name != "_lazy_init")
    raise Refused(f"torch.cuda.{asked} needs the GPU itself, at {user_line(frames)}")


def user_line(frames: traceback.StackSummary) -> str:
    """The innermost line that is not torch's own nor this library's: "model.py:70 in forward"."""
    own = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
    for frame in reversed(frames):
        if not frame.filename.startswith((*own, "<")):
            return f"{frame.filename}:{frame.lineno} in {frame.name}"
    return "no line of yours"


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


# -- Triton ------------------------------------------------------------------------------------


def _replace_driver(profile: GpuProfile) -> None:
    """Triton is told what to generate code for, and what became of a binary.

    Compile workers are forked from this process, so they are told, too.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaDriver

    major, minor = profile.capability
    target = GPUTarget("cuda", major * 10 + minor, profile.warp_size)

    class AbsentDriver(CudaDriver):  # type: ignore[misc]
        def __init__(self) -> None:
            self.utils = _Binaries(profile)
            self.launcher_cls = _Launcher
            self.get_current_device = lambda: 0
            self.set_current_device = lambda device: None
            self.get_current_stream = lambda device=0: 0
            self.get_device_capability = lambda device=0: profile.capability

        def get_current_target(self) -> Any:
            return target

    triton.runtime.driver.set_active(AbsentDriver())


class _Launcher:
    """Launches nothing."""

    def __init__(self, source: object, metadata: object) -> None:
        self.launch = self

    def __call__(self, *args: object) -> None:
        raise Refused("a kernel would have been launched")


class _Binaries:
    """What Triton's driver says of a binary that it loads."""

    def __init__(self, profile: GpuProfile) -> None:
        self._profile = profile

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Only what is asked for."""
        return {"max_shared_mem": self._profile.shared_memory_per_block_optin}

    def load_binary(
        self, name: str, binary: bytes, shared: int, device: int
    ) -> tuple[int, int, int, int, int]:
        """Module, function, registers, spills, threads a block at most."""
        with NamedTemporaryFile(suffix=".cubin") as file:
            file.write(binary)
            file.flush()
            registers, stack = resources(Path(file.name))
        warp = self._profile.warp_size
        fit = self._profile.regs_per_multiprocessor // (max(registers, 1) * warp) * warp
        return 0, 0, registers, stack // 4, min(fit, self._profile.max_threads_per_block)


def _replace_launcher(profile: GpuProfile) -> None:
    """A kernel is not loaded; how many registers it takes is read from its binary."""
    from torch._inductor.runtime.static_triton_launcher import StaticallyLaunchedTritonKernel
    from triton.runtime.errors import OutOfResources

    limit = profile.shared_memory_per_block_optin

    def load_kernel(self: Any, device: int) -> None:
        if self.function is not None:
            return
        if self.shared > limit:
            raise OutOfResources(self.shared, limit, "shared memory")
        self.n_regs, stack = resources(Path(self.cubin_path))
        self.n_spills, self.function = stack // 4, 0

    StaticallyLaunchedTritonKernel.load_kernel = load_kernel  # type: ignore[method-assign]


def resources(cubin: Path) -> tuple[int, int]:
    """Registers a thread and bytes of stack of the one kernel of a binary, as cuobjdump says."""
    command = [str(_cuobjdump()), "-res-usage", str(cubin)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    if found is None:
        raise RuntimeError(f"cuobjdump says nothing of registers: {said[:200]!r}")
    return int(found[1]), int(found[2])


@functools.cache
def _cuobjdump() -> Path:
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


# -- fake tensors ------------------------------------------------------------------------------


def _replace_fake_tensors() -> None:
    fakes: Any = importlib.import_module("torch._subclasses.fake_tensor")
    fakes.FakeTensorMode.avoid_device_init = property(lambda self: True)
    if hasattr(fakes, "init_gpu_context"):
        fakes.init_gpu_context = lambda *args, **named: None
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


# -- autograd ----------------------------------------------------------------------------------


def _replace_context() -> None:
    """Autograd asks whether the device of a gradient has a context: it has none, and that is fine.

    Asked for a device that is not there, torch's own answer is an error. The question goes through the
    table of virtual functions of one object; its place in it is counted in the header that torch ships.
    """
    torch._C._ensureCUDADeviceGuardSet()
    slot = _slot()
    assert slot is not None
    get_hooks = getattr(_library("libtorch_cpu.so"), _HOOKS)
    get_hooks.restype = ctypes.c_void_p
    table = ctypes.POINTER(ctypes.c_void_p).from_address(get_hooks())
    before, size = 2, 128  # what lies before the first function: offset and type
    start = ctypes.addressof(table.contents) - before * ctypes.sizeof(ctypes.c_void_p)
    copied = (ctypes.c_void_p * (before + size))()
    ctypes.memmove(copied, start, ctypes.sizeof(copied))
    copied[before + slot] = ctypes.cast(_no_context, ctypes.c_void_p).value
    _KEPT.append(copied)
    first = ctypes.addressof(copied) + before * ctypes.sizeof(ctypes.c_void_p)
    ctypes.c_void_p.from_address(get_hooks()).value = first


_KEPT: list[Any] = []
"""What C++ holds on to."""


_no_context = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_int8)(
    lambda hooks, device: True
)


@functools.cache
def _slot() -> int | None:
    """Place of the question among the virtual functions; a destructor takes two."""
    header = Path(torch.__file__).parent / "include" / _HOOKS_HEADER
    try:
        text = header.read_text(encoding="utf-8")
    except OSError:
        return None
    names: list[str] = re.findall(r"^\s*virtual\s[^;{]*?(~?\w+)\(", text, re.MULTILINE)
    if _CONTEXT not in names:
        return None
    before = names[: names.index(_CONTEXT)]
    return len(before) + sum(name.startswith("~") for name in before)


def _library(name: str) -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))


# -- what is refused -----------------------------------------------------------------------------


@contextmanager
def refusing() -> Iterator[None]:
    """While a graph is compiled, what a GPU would have to decide is an error that names its line."""
    wrapper: Any = torch._TorchCompileInductorWrapper
    original = wrapper.__call__

    def checked(self: Any, graph: Any, inputs: Any) -> Any:
        refuse_undecided(graph.graph)
        return original(self, graph, inputs)

    wrapper.__call__ = checked
    try:
        yield
    finally:
        wrapper.__call__ = original


def refuse_undecided(graph: torch.fx.Graph) -> None:
    """Raises Refused for an operation of a traced graph whose code the GPU itself decides."""
    for node in graph.nodes:
        name = getattr(node.target, "__name__", str(node.target))
        if name == "scaled_dot_product_attention" and not _only_math():
            why = "torch asks the GPU which kernel it takes"
        elif "triton_kernel_wrapper" in name:
            why = "a Triton kernel of your own is launched in another way than torch's"
        else:
            continue
        raise Refused(f"{name}, at {node_line(node)}: {why}")


def _only_math() -> bool:
    """Whether the only kernel that is allowed needs nobody to be asked."""
    backends: Any = torch.backends.cuda
    fused = (
        backends.flash_sdp_enabled(),
        backends.mem_efficient_sdp_enabled(),
        backends.cudnn_sdp_enabled(),
    )
    return not any(fused)


def node_line(node: torch.fx.Node) -> str:
    """Where in somebody's source a node was traced: "model.py:70 in forward"."""
    frames = re.findall(r'File "(.+)", line (\d+), in (.+)', node.stack_trace or "")
    path, number, function = frames[-1] if frames else ("", "", "")
    return f"{path}:{number} in {function}" if path else "no line of yours"


def words_of(error: BaseException) -> str:
    """What went wrong, in one line, with the innermost line of the workload."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, Refused):
            return str(found)
        found = found.__cause__ or found.__context__
    first = (str(error).strip().splitlines() or [""])[0][:300]
    where = user_line(traceback.extract_tb(error.__traceback__))
    return f"{type(error).__name__}: {first} (at {where})"
