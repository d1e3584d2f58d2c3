"""Whether a program fits: what it was compiled for, against what is here now."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch
from torch import nn

from compilecache import state_names
from compilecache.engines.conditions import Scope, unmet
from compilecache.engines.programfile import Header
from compilecache.engines.watched import tensors_digest
from compilecache.gpuprofile import GpuProfile
from compilecache.shapes import CompileTarget
from compilecache.sources import file_digest, import_name


def differences(
    header: Header,
    target: CompileTarget,
    function: nn.Module,
    looked: dict[str, str | None] | None = None,
) -> dict[str, tuple[str, str]]:
    """What is not as it was when the program was compiled: (then, now) by name; empty if it fits."""
    now = {
        "torch": torch_build(),
        "hardware": hardware(torch.device(target.device)),
        "parameters": tensors_digest(function),
    }
    then = {name: getattr(header, name) for name in now}
    now |= {f"state.{name}": value for name, value in state_names.state_words().items()}
    then |= {f"state.{name}": value for name, value in header.state.items()}
    now |= {f"source.{name}": value for name, value in source_digests(header.sources).items()}
    then |= {f"source.{name}": value for name, value in header.sources.items()}
    changed = {
        name: (then.get(name, "absent"), now.get(name, "absent"))
        for name in sorted({*then, *now})
        if then.get(name) != now.get(name)
    }
    return changed | unmet(header.conditions, Scope(function, header.imports, looked))


def hardware(device: torch.device) -> str:
    """What a program may count on, besides torch: name, capability, processors."""
    if device.type != "cuda":
        return device.type
    found = torch.cuda.get_device_properties(device)
    return f"{found.name} sm_{found.major}{found.minor}, {found.multi_processor_count} processors"


def profile_differences(profile: GpuProfile, device: torch.device) -> dict[str, tuple[str, str]]:
    """What of a GPU is not as the profile says: (profile, here) by field; empty if it is that GPU."""
    here = torch.cuda.get_device_properties(device)
    pairs = {f"gpu.{n}": (v, getattr(here, n, "absent")) for n, v in profile.properties().items()}
    return {
        name: (str(said), str(found))
        for name, (said, found) in pairs.items()
        if said != found and name not in _CAPACITY
    }


_CAPACITY = ("gpu.total_memory", "gpu.L2_cache_size")
"""Reach no code that is compiled, and differ a little from board to board."""


def torch_build() -> str:
    """Version and git hash."""
    return f"{torch.__version__} {torch.version.git_version}"


@cache
def _source_digest(module: str) -> str:
    """Once a process: what was imported does not change."""
    try:
        return file_digest(module)
    except (ImportError, OSError, SyntaxError, ValueError) as error:
        return f"unreadable: {type(error).__name__}"


def source_digests(modules: Iterable[str]) -> dict[str, str]:
    """Of the syntax trees of these modules, but torch's own and the script that is run.

    A script's classes, and what they reach in it, are in the fingerprint.
    """
    names = (name for name in modules if name.partition(".")[0] not in ("torch", "__main__"))
    return {import_name(name): _source_digest(name) for name in sorted(names)}
