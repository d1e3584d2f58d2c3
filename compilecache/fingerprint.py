"""What must be equal for a compiled artifact to be the right one: labelled, digestible, diffable.

Host names, pod addresses, folders of users and formatting never enter: two pods of one image agree.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from sysconfig import get_paths
from typing import TYPE_CHECKING

from compilecache.documents import read_json
from compilecache.errors import PlanError
from compilecache.sources import classes_digest, import_name, source_digest

if TYPE_CHECKING:
    import torch
    from torch import nn

    from compilecache.shapes import EngineName
    from compilecache.workload import Workload

FORMAT = 1

CPU_FLAGS = (
    "avx2 fma avx512f avx512bw avx512dq avx512vl avx512_vnni avx512_bf16 avx512_fp16 "
    "amx_tile amx_int8 amx_bf16 amx_fp16 asimd sve sve2 bf16 i8mm"
).split()
"""Instruction sets that Inductor generates code for; others cannot matter."""

ENV_PREFIXES = ("TORCHINDUCTOR_", "TORCHDYNAMO_", "TORCH_COMPILE", "TRITON_", "PYTORCH_MIOPEN")
"""Environment variables that may change generated code."""

ENV_IGNORED = (
    "TORCHINDUCTOR_CACHE_DIR TORCHINDUCTOR_COMPILE_THREADS TORCHINDUCTOR_WORKER_START "
    "TORCHINDUCTOR_FX_GRAPH_CACHE TORCHINDUCTOR_AUTOGRAD_CACHE TORCH_COMPILE_DEBUG "
    "TORCH_COMPILE_DEBUG_DIR TORCH_COMPILE_JOB_ID TRITON_CACHE_DIR TRITON_HOME TRITON_DUMP_DIR "
    "TRITON_OVERRIDE_DIR TRITON_PRINT_AUTOTUNING TRITON_PTXAS_PATH TRITON_LIBCUDA_PATH "
    "TRITON_ALWAYS_COMPILE"
).split()
"""Those that only say where, how fast or how loud."""


@dataclass(frozen=True)
class Fingerprint:
    """Labelled components of an environment and a workload."""

    components: Mapping[str, str]
    """Label → value, both for people to read; the digest is over exactly these."""

    @cached_property
    def digest(self) -> str:
        """32 hex digits, the name of this fingerprint in a store."""
        return hashlib.sha256(self.dump().encode()).hexdigest()[:32]

    def dump(self) -> str:
        """Canonical JSON."""
        content = {"format": FORMAT, "components": dict(sorted(self.components.items()))}
        return json.dumps(content, sort_keys=True, indent=1, ensure_ascii=True)

    @classmethod
    def parse(cls, text: str) -> Fingerprint:
        """Reads ``dump``'s output. Raises PlanError when it is something else."""
        try:
            content = read_json(text)
            if not isinstance(content, dict) or content["format"] != FORMAT:
                raise ValueError("another format, or none")
            components = content["components"]
            return cls({str(name): str(value) for name, value in components.items()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PlanError(
                f"this is no fingerprint of format {FORMAT}: {error}",
                next_step="Write one with 'compilecache fingerprint --json'",
            ) from error

    def diff(self, other: Fingerprint) -> dict[str, tuple[str, str]]:
        """Component → (theirs, ours) wherever ``other`` (theirs) and this one (ours) differ."""
        names = sorted({*self.components, *other.components})
        pairs = {
            n: (other.components.get(n, "absent"), self.components.get(n, "absent")) for n in names
        }
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def fingerprint(
    workload: Workload,
    module: nn.Module,
    device: torch.device,
    *,
    options: Mapping[str, object] | None = None,
    engine: EngineName = "trace",
) -> Fingerprint:
    """The fingerprint of a workload's module in this process, for devices of ``device``'s kind."""
    kind = {} if engine == "trace" else {"engine": "program", **_besides(workload, module)}
    return Fingerprint(
        {
            **_versions(),
            **(_machine(device) if engine == "trace" else _without_host(_machine(device))),
            **_settings(),
            **kind,
            "workload": _class_name(type(workload)),
            "workload.config": _canonical(workload.config()),
            "workload.modules": modules_digest(module),
            "workload.parameters": parameters_digest(module),
            "compile.options": _canonical(options or {}),
            **_sources(workload, module),
        }
    )


def environment(device: torch.device) -> Fingerprint:
    """Versions and machine alone: what an adopted directory, of whatever workload, is kept under."""
    return Fingerprint({**_versions(), **_machine(device)})


def here(device: torch.device) -> Fingerprint:
    """Versions, machine and settings of this process: all that is known without a model."""
    return Fingerprint({**_versions(), **_machine(device), **_settings()})


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=repr, separators=(",", ":"))


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _versions() -> dict[str, str]:
    import torch

    try:
        triton = str(importlib.import_module("triton").__version__)
    except ImportError:
        triton = "none"
    return {
        "torch": torch.__version__,
        "torch.git": str(torch.version.git_version),
        "triton": triton,
        "cuda": str(torch.version.cuda or torch.version.hip or "none"),
        "python": f"{sys.implementation.name} {sys.version_info.major}.{sys.version_info.minor}",
    }


def _machine(device: torch.device) -> dict[str, str]:
    import torch

    components = {
        "device": device.type,
        "cpu": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "cpu.flags": " ".join(_cpu_flags()),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        components["gpu"] = f"{properties.name} sm_{properties.major}{properties.minor}"
        components["driver"] = _driver()
    else:
        components["cpu.threads"] = str(torch.get_num_threads())
        # The one place where a path counts: Inductor names a CPU library by the whole command that
        # builds it, with torch's and Python's include folders.
        components["cpu.includes"] = f"{Path(torch.__file__).parent} {get_paths()['include']}"
    return components


def _without_host(machine: dict[str, str]) -> dict[str, str]:
    """What a program for a GPU is looked up by: the GPU, not the driver and the CPU beside it.

    Its binaries are for the GPU alone, and it may have been compiled where there is none.
    """
    if machine["device"] != "cuda":
        return machine
    left_out = ("cpu.flags", "driver")
    kept = {name: value for name, value in machine.items() if name not in left_out}
    return {**kept, "cpu": platform.machine()}


def _cpu_flags() -> list[str]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    line = next((li for li in text.splitlines() if li.startswith(("flags", "Features"))), "")
    present = set(line.partition(":")[2].split())
    return [flag for flag in CPU_FLAGS if flag in present]


def _driver() -> str:
    for path in ("/sys/module/nvidia/version", "/proc/driver/nvidia/version"):
        try:
            text = Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        words = text.split()
        return next((word for word in words if word[:1].isdigit() and "." in word), "unknown")
    return "unknown"


def _settings() -> dict[str, str]:
    import torch

    from compilecache import inductor_names

    environment = {
        f"env.{name}": value
        for name, value in os.environ.items()
        if name.startswith(ENV_PREFIXES) and name not in ENV_IGNORED
    }
    return {
        **environment,
        **{f"inductor.{name}": value for name, value in inductor_names.settings().items()},
        "default_dtype": str(torch.get_default_dtype()),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
    }


def modules_digest(module: nn.Module) -> str:
    """Over names, classes and ``extra_repr`` of the submodules: what parameters do not tell apart."""
    named = list(module.named_modules())
    lines = [f"{name} {_class_name(type(child))} {child.extra_repr()}" for name, child in named]
    text = re.sub(r"\b0x[0-9a-f]+", "", "\n".join(lines))
    return f"{_class_name(type(module))}, {len(named)} modules, {_short(text)}"


def _besides(workload: Workload, module: nn.Module) -> dict[str, str]:
    """What makes a program impossible in this process and shows in no class: mostly nothing.

    Whoever has hooks shares no records with those who have none.
    """
    from compilecache import state_names
    from compilecache.engines.trace import is_given

    named = list(module.named_modules())
    hooked = [name for name, child in named if any(state_names.hooks_of(child))]
    patched = [name for name, child in named if "forward" in vars(child)]
    given = [name for name, one in workload.functions(module).items() if is_given(one)]
    found = {"hooks": hooked, "forwards": patched, "compiled": given}
    return {
        f"workload.{what}": " ".join(map(repr, names)) for what, names in found.items() if names
    }


def _class_name(cls: type) -> str:
    return f"{import_name(cls.__module__)}.{cls.__qualname__}"


def parameters_digest(module: nn.Module) -> str:
    """Over names, shapes, dtypes, strides and requires_grad of parameters and buffers; no values."""
    named = [*module.named_parameters(), *module.named_buffers()]
    lines = [
        f"{name} {tuple(t.shape)} {t.dtype} {t.stride()} {t.requires_grad}" for name, t in named
    ]
    count = sum(t.numel() for _, t in named)
    return f"{len(lines)} tensors, {count} elements, {_short(chr(10).join(sorted(lines)))}"


def _sources(workload: Workload, module: nn.Module) -> dict[str, str]:
    given = sorted(set(workload.sources()))
    if given:
        return {f"source.{name}": source_digest(name) for name in given}
    by_module: dict[str, set[type]] = {}
    for cls in {type(child) for child in module.modules()}:
        if cls.__module__.partition(".")[0] != "torch":
            by_module.setdefault(cls.__module__, set()).add(cls)
    return {
        f"source.{import_name(name)}": classes_digest(classes)
        for name, classes in sorted(by_module.items())
    }


def nearest(mine: Fingerprint, others: Iterable[Fingerprint]) -> Fingerprint | None:
    """The published fingerprint that differs in the fewest components."""
    return min(others, key=lambda other: len(mine.diff(other)), default=None)
