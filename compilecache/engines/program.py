"""Engine ``program``: targets compiled ahead of time, loaded without tracing.

A program takes the live module at every call, so parameters stay the trainer's. What torch's guards
would check is recorded with it: compared once when it is loaded, the cheap part in every call. What
cannot be a program (graph breaks, hooks, wrappers, …) goes by engine ``trace``, with the reason.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache

import torch
from pydantic import JsonValue
from torch import Tensor, nn

from compilecache import aot_names, torch_names
from compilecache.cachedir import CacheDir
from compilecache.engines import canary, dispatch
from compilecache.engines.beside import Beside, without_collecting
from compilecache.engines.conditions import Scope, conditions_of, unmet
from compilecache.engines.dispatch import Dispatcher, NoProgram, Program
from compilecache.engines.harness import Harness, Replica, Run, first_line, peak
from compilecache.engines.programfile import (
    FOLDER,
    Header,
    program_among,
    read_program,
    sealed,
    write_program,
)
from compilecache.engines.trace import SPARE_ENTRIES, TraceEngine, is_given
from compilecache.engines.watched import refuse_unwatchable, tensors_digest, watch_of
from compilecache.errors import (
    ChecksumMismatch,
    CompileCacheError,
    CompileFailed,
    FingerprintMismatch,
    PlanError,
)
from compilecache.shapes import CompileTarget
from compilecache.sources import file_digest, import_name
from compilecache.workload import Workload

BY_TRACE = "no program: it was published by trace"
"""The note of a target whose record holds none."""

logger = logging.getLogger("compilecache")

TUNED = (".best_config",)
"""Which of several compiled kernels was fastest: a rewritten program tunes a few of them anew."""

NOT_PACKED = ("fxgraph/", "aotautograd/", f"{FOLDER}/")
"""What a program needs none of: it holds its graphs itself."""

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
        self.looked: dict[tuple[int, str], dict[str, str | None]] = defaultdict(dict)
        """By module and phase: what conditions found there; nobody changes it meanwhile."""
        # Beside the restore, which waits for disks and networks; joined before torch is used.
        aot_names.import_first()
        self._imports = Beside(aot_names.import_ahead)

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
                reason = self._unfit(functions[name], given=name in given)
                if reason is not None:
                    self._no_program[name] = reason
                    continue
                dispatch.attach(functions[name])

    def _unfit(self, function: nn.Module, *, given: bool) -> str | None:
        """Why a function cannot be a program; None when it may be one."""
        options = self.harness.options
        if given:
            return "it was compiled before, with options of its own"
        if options.get("backend", "inductor") != "inductor":
            return f"backend '{options['backend']}' makes none"
        if torch_names.uses_cuda_graphs(function):
            return "CUDA graphs belong to the thread that records them"
        if missing := aot_names.missing():
            return f"this torch has no {', '.join(missing)}"
        try:
            refuse_unwatchable(function)
        except PlanError as error:
            return error.problem
        return None

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

    def _ways(self, target: CompileTarget, present: Collection[str] | None) -> Iterator[_Way]:
        """The ways to a program, the cheapest first."""
        if target.spec.function in self._no_program:
            return
        if present is not None:
            path = program_among(present)
            if path is None:
                return
            yield _Way(self, "its program was not used", True, path, present)
        elif torch.device(target.device).type == "cuda":
            files = self._elsewhere(target)
            path = program_among(files or ())
            if files is not None and path is not None:
                yield _Way(self, "the program of another device was not used", False, path, files)
        yield _Way(self, "no program")

    def once(self, target: CompileTarget, module: nn.Module) -> None:
        """One step of a target that is warm; the module is as it was. Raises what the step raises."""
        self.harness.once(target, module)

    def give_up(self, target: CompileTarget, reason: str) -> None:
        """No other spec of the function is tried."""
        self._no_program.setdefault(target.spec.function, reason)


@dataclass(slots=True)
class _Way:
    """One way to the program of one target: from a file of the root, or by compiling it."""

    engine: ProgramEngine
    words: str
    """What it means when it leads nowhere."""
    known: bool = False
    """Whether the file belongs to a record of this very target, so that its canary has passed."""
    path: str | None = None
    """The program's file below the root; None to compile it."""
    files: Collection[str] = ()
    """Of the record that the file belongs to."""
    header: Header | None = None
    data: bytes = b""
    reading: float = 0.0
    """Seconds that reading the file took."""
    made: aot_names.Made | None = None
    loaded: aot_names.Loaded | None = None
    program: Program | None = None
    inputs: list[tuple[Tensor, int]] = field(default_factory=list)
    """Tensors that the call was made with, and how often each had been written to."""

    def run(self, target: CompileTarget, module: nn.Module) -> Run:
        """Raises NoProgram with the reason when this way leads to none."""
        harness = self.engine.harness
        dispatcher = dispatch.of(harness.function(target, module))
        if dispatcher is None:
            raise NoProgram("something else is installed where calls of the module begin")
        began = time.perf_counter()
        if self.path is not None:
            self.header, self.data = self._read(target)
        self.reading = time.perf_counter() - began
        before = dict(dispatcher.table)
        try:
            with nullcontext() if self.path is None else without_collecting():
                return self._measured(target, module, dispatcher)
        except NoProgram:
            dispatcher.table = before
            raise
        except CompileFailed as error:
            dispatcher.table = before
            if isinstance(error.__cause__, NoProgram):
                raise error.__cause__ from error.__cause__.__cause__
            if self.program is None:
                raise  # the step itself fails
            raise NoProgram(first_line(error.__cause__ or error)) from error

    def _read(self, target: CompileTarget) -> tuple[Header, bytes]:
        assert self.path is not None
        try:
            header, data = read_program(self.engine.harness.cache.root / self.path)
        except (ChecksumMismatch, OSError) as error:
            problem = error.problem if isinstance(error, ChecksumMismatch) else str(error)
            raise NoProgram(problem) from error
        if header.spec != target.spec:
            raise NoProgram(f"'{self.path}' is the program of '{header.spec}'")
        return header, data

    def _measured(self, target: CompileTarget, module: nn.Module, dispatcher: Dispatcher) -> Run:
        harness = self.engine.harness
        with harness.observed(target, module, expect_warm=self.path is not None) as seen:
            dispatcher.provide, dispatcher.served = self._provider(target, dispatcher.function), 0
            try:
                first, last = harness.settle(target, module)
                seen.seconds = first + self.reading, last
            finally:
                dispatcher.provide = None
            seen.peak = peak(torch.device(target.device))
            if self.program is None and not dispatcher.served:
                raise NoProgram("its step never calls the function")
            if self.program is not None:
                self._prove(target, module, self.program)
        if self.program is None:  # a program of an earlier warm-up served it
            return Run(harness.evidence(seen, set()), frozenset(), engine="program")
        assert self.header is not None
        ours = (f"{FOLDER}/",) if self.path is None or self.known else (f"{FOLDER}/", *TUNED)
        foreign = {path for path in harness.foreign(seen) if not _is(path, ours)}
        evidence = harness.evidence(seen, foreign, found=int(self.path is not None))
        kept = {path for path in harness.needed(seen) if not path.startswith(NOT_PACKED)}
        if self.path is None:
            self._keep_winners(dispatcher.function)
            path = write_program(harness.cache.root, self.header, self.data)
            return Run(evidence, frozenset({path, *kept}), engine="program")
        origin = self.header.device if self._moves(target) else None
        return Run(evidence, frozenset({*self.files, *kept}), engine="program", origin=origin)

    def _keep_winners(self, function: nn.Module) -> None:
        """What the runs have settled is settled for whoever loads the program."""
        assert self.header is not None
        assert self.made is not None
        if self.loaded is None or not self.loaded.kernels:
            return
        try:
            self.data = aot_names.tuned(self.made, self.loaded, function)
        except Exception as error:  # of torch's own; the program is as good, only slower to load
            logger.warning("compilecache: a program keeps untuned kernels: %s", first_line(error))
            return
        self.header = self.header.model_copy(update=dict(sealed(self.data)))

    def _moves(self, target: CompileTarget) -> bool:
        return self.header is not None and self.header.device != target.device

    # -- the program of the step's call -----------------------------------------------------------

    def _provider(self, target: CompileTarget, function: nn.Module) -> dispatch.Provide:
        def provide(
            args: tuple[object, ...], kwargs: Mapping[str, object], key: Hashable
        ) -> Program:
            if self.program is not None:
                raise NoProgram("its step calls the function in more than one way")
            if self.path is None:
                self.inputs = [(t, t._version) for t in _tensors([args, kwargs])]
                self.made, self.header = self._make(target, function, args, kwargs)
                self.data = self.made.data
            self.program = self._load(target, function)
            return self.program

        return provide

    def _make(
        self,
        target: CompileTarget,
        function: nn.Module,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> tuple[aot_names.Made, Header]:
        try:
            made = aot_names.make(function, args, kwargs, self.engine.harness.options)
        except Exception as error:  # whatever torch raises: it is no full graph, or cannot be saved
            reason = first_line(error)
            self.engine.give_up(target, reason)
            raise NoProgram(reason) from error
        scope = Scope(function, made.imports)
        conditions = conditions_of(made.guards, scope)
        unchecked = [c.source for c in conditions if scope.now(c.source) is None]
        header = Header(
            spec=target.spec,
            device=target.device,
            hardware=hardware(torch.device(target.device)),
            torch=torch_build(),
            parameters=tensors_digest(function),
            sources=_digests(made.sources),
            imports=dict(made.imports),
            state=aot_names.state_words(),
            conditions=tuple(c for c in conditions if c.source not in unchecked),
            unchecked=tuple(unchecked),
            reference=None,
            **sealed(made.data),
        )
        return made, header

    def _load(self, target: CompileTarget, function: nn.Module) -> Program:
        header = self.header
        assert header is not None
        self._check(header, target, function)
        indices = None
        if self._moves(target):
            indices = torch.device(header.device).index, torch.device(target.device).index
        try:
            self.loaded = loaded = aot_names.load(self.data, function, header.imports, indices)
        except Exception as error:  # whatever torch raises for what it cannot take
            raise NoProgram(first_line(error)) from error
        if loaded.left:
            raise NoProgram(f"a line of it still names {header.device}: {loaded.left[0]}")
        watch = watch_of(
            function, header.conditions, Scope(function, header.imports), aot_names.State()
        )
        return Program(loaded.call, watch)

    def _check(self, header: Header, target: CompileTarget, function: nn.Module) -> None:
        """Raises NoProgram caused by FingerprintMismatch for a program of something else."""
        looked = self.engine.looked[id(function), header.spec.phase]
        changed = differences(header, target, function, looked)
        if not changed:
            return
        name, (then, now) = next(iter(changed.items()))
        more = f", and {len(changed) - 1} more" if len(changed) > 1 else ""
        mismatch = FingerprintMismatch(
            f"the program of '{target}' was compiled with {name} = {then}, here it is {now}{more}",
            next_step="A start without strict compiles and publishes it anew; if two versions are "
            "in use, let the workload's config() hold what differs",
            changed=changed,
        )
        raise NoProgram(f"FingerprintMismatch: {mismatch.problem}") from mismatch

    # -- proof ------------------------------------------------------------------------------------

    def _prove(self, target: CompileTarget, module: nn.Module, program: Program) -> None:
        """Refuses what a program cannot hold, and on another device what it does not compute alike."""
        assert self.header is not None
        if any(tensor._version != version for tensor, version in self.inputs):
            reason = "its forward changes its inputs in place"
            self.engine.give_up(target, reason)
            raise NoProgram(reason)
        self.inputs = []
        if torch.device(target.device).type != "cuda":
            return
        if self.path is None:
            reference = self._reference(target, module, program)
            self.header = self.header.model_copy(update={"reference": reference})
        elif self._moves(target) and not self.known:
            self._canary(target, module, program, self.header)

    def _reference(
        self, target: CompileTarget, module: nn.Module, program: Program
    ) -> canary.Reference | None:
        try:
            return canary.reference(self.engine.harness.workload, target, module, program)
        except (RuntimeError, ValueError):  # no memory for a copy, or numbers out of range
            return None

    def _canary(
        self, target: CompileTarget, module: nn.Module, program: Program, header: Header
    ) -> None:
        if header.reference is None:
            raise NoProgram(
                f"it was compiled on {header.device} without a reference to compare with"
            )
        mine = self._reference(target, module, program)
        if mine is None:
            raise NoProgram("the canary could not run")
        name, difference = canary.difference(mine, header.reference)
        allowed = canary.tolerance(target.spec.dtype)
        if difference > allowed:
            raise NoProgram(
                f"the canary failed: {name} differs by {difference:.2g} of its norm from "
                f"{header.device}, {allowed:g} is allowed"
            )


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
    now |= {f"state.{name}": value for name, value in aot_names.state_words().items()}
    then |= {f"state.{name}": value for name, value in header.state.items()}
    now |= {f"source.{name}": value for name, value in _digests(header.sources).items()}
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


def torch_build() -> str:
    """Version and git hash."""
    return f"{torch.__version__} {torch.version.git_version}"


def _is(path: str, kinds: tuple[str, ...]) -> bool:
    """Whether a file lies in one of these folders, or ends so."""
    return path.startswith(kinds) or path.endswith(kinds)


@cache
def _source_digest(module: str) -> str:
    """Once a process: what was imported does not change."""
    try:
        return file_digest(module)
    except (ImportError, OSError, SyntaxError, ValueError) as error:
        return f"unreadable: {type(error).__name__}"


def _digests(modules: Iterable[str]) -> dict[str, str]:
    """Of the syntax trees of these modules, but torch's own and the script that is run.

    A script's classes, and what they reach in it, are in the fingerprint.
    """
    names = (name for name in modules if name.partition(".")[0] not in ("torch", "__main__"))
    return {import_name(name): _source_digest(name) for name in sorted(names)}


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if not value.is_inference():
            yield value
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
