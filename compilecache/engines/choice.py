"""Which engine a job asks for, and what every engine can do."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Protocol

from pydantic import JsonValue
from torch import nn

from compilecache.cachedir import CacheDir
from compilecache.engines.harness import Harness, Replica, Run
from compilecache.engines.program import Elsewhere, ProgramEngine
from compilecache.engines.trace import SPARE_ENTRIES, TraceEngine
from compilecache.gpuprofile import GpuProfile
from compilecache.shapes import CompileTarget, EngineName
from compilecache.workload import Workload


class Engine(Protocol):
    """Gets targets compiled and loaded."""

    @property
    def harness(self) -> Harness:
        """How targets are run."""
        ...

    def compile_in_place(
        self, replica: Replica, targets: Iterable[CompileTarget], instances: int = 1
    ) -> None:
        """Prepares a replica's functions for all targets of the plan."""
        ...

    def run(
        self, target: CompileTarget, module: nn.Module, present: Collection[str] | None = None
    ) -> Run:
        """Runs one target until it has settled; ``present``: its files, when all are in the root."""
        ...


def engine_of(
    name: EngineName,
    workload: Workload,
    cache: CacheDir,
    options: Mapping[str, JsonValue] | None = None,
    *,
    spare: int = SPARE_ENTRIES,
    elsewhere: Elsewhere = lambda target: None,
    strict: bool = False,
) -> Engine:
    """The engine of that name; ``auto`` is ``program``, which takes trace where it must."""
    if name == "trace":
        return TraceEngine(workload, cache, options, spare=spare)
    return ProgramEngine(workload, cache, options, spare=spare, elsewhere=elsewhere, strict=strict)


def offline_engine(
    workload: Workload,
    cache: CacheDir,
    options: Mapping[str, JsonValue] | None,
    profile: GpuProfile,
    *,
    strict: bool = False,
) -> Engine:
    """For a process without the GPU that it compiles for."""
    from compilecache.engines.offline import (
        OfflineEngine,  # what it replaces is no business of others
    )

    return OfflineEngine(workload, cache, options, profile, strict=strict)
