"""Whether this torch has what is needed, what a trace does to other threads, and who compiles."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence

import torch

from compilecache import aot_names, inductor_names, torch_names
from compilecache.doctor.finding import Finding
from compilecache.guard import hooks, state
from compilecache.guard.probe import trace_effect

PARTS = {
    "compiling": torch_names.missing,
    "the cache": inductor_names.missing,
    "programs": aot_names.missing,
    "the seal": hooks.missing,
    "workers": state.missing,
}
"""What fails without the names that are missing."""


def check_names() -> Iterator[Finding]:
    """Private names of torch that are used here."""
    lacking = {part: missing() for part, missing in PARTS.items()}
    for part, names in lacking.items():
        if names:
            yield Finding(
                f"torch {torch.__version__} lacks {', '.join(names)}",
                f"Needed for {part}. This version of torch was not tried, or somebody has patched it.",
                "pip install --upgrade compilecache",
                "error",
            )
    if not any(lacking.values()):
        yield Finding(f"torch {torch.__version__} has every name that is needed")


def check_threads() -> Iterator[Finding]:
    """A trace in one thread, a compiled call in another."""
    effect = trace_effect()
    if effect.harmless:
        yield Finding("a thread that traces leaves other threads alone")
        return
    hurt = ["compiled calls"] if effect.refuses_compiled_calls else []
    hurt += ["plain modules"] if effect.disturbs_modules else []
    yield Finding(
        f"while one thread traces, {' and '.join(hurt)} of other threads fail",
        "So nothing may be traced once the threads run. After ensure_warm the seal sees to that.",
        "Call ensure_warm before the threads start",
        "note",
    )


def check_compilers(devices: Sequence[str]) -> Iterator[Finding]:
    """Programs that generate code; a restore needs none for kernels of Inductor on GPUs."""
    if _on_cpu(devices):
        name, what = os.environ.get("CXX") or "g++", "CPU code"
    else:
        name, what = os.environ.get("CC") or "gcc", "Triton's launchers"
    if shutil.which(name) is None and shutil.which("clang++") is None:
        yield Finding(
            f"there is no compiler '{name}' on the PATH",
            f"It builds {what}. A start that finds everything in the cache does without.",
            "sudo apt-get install --yes g++",
            "warning",
        )
    else:
        yield Finding("a compiler is there")


def check_threads_of_cpu(devices: Sequence[str]) -> Iterator[Finding]:
    """Without a plan nobody knows the published number; whether it is fixed can be seen."""
    if _on_cpu(devices) and "OMP_NUM_THREADS" not in os.environ:
        yield Finding(
            "OMP_NUM_THREADS is not set",
            "CPU code is generated for a number of threads, which then follows the cores: a host with "
            "other cores finds nothing.",
            f"export OMP_NUM_THREADS={torch.get_num_threads()}",
            "note",
        )


def _on_cpu(devices: Sequence[str]) -> bool:
    return any(device.startswith("cpu") for device in devices)
