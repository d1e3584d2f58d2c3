"""How a target is run and what is seen of it: the same for every engine.

On the target's real device index: real inputs, forward, loss and backward, until it has settled;
the module is as it was afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import JsonValue
from torch import nn

from compilecache import inductor_names, torch_names
from compilecache.cachedir import CacheDir
from compilecache.contents import libraries, travels
from compilecache.errors import (
    CompileCacheError,
    CompileFailed,
    PlanError,
    RecompileBudgetExceeded,
    UnexpectedCompile,
)
from compilecache.evidence import Evidence, Outcome
from compilecache.kernels import FOLDER, is_stub, kernel_folder, looked_up
from compilecache.preserve import preserving
from compilecache.shapes import CompileTarget, InputSpec
from compilecache.watch import Sighting, watching
from compilecache.workload import Workload

COMMANDS_KEPT = 5
"""Command lines of compilers that evidence quotes."""

RUNS = 3
"""Two runs settle autotuning and gradient accumulation; a third only if the second compiled."""

_LEFT_BY_PROBE: dict[Path, set[str]] = {}
"""Per cache root: the libraries through which this process asked the CPU what it can."""


@dataclass(frozen=True, slots=True)
class Replica:
    """One instance of the model on one device."""

    device: str
    """With its index: "cuda:1", "cpu"."""
    module: nn.Module
    """The model as the trainer calls it."""


@dataclass(frozen=True, slots=True)
class Run:
    """What one target did."""

    evidence: Evidence
    """Counters, launches, foreign files, seconds."""
    files: frozenset[str]
    """Cache files the target made or read that a start elsewhere needs."""
    entries: int = 1
    """Compiled entries that torch holds for the function's own frame now; a program counts as one."""
    engine: str = "trace"
    """Which engine it went by."""
    notes: tuple[str, ...] = ()
    """Why it did not go by another, or how it came about, in words."""
    origin: str | None = None
    """The device that a program was compiled on, where that is another one."""
    troubles: tuple[CompileCacheError, ...] = ()
    """Programs that were there and could not be used: damage, or something they depend on changed."""
    first_contact: bool = False
    """Whether a program that was compiled without its GPU has run on one for the first time."""


@dataclass(slots=True)
class Seen:
    """What one measured stretch of work did; filled while it runs."""

    sighting: Sighting
    before: set[str]
    """Files of the root when it began."""
    counted: torch_names.Counts | None = None
    seconds: tuple[float, float] = (0.0, 0.0)
    """First and last run, wall clock."""
    after: set[str] | None = None
    peak: int | None = None
    """Of device memory; taken at the end where nobody took it before."""


class Harness:
    """Runs targets of one workload in one root."""

    def __init__(
        self, workload: Workload, cache: CacheDir, options: Mapping[str, JsonValue] | None = None
    ) -> None:
        self.workload = workload
        self.cache = cache
        self.options = dict(options or {})
        self._common: set[str] = set()
        self._bundled: set[str] = set()

    def function(self, target: CompileTarget, module: nn.Module) -> nn.Module:
        """The compiled function that a target calls."""
        return self.workload.functions(module)[target.spec.function]

    @contextmanager
    def observed(
        self, target: CompileTarget, module: nn.Module, *, expect_warm: bool, runs: bool = True
    ) -> Iterator[Seen]:
        """Whatever is compiled, opened or written in here is seen; the module is as it was.

        ``expect_warm``: code generation, should any happen, stays in this process, where it is seen.
        ``runs``: False where nothing does, since the device is not there.
        """
        device = torch.device(target.device)
        if device.type == "cuda":
            inductor_names.settle_ptxas()
        before = self.cache.files()
        with ExitStack() as stack:
            if runs:
                stack.enter_context(on(device))
                stack.enter_context(preserving(torch_names.original(module), device))
            stack.enter_context(torch_names.failing_at_limit())
            if expect_warm:
                stack.enter_context(inductor_names.compiling_in_process())
            else:
                inductor_names.forget_loaded()
            stack.enter_context(inductor_names.noting_bundled(self._bundled))
            seen = Seen(stack.enter_context(watching(self.cache.root)), before)
            self._probe_cpu(device, seen.sighting)
            start = torch_names.counts()
            yield seen
            seen.counted = torch_names.counts().since(start)
        seen.after = self.cache.files()
        seen.peak = seen.peak or (peak(device) if runs else None)

    def settle(self, target: CompileTarget, module: nn.Module) -> tuple[float, float]:
        """Runs the target until nothing compiles any more. Seconds of the first and the last run.

        Raises CompileFailed naming the target.
        """
        device, seconds = torch.device(target.device), []
        for _ in range(RUNS):
            before = torch_names.counts()
            seconds.append(self.step(target, module, device))
            if len(seconds) > 1 and torch_names.counts().frames == before.frames:
                return seconds[0], seconds[-1]
        raise CompileFailed(
            f"{target} compiles again on every call",
            next_step="Look for what changes between calls with TORCH_LOGS=recompiles",
            target=str(target),
        )

    def once(self, target: CompileTarget, module: nn.Module) -> None:
        """One step of a target that is warm; the module is as it was. Raises what the step raises."""
        device = torch.device(target.device)
        with on(device), preserving(torch_names.original(module), device):
            self.step(target, module, device)

    def step(self, target: CompileTarget, module: nn.Module, device: torch.device) -> float:
        """One step, in seconds. Raises CompileFailed naming the target."""
        spec = target.spec
        try:
            began = time.perf_counter()
            with phase(spec, module):
                inputs = self.workload.make_inputs(spec, module, device)
                self.workload.step(spec, module, inputs)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            return time.perf_counter() - began
        except (PlanError, UnexpectedCompile):
            raise
        except Exception as error:
            raise failure(target, error) from error

    def _probe_cpu(self, device: torch.device, seen: Sighting) -> None:
        """torch asks the CPU once per process; what that leaves in the root every target needs."""
        if device.type != "cpu" or self.options.get("backend", "inductor") != "inductor":
            return
        left, files = _LEFT_BY_PROBE.get(self.cache.root, set()), self.cache.files()
        if not left or not left <= files:
            inductor_names.probe_vector_sets()
            left = libraries(seen.used, self.cache.files())
            _LEFT_BY_PROBE[self.cache.root] = left
        self._common |= left

    # -- judging --------------------------------------------------------------------------------

    def evidence(self, seen: Seen, foreign: set[str], *, found: int = 0) -> Evidence:
        """What a stretch of work proves; ``found``: programs that were loaded, each a hit."""
        counted = seen.counted
        assert counted is not None
        launches = seen.sighting.launches
        return Evidence(
            outcome=_outcome(counted, found, compiled=bool(launches or foreign)),
            hits=counted.hits + found,
            misses=counted.misses,
            bypasses=counted.bypasses,
            launches=len(launches),
            launched=tuple(launches[:COMMANDS_KEPT]),
            foreign_files=tuple(sorted(foreign)),
            seconds=seen.seconds[0],
            again_seconds=seen.seconds[1],
            peak_bytes=seen.peak,
        )

    def foreign(self, seen: Seen) -> set[str]:
        """Files that appeared meanwhile and are not re-emitted from what was there."""
        assert seen.after is not None
        kernels = self._kernels(seen)
        return {path for path in seen.after - seen.before if travels(path, kernels)}

    def needed(self, seen: Seen) -> frozenset[str]:
        """Files that a start elsewhere needs to do the same without compiling."""
        after = seen.after
        assert after is not None
        kernels, used = self._kernels(seen), seen.sighting.used
        stubs = {path for path in after if is_stub(path)}
        kept = {path for path in after if kernel_folder(path) in kernels}
        opened = (used & after) | libraries(used, after)
        needed = self.foreign(seen) | opened | kept | stubs | self._common
        return frozenset(path for path in needed if travels(path, kernels))

    def _kernels(self, seen: Seen) -> set[str]:
        assert seen.after is not None
        kernels = looked_up(seen.sighting.used, self._bundled)
        if not inductor_names.bundles_triton():
            kernels |= {kernel_folder(path) for path in seen.after if path.startswith(f"{FOLDER}/")}
        return kernels


def _outcome(counted: torch_names.Counts, found: int, *, compiled: bool) -> Outcome:
    if counted.bypasses:
        return "bypass"
    if counted.misses or compiled:
        return "miss"
    return "hit" if counted.hits or found else "live"


def failure(target: CompileTarget, error: Exception) -> Exception:
    """What an error in a step is to the caller."""
    if torch_names.is_limit_error(error):
        limits = torch_names.limits()
        return RecompileBudgetExceeded(
            f"{target} would be compiled past torch's limit and run on the slow path for ever",
            next_step="Let ensure_warm compile the module, or pass recompile_limit to torch.compile",
            needed=limits.per_code + 1,
            limit=limits.per_code,
        )
    return CompileFailed(
        f"{target} failed: {first_line(error)}",
        next_step="Run the step eagerly with these shapes, or drop the shape from the plan",
        target=str(target),
    )


def first_line(error: BaseException) -> str:
    """Kind and first line of an error."""
    first = (str(error).strip().splitlines() or [""])[0][:300]
    return f"{type(error).__name__}: {first}"


@contextmanager
def on(device: torch.device) -> Iterator[None]:
    """The device is the current one, and its peak of memory counts from here."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        torch.cuda.reset_peak_memory_stats(device)
        yield


def peak(device: torch.device) -> int | None:
    """Peak memory of a device since ``on``; None where it does not count."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


@contextmanager
def phase(spec: InputSpec, module: nn.Module) -> Iterator[None]:
    """Modes and grad mode of a spec's phase."""
    module.train(spec.phase == "train")
    with torch.inference_mode(False), torch.set_grad_enabled(spec.phase == "train"):
        yield
