"""Engine ``program``: targets compiled ahead of time, loaded without tracing.

A program takes the live module at every call, so parameters stay the trainer's. What torch's guards
would check is recorded with it: compared once when it is loaded, the cheap part in every call. What
cannot be a program (graph breaks, hooks, wrappers, …) goes by engine ``trace``, with the reason.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from pydantic import JsonValue
from torch import nn

from compilecache import aot_names, loading_names, torch_names
from compilecache.cachedir import CacheDir
from compilecache.engines import dispatch
from compilecache.engines.beside import Beside
from compilecache.engines.dispatch import NoProgram
from compilecache.engines.harness import Harness, Replica, Run
from compilecache.engines.programfile import program_among
from compilecache.engines.trace import SPARE_ENTRIES, TraceEngine, is_given
from compilecache.engines.watched import refuse_unwatchable
from compilecache.engines.way import Looked, Way
from compilecache.errors import CompileCacheError, PlanError
from compilecache.shapes import CompileTarget
from compilecache.workload import Workload

BY_TRACE = "no program: it was published by trace"
"""The note of a target whose record holds none."""

Elsewhere = Callable[[CompileTarget], Collection[str] | None]
"""Files of the same spec's program on another device, all in the root; None when there is none."""


class ProgramEngine:
    """Compiles, loads and runs programs; targets that cannot be one go by trace."""

    name = "program"

    def __init__(
        self,
        workload: Workload,
        cache: CacheDir,
        options: Mapping[str, JsonValue] | None = None,
        *,
        spare: int = SPARE_ENTRIES,
        elsewhere: Elsewhere = lambda target: None,
        strict: bool = False,
    ) -> None:
        self._strict = strict
        """Whether a program that is there and cannot be used is an error."""
        self._trace = TraceEngine(workload, cache, options, spare=spare, keeps_programs=True)
        self._elsewhere = elsewhere
        self._no_program: dict[str, str] = {}
        """Functions that cannot be programs, and why."""
        self._looked: Looked = defaultdict(dict)
        """Nobody changes what they looked at meanwhile."""
        # Beside the restore, which waits for disks and networks; joined before torch is used.
        loading_names.import_first()
        self._imports = Beside(loading_names.import_ahead)

    @property
    def harness(self) -> Harness:
        """How targets are run."""
        return self._trace.harness

    def compile_in_place(
        self, replica: Replica, targets: Iterable[CompileTarget], instances: int = 1
    ) -> None:
        """As engine ``trace`` does; on top of it the look-up of programs. Raises as that does."""
        self._imports.join()
        needed = list(targets)
        functions = self.harness.workload.functions(replica.module)
        names = sorted({target.spec.function for target in needed})
        given = {name for name in names if name in functions and is_given(functions[name])}
        self._trace.compile_in_place(replica, needed, instances)
        for name in names:
            if name not in self._no_program:
                reason = unfit(functions[name], self.harness.options, given=name in given)
                if reason is not None:
                    self._no_program[name] = reason
                    continue
                dispatch.attach(functions[name])

    # -- one target -----------------------------------------------------------------------------

    def run(
        self, target: CompileTarget, module: nn.Module, present: Collection[str] | None = None
    ) -> Run:
        """Runs one target by its program until it has settled; by trace when it cannot be one.

        ``present``: the files of its record when all are in the root. Raises CompileFailed naming
        the target; with ``strict`` also FingerprintMismatch and ChecksumMismatch. The module is as it
        was in every case.
        """
        notes: list[str] = []
        troubles: list[CompileCacheError] = []
        for way in self._ways(target, present):
            try:
                run = way.run(target, module)
            except NoProgram as error:
                notes.append(f"{way.words}: {error}")
                if present is not None and isinstance(error.__cause__, CompileCacheError):
                    if self._strict:
                        raise error.__cause__ from None
                    troubles.append(error.__cause__)
            else:
                return replace(run, notes=tuple(notes), troubles=tuple(troubles))
        by_trace = present is not None and program_among(present) is None
        run = self._trace.run(target, module, present if by_trace else None)
        if not notes:
            reason = self._no_program.get(target.spec.function)
            notes.append(f"no program: {reason}" if reason else BY_TRACE)
        if present is not None and not by_trace and not troubles:
            run = replace(run, files=frozenset())  # a program of it is published, for others
        return replace(run, notes=tuple(notes), troubles=tuple(troubles))

    def _ways(self, target: CompileTarget, present: Collection[str] | None) -> Iterator[Way]:
        """The ways to a program, the cheapest first."""
        if target.spec.function in self._no_program:
            return
        if present is not None:
            path = program_among(present)
            if path is None:
                return
            yield self._way("its program was not used", known=True, path=path, files=present)
        elif torch.device(target.device).type == "cuda":
            files = self._elsewhere(target)
            path = program_among(files or ())
            if files is not None and path is not None:
                words = "the program of another device was not used"
                yield self._way(words, path=path, files=files)
        yield self._way("no program")

    def _way(
        self,
        words: str,
        *,
        known: bool = False,
        path: str | None = None,
        files: Collection[str] = (),
    ) -> Way:
        return Way(self.harness, self._give_up, self._looked, words, known, path, files)

    def once(self, target: CompileTarget, module: nn.Module) -> None:
        """One step of a target that is warm; the module is as it was. Raises what the step raises."""
        self.harness.once(target, module)

    def _give_up(self, target: CompileTarget, reason: str) -> None:
        """No other spec of the function is tried."""
        self._no_program.setdefault(target.spec.function, reason)


def unfit(
    function: nn.Module, options: Mapping[str, JsonValue], *, given: bool = False
) -> str | None:
    """Why a function cannot be a program; None when it may be one.

    ``given``: it was compiled by somebody else.
    """
    if given:
        return "it was compiled before, with options of its own"
    if options.get("backend", "inductor") != "inductor":
        return f"backend '{options['backend']}' makes none"
    if torch_names.is_compiled(function) and torch_names.uses_cuda_graphs(function):
        return "CUDA graphs belong to the thread that records them"
    if missing := aot_names.missing():
        return f"this torch has no {', '.join(missing)}"
    try:
        refuse_unwatchable(function)
    except PlanError as error:
        return error.problem
    return None
