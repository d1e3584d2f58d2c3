"""Engine ``trace``: Dynamo traces every target, the restored directory spares it the compiling.

Works for every module that ``torch.compile`` takes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from weakref import WeakSet

from pydantic import JsonValue
from torch import nn

from compilecache import torch_names
from compilecache.cachedir import CacheDir
from compilecache.engines import dispatch
from compilecache.engines.harness import Harness, Replica, Run
from compilecache.errors import PlanError, RecompileBudgetExceeded
from compilecache.shapes import CompileTarget
from compilecache.workload import Workload

SPARE_ENTRIES = 8
"""Entries beyond the plan, so that a shape somebody adds by hand still compiles."""

_OURS: WeakSet[nn.Module] = WeakSet()
"""Functions that this process compiled in place here."""


def is_given(function: nn.Module) -> bool:
    """Whether a function was compiled by somebody else, with options of their own."""
    return torch_names.is_compiled(function) and function not in _OURS


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
        keeps_programs: bool = False,
    ) -> None:
        self.harness = Harness(workload, cache, options)
        self._spare = spare
        self._keeps_programs = keeps_programs

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
        functions = self.harness.workload.functions(replica.module)
        for name in sorted({target.spec.function for target in needed}):
            if name not in functions:
                raise PlanError(
                    f"the plan names function '{name}', the workload has {sorted(functions)}",
                    next_step="Mend 'function' in the plan's specs",
                    field="function",
                )
            if not self._keeps_programs:
                dispatch.remove(functions[name])
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
            torch_names.compile_in_place(function, dynamic=False, **limit, **self.harness.options)
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

    def run(
        self, target: CompileTarget, module: nn.Module, present: Collection[str] | None = None
    ) -> Run:
        """Runs one target until it has settled and says what that took.

        ``present``: the files of its record when all are in the root, so that nothing should
        compile. Raises CompileFailed naming the target; the module is as it was in every case.
        """
        harness = self.harness
        with harness.observed(target, module, expect_warm=present is not None) as seen:
            seen.seconds = harness.settle(target, module)
        evidence = harness.evidence(seen, harness.foreign(seen))
        files = harness.needed(seen) if evidence.outcome != "live" else frozenset()
        function = torch_names.original(harness.function(target, module))
        return Run(evidence, files, entries=torch_names.entries_of(function))

    def once(self, target: CompileTarget, module: nn.Module) -> None:
        """One step of a target that is warm; the module is as it was. Raises what the step raises."""
        self.harness.once(target, module)
