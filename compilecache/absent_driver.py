"""Every name of Triton that is replaced so that code can be compiled for a GPU that is not there.

Part of ``absent_gpu``. Triton is told what to generate code for; what it would build to reach a driver is
built, to be found where there is one; what became of a binary is read from the binary.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, NoReturn

from compilecache.gpuprofile import GpuProfile
from compilecache.torch_names import absent
from compilecache.undecided import Refused

_PLACES = {
    "torch._inductor.runtime.static_triton_launcher": [
        "StaticallyLaunchedTritonKernel.load_kernel"
    ],
    "triton.backends.compiler": ["GPUTarget"],
    "triton.backends.nvidia.driver": [
        *("CudaDriver", "CudaLauncher", "CudaUtils", "libcuda_dirs", "library_dirs"),
    ],
    "triton.runtime.build": ["_build", "_load_module_from_path", "get_cache_manager"],
    "triton.runtime.errors": ["OutOfResources"],
    "triton.runtime": ["driver.set_active"],
}


def missing() -> list[str]:
    """Names used here that this Triton does not have; each as an import path."""
    found = absent(_PLACES)
    if not found and not os.access(_cuobjdump(), os.X_OK):
        found.append("triton.backends.nvidia's bin/cuobjdump")
    return found


def install(profile: GpuProfile) -> None:
    """Replaces them in this process for good."""
    _replace_driver(profile)
    _replace_building()
    _replace_launcher(profile)


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
            self.launcher_cls = _build_launcher
            self.get_current_device = lambda: 0
            self.set_current_device = lambda device: None
            self.get_current_stream = lambda device=0: 0
            self.get_device_capability = lambda device=0: profile.capability

        def get_current_target(self) -> Any:
            return target

    triton.runtime.driver.set_active(AbsentDriver())


class _Launcher:
    """Launches nothing."""

    @property
    def launch(self) -> Callable[..., None]:
        """As torch calls it where Triton runs no hooks."""
        return self

    def __call__(self, *args: object) -> None:
        raise Refused("a kernel would have been launched")


# -- what Triton builds with a C compiler ------------------------------------------------------------


def build_driver_stub() -> None:
    """Has Triton build the library through which it reaches a driver, unless the cache root has it.

    Whoever has the GPU then finds it there, and needs no C compiler.
    """
    from triton.backends.nvidia.driver import CudaUtils

    if _looks_by_folder() and not os.environ.get(_FOLDER):
        _not_built[
            "this Triton looks for its CudaUtils by the folder of the driver's library too: they are "
            f"built here if {_FOLDER} names that folder, here and where the GPU is"
        ] = None
        return
    _build(CudaUtils)


_FOLDER = "TRITON_LIBCUDA_PATH"


@functools.cache
def _looks_by_folder() -> bool:
    """Whether the name under which Triton keeps the library depends on where the driver is."""
    return _name_with("/here") != _name_with("/there")


def _name_with(folder: str) -> str:
    """The name that Triton looks for with the driver in that folder."""
    build: Any = importlib.import_module("triton.runtime.build")
    driver: Any = importlib.import_module("triton.backends.nvidia.driver")
    before, asked = (build.get_cache_manager, driver.library_dirs), list[str]()

    def note(name: str) -> NoReturn:
        asked.append(name)
        raise _Noted

    build.get_cache_manager, driver.library_dirs = note, lambda: [folder]
    try:
        driver.CudaUtils()
    except _Noted:
        return asked[0]
    finally:
        build.get_cache_manager, driver.library_dirs = before
    raise AssertionError("Triton looks nothing up")


class _Noted(Exception):
    """A name has been asked for."""


def not_built() -> tuple[str, ...]:
    """Why libraries could not be built here; a start with the GPU will try it again."""
    return tuple(_not_built)


_not_built: dict[str, None] = {}


def _build_launcher(source: object, metadata: object) -> _Launcher:
    """Builds the library that launches a kernel which torch's own launcher does not take."""
    from triton.backends.nvidia.driver import CudaLauncher

    _build(CudaLauncher, source, metadata)
    return _Launcher()


def _build(loaded: Callable[..., object], *args: object) -> None:
    try:
        loaded(*args)
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        _not_built[f"{loaded.__name__} of Triton was not built here: {first}"] = None


def _replace_building() -> None:
    """What Triton builds to reach a driver is linked with an empty one, and not loaded: there is none."""
    build: Any = importlib.import_module("triton.runtime.build")
    driver: Any = importlib.import_module("triton.backends.nvidia.driver")
    original = build._build

    def linked(
        name: str, source: str, folder: str, libraries: Any, *rest: Any, **named: Any
    ) -> Any:
        _empty_driver(original, Path(source), Path(folder))
        return original(name, source, folder, [*libraries, folder], *rest, **named)

    build._build, build._load_module_from_path = linked, lambda name, path: _Unloaded()
    driver.libcuda_dirs = lambda: [folder] if (folder := os.environ.get(_FOLDER)) else []


def _empty_driver(build: Any, source: Path, folder: Path) -> None:
    """A library of the driver's name with the functions that a source calls; they do nothing.

    With none at all, linkers that link as needed would forget the name.
    """
    empty = folder / "empty_driver.c"
    called = sorted({*re.findall(r"\bcu[A-Z]\w*", source.read_text(encoding="utf-8"))})
    empty.write_text("".join(f"void {name}(void) {{}}\n" for name in called), encoding="utf-8")
    made = build("empty_driver", str(empty), str(folder), [], [], [], [f"-Wl,-soname,{_DRIVER}"])
    Path(made).rename(folder / _DRIVER)


_DRIVER = "libcuda.so.1"


class _Unloaded:
    """A library that was built and not loaded: it has whatever name is asked for."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return _nothing


def _nothing(*args: object, **named: object) -> None:
    """Whatever a driver would do."""


class _Binaries:
    """What Triton's driver says of a binary that it loads; launchers keep what else they take from it."""

    def __init__(self, profile: GpuProfile) -> None:
        self._profile = profile

    def __getattr__(self, name: str) -> Callable[..., None]:
        return _nothing

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
