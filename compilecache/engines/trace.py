"""Engine ``trace``: Dynamo traces every target, the restored directory spares it the compiling.

Per target, on its real device index: real inputs, forward, loss and backward, twice. Works for
every module that ``torch.compile`` takes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from weakref import WeakSet

import torch
from pydantic import JsonValue
from torch import nn

from compilecache import inductor_names, torch_names
from compilecache.cachedir import CacheDir
from compilecache.contents import libraries, travels
from compilecache.errors import (
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

SPARE_ENTRIES = 8
"""Entries beyond the plan, so that a shape somebody adds by hand still compiles."""

COMMANDS_KEPT = 5
"""Command lines of compilers that evidence quotes."""

RUNS = 3
"""Two runs settle autotuning and gradient accumulation; a third only if the second compiled."""


_OURS: WeakSet[nn.Module] = WeakSet()
"""Functions that this process compiled in place here."""

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
    """Compiled entries that torch holds for the function's own frame now."""


class TraceEngine:
    """Compiles modules in place and runs targets through them."""

    name = "trace"

    def __init__(
        self,
        workload: Workload,
        cache: CacheDir,
        options: Mapping[str, JsonValue] | None = None,
        *,
        spare: int = SPARE_ENTRIES,
    ) -> None:
        self._workload = workload
        self._cache = cache
        self._options = dict(options or {})
        self._spare = spare
        self._common: set[str] = set()
        self._bundled: set[str] = set()

    def compile_in_place(
        self, replica: Replica, targets: Iterable[CompileTarget], instances: int = 1
    ) -> None:
        """Compiles the workload's functions as ``nn.Module.compile`` would, sized for the plan.

        ``targets``: all of the plan on every device, since a code object's entries are shared by
        devices and instances, and by version of torch also by functions. Functions that are compiled
        already are left as they are. Raises RecompileBudgetExceeded before anything runs when torch
        would not keep that many entries.
        """
        needed = list(targets)
        functions = self._workload.functions(replica.module)
        for name in sorted({target.spec.function for target in needed}):
            if name not in functions:
                raise PlanError(
                    f"the plan names function '{name}', the workload has {sorted(functions)}",
                    next_step="Mend 'function' in the plan's specs",
                    field="function",
                )
            self._compile(functions[name], len(needed) * instances)

    def _compile(self, function: nn.Module, needed: int) -> None:
        inner = torch_names.original(function)
        total = needed + self._spare + torch_names.entries_of(inner)
        compiled = torch_names.is_compiled(function)
        carried = torch_names.takes_recompile_limit() and not compiled
        self._assert_budget(function, needed, total)
        torch_names.raise_limits(torch_names.Limits(per_code=0 if carried else total, in_all=total))
        torch_names.compile_again(inner)
        if not compiled:
            limit = {"recompile_limit": total} if carried else {}
            torch_names.compile_in_place(function, dynamic=False, **limit, **self._options)
            _OURS.add(function)

    def _assert_budget(self, function: nn.Module, needed: int, total: int) -> None:
        """A limit that the caller gave to ``torch.compile`` is kept; one of ours grows."""
        if function in _OURS:
            torch_names.raise_carried_limit(function, total)
        limit = torch_names.carried_limit(function) if torch_names.is_compiled(function) else None
        if limit is not None and needed > limit:
            name = type(torch_names.original(function)).__name__
            raise RecompileBudgetExceeded(
                f"the plan needs {needed} compiled entries for {name}, "
                f"which was compiled with recompile_limit={limit}",
                next_step=f"Compile it with recompile_limit={needed} or more, "
                "or let ensure_warm compile it",
                needed=needed,
                limit=limit,
            )

    def run(self, target: CompileTarget, module: nn.Module, *, expect_warm: bool) -> Run:
        """Runs one target until it has settled and says what that took.

        ``expect_warm``: code generation, should any happen, stays in this process, where it is
        seen. Raises CompileFailed naming the target; the module is as it was in every case.
        """
        device = torch.device(target.device)
        if device.type == "cuda":
            inductor_names.settle_ptxas()
        before = self._cache.files()
        with ExitStack() as stack:
            stack.enter_context(_on(device))
            stack.enter_context(preserving(torch_names.original(module), device))
            stack.enter_context(torch_names.failing_at_limit())
            if expect_warm:
                stack.enter_context(inductor_names.compiling_in_process())
            else:
                inductor_names.forget_loaded()
            stack.enter_context(inductor_names.noting_bundled(self._bundled))
            seen = stack.enter_context(watching(self._cache.root))
            self._probe_cpu(device, seen)
            counted, seconds = self._settle(target, module, device)
        after = self._cache.files()
        run = self._judge(counted, seconds, seen, before, after, _peak(device))
        function = self._workload.functions(module)[target.spec.function]
        entries = torch_names.entries_of(torch_names.original(function))
        return replace(run, entries=entries)

    def once(self, target: CompileTarget, module: nn.Module) -> None:
        """One step of a target that is warm; the module is as it was. Raises what the step raises."""
        device = torch.device(target.device)
        with ExitStack() as stack:
            stack.enter_context(_on(device))
            stack.enter_context(preserving(torch_names.original(module), device))
            self._step(target, module, device)

    def _probe_cpu(self, device: torch.device, seen: Sighting) -> None:
        """torch asks the CPU once per process; what that leaves in the root every target needs."""
        if device.type != "cpu" or self._options.get("backend", "inductor") != "inductor":
            return
        left, files = _LEFT_BY_PROBE.get(self._cache.root, set()), self._cache.files()
        if not left or not left <= files:
            inductor_names.probe_vector_sets()
            left = libraries(seen.used, self._cache.files())
            _LEFT_BY_PROBE[self._cache.root] = left
        self._common |= left

    def _settle(
        self, target: CompileTarget, module: nn.Module, device: torch.device
    ) -> tuple[torch_names.Counts, list[float]]:
        start, seconds = torch_names.counts(), []
        for _ in range(RUNS):
            before = torch_names.counts()
            seconds.append(self._step(target, module, device))
            if len(seconds) > 1 and torch_names.counts().frames == before.frames:
                return torch_names.counts().since(start), seconds
        raise CompileFailed(
            f"{target} compiles again on every call",
            next_step="Look for what changes between calls with TORCH_LOGS=recompiles",
            target=str(target),
        )

    def _step(self, target: CompileTarget, module: nn.Module, device: torch.device) -> float:
        spec = target.spec
        try:
            began = time.perf_counter()
            with _phase(spec, module):
                inputs = self._workload.make_inputs(spec, module, device)
                self._workload.step(spec, module, inputs)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            return time.perf_counter() - began
        except (PlanError, UnexpectedCompile):
            raise
        except Exception as error:
            raise _failure(target, error) from error

    def _judge(
        self,
        counted: torch_names.Counts,
        seconds: list[float],
        seen: Sighting,
        before: set[str],
        after: set[str],
        peak: int | None,
    ) -> Run:
        kernels = looked_up(seen.used, self._bundled)
        if not inductor_names.bundles_triton():
            kernels |= {kernel_folder(path) for path in after if path.startswith(f"{FOLDER}/")}
        foreign = {path for path in after - before if travels(path, kernels)}
        stubs = {path for path in after if is_stub(path)}
        kept = {path for path in after if kernel_folder(path) in kernels}
        used = (seen.used & after) | libraries(seen.used, after)
        needed = foreign | used | kept | stubs | self._common
        evidence = Evidence(
            outcome=_outcome(counted, compiled=bool(seen.launches or foreign)),
            hits=counted.hits,
            misses=counted.misses,
            bypasses=counted.bypasses,
            launches=len(seen.launches),
            launched=tuple(seen.launches[:COMMANDS_KEPT]),
            foreign_files=tuple(sorted(foreign)),
            seconds=seconds[0],
            again_seconds=seconds[-1],
            peak_bytes=peak,
        )
        files = frozenset(path for path in needed if travels(path, kernels))
        return Run(evidence, files if evidence.outcome != "live" else frozenset())


def _outcome(counted: torch_names.Counts, *, compiled: bool) -> Outcome:
    if counted.bypasses:
        return "bypass"
    if counted.misses or compiled:
        return "miss"
    return "hit" if counted.hits else "live"


def _failure(target: CompileTarget, error: Exception) -> Exception:
    if torch_names.is_limit_error(error):
        limits = torch_names.limits()
        return RecompileBudgetExceeded(
            f"{target} would be compiled past torch's limit and run on the slow path for ever",
            next_step="Let ensure_warm compile the module, or pass recompile_limit to torch.compile",
            needed=limits.per_code + 1,
            limit=limits.per_code,
        )
    first = (str(error).strip().splitlines() or [""])[0][:300]
    return CompileFailed(
        f"{target} failed: {type(error).__name__}: {first}",
        next_step="Run the step eagerly with these shapes, or drop the shape from the plan",
        target=str(target),
    )


@contextmanager
def _on(device: torch.device) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        torch.cuda.reset_peak_memory_stats(device)
        yield


def _peak(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


@contextmanager
def _phase(spec: InputSpec, module: nn.Module) -> Iterator[None]:
    module.train(spec.phase == "train")
    with torch.inference_mode(False), torch.set_grad_enabled(spec.phase == "train"):
        yield
