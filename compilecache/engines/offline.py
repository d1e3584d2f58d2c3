"""Programs compiled where their GPU is not: the model and its inputs are fake, and nothing runs.

Only in a process whose torch was prepared by ``absent_gpu``. What is made here says so in its header; the
first process with the real GPU compares it with eager and settles it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from pydantic import JsonValue
from torch import nn

from compilecache import absent_driver, absent_gpu, aot_names, loading_names, undecided
from compilecache.cachedir import CacheDir
from compilecache.engines.dispatch import NoProgram
from compilecache.engines.fitting import differences
from compilecache.engines.harness import Harness, Replica, Run, first_line, phase
from compilecache.engines.making import at_its_call, make_program
from compilecache.engines.program import unfit
from compilecache.engines.programfile import (
    Header,
    program_among,
    read_header,
    sealed,
    write_program,
)
from compilecache.engines.way import NOT_PACKED
from compilecache.errors import (
    ChecksumMismatch,
    CompileCacheError,
    CompileFailed,
    FingerprintMismatch,
)
from compilecache.evidence import Evidence
from compilecache.gpuprofile import GpuProfile
from compilecache.shapes import CompileTarget
from compilecache.workload import Workload

logger = logging.getLogger("compilecache")

T = TypeVar("T")


class OfflineEngine:
    """Compiles programs for the GPU of a profile, one target after the other."""

    name = "program"

    def __init__(
        self,
        workload: Workload,
        cache: CacheDir,
        options: Mapping[str, JsonValue] | None,
        profile: GpuProfile,
        *,
        strict: bool = False,
    ) -> None:
        self._harness = Harness(workload, cache, options)
        self._profile = profile
        self._strict = strict
        """Whether a program that is there and does not fit is an error."""

    @property
    def harness(self) -> Harness:
        """How targets would be run."""
        return self._harness

    def compile_in_place(
        self, replica: Replica, targets: Iterable[CompileTarget], instances: int = 1
    ) -> None:
        """Nothing: no call of the model will be made."""

    def run(
        self, target: CompileTarget, module: nn.Module, present: Collection[str] | None = None
    ) -> Run:
        """Compiles one target; ``present``: the files of its record, where it is there already.

        Raises CompileFailed naming the target, the operation that stands in the way, and its line; with
        ``strict`` also ChecksumMismatch and FingerprintMismatch for a program that is there.
        """
        troubles: list[CompileCacheError] = []
        if present is not None:
            try:
                return self._known(target, module, present)
            except (ChecksumMismatch, FingerprintMismatch) as error:
                if self._strict:
                    raise
                troubles.append(error)
            except Exception as error:  # it was published by trace, or the workload fails
                logger.info("compilecache: %s is compiled anew: %s", target, first_line(error))
        function = self._harness.function(target, module)
        if reason := unfit(function, self._harness.options):
            raise _refusal(target, reason)
        try:
            run = self._make(target, module, function)
        except Exception as error:  # of torch's own, or of the workload
            raise _refusal(target, undecided.words_of(error)) from error
        return replace(run, troubles=tuple(troubles))

    def _known(self, target: CompileTarget, module: nn.Module, present: Collection[str]) -> Run:
        """A program that is there: it fits as far as can be told where it cannot run."""
        path = program_among(present)
        if path is None:
            raise NoProgram("there is none")
        began = time.perf_counter()
        header = read_header(self._harness.cache.root / path)
        function = self._harness.function(target, module)
        with phase(target.spec, module):
            changed = self._in_step(
                target, module, function, lambda args, kwargs: differences(header, target, function)
            )
        if changed:
            name, (then, now) = next(iter(changed.items()))
            raise FingerprintMismatch(
                f"the program of '{target}' was compiled with {name} = {then}, here it is {now}",
                next_step="A start without strict compiles it anew",
                changed=changed,
            )
        seconds = time.perf_counter() - began
        evidence = Evidence(
            outcome="hit",
            hits=1,
            misses=0,
            bypasses=0,
            launches=0,
            seconds=seconds,
            again_seconds=0,
        )
        return Run(evidence, frozenset(present), engine="program")

    def _make(self, target: CompileTarget, module: nn.Module, function: nn.Module) -> Run:
        harness, began = self._harness, time.perf_counter()

        def make(
            args: tuple[object, ...], kwargs: Mapping[str, object]
        ) -> tuple[aot_names.Made, Header]:
            with absent_gpu.refusing(self._profile):
                return make_program(target, function, args, kwargs, harness.options)

        with harness.observed(target, module, expect_warm=False, runs=False) as seen:
            absent_driver.build_driver_stub()
            with phase(target.spec, module):
                made, header = self._in_step(target, module, function, make)
                loaded = loading_names.load(made.data, function, header.imports)
            data, incomplete = aot_names.completed(made.function, loaded, function)
            header = header.model_copy(
                update={**sealed(data), "profile": self._profile.without_answers()}
            )
            path = write_program(harness.cache.root, header, data)
            seen.seconds = time.perf_counter() - began, 0.0
        evidence = harness.evidence(seen, harness.foreign(seen))
        kept = {file for file in harness.needed(seen) if not file.startswith(NOT_PACKED)}
        left = (f"torch may compile a variant where it runs: {one}" for one in incomplete)
        notes = (*left, *absent_driver.not_built())
        return Run(evidence, frozenset({path, *kept}), engine="program", notes=notes)

    def _in_step(
        self,
        target: CompileTarget,
        module: nn.Module,
        function: nn.Module,
        act: Callable[[tuple[object, ...], Mapping[str, object]], T],
    ) -> T:
        """Acts at the call that the workload's step makes, in whatever state it makes it."""

        def plainly(args: tuple[object, ...], kwargs: Mapping[str, object]) -> T:
            with absent_gpu.plainly():
                return act(args, kwargs)

        with absent_gpu.faking():
            return at_its_call(self._harness.workload, target, module, function, plainly)


def _refusal(target: CompileTarget, reason: str) -> CompileFailed:
    return CompileFailed(
        f"{target} cannot be compiled without its GPU: {reason}",
        next_step="Compile it where the GPU is, or change what is named; see docs/offline-compile.md",
        target=str(target),
    )
