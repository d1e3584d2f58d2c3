"""One way to the program of one target: from a file of the root, or by compiling it."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from compilecache import aot_names, loading_names, state_names, torch_names
from compilecache.engines import canary, dispatch
from compilecache.engines.beside import without_collecting
from compilecache.engines.conditions import Scope
from compilecache.engines.dispatch import Dispatcher, NoProgram, Program
from compilecache.engines.fitting import differences, profile_differences
from compilecache.engines.harness import Harness, Run, first_line, peak
from compilecache.engines.making import make_program
from compilecache.engines.programfile import FOLDER, Header, read_program, sealed, write_program
from compilecache.engines.watched import watch_of
from compilecache.errors import ChecksumMismatch, CompileFailed, FingerprintMismatch
from compilecache.shapes import CompileTarget

logger = logging.getLogger("compilecache")

TUNED = (".best_config",)
"""Which of several compiled kernels was fastest: a rewritten program tunes a few of them anew."""

NOT_PACKED = ("fxgraph/", "aotautograd/", f"{FOLDER}/")
"""What a program needs none of: it holds its graphs itself."""

GiveUp = Callable[[CompileTarget, str], None]
"""With the reason."""

Looked = dict[tuple[int, str], dict[str, str | None]]
"""By module and phase: what conditions found there."""


@dataclass(slots=True)
class Way:
    """One way to the program of one target: from a file of the root, or by compiling it."""

    harness: Harness
    """How the target is run."""
    give_up: GiveUp
    """Hears of a function that can be no program at all."""
    looked: Looked
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
    loaded: loading_names.Loaded | None = None
    program: Program | None = None
    inputs: list[tuple[Tensor, int]] = field(default_factory=list)
    """Tensors that the call was made with, and how often each had been written to."""
    _no_reference: str = ""
    """Why the canary could not run."""
    _first_contact: bool = False
    """Whether it has just run on a GPU for the first time."""

    def run(self, target: CompileTarget, module: nn.Module) -> Run:
        """Raises NoProgram with the reason when this way leads to none."""
        harness = self.harness
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
            header, data = read_program(self.harness.cache.root / self.path)
        except (ChecksumMismatch, OSError) as error:
            problem = error.problem if isinstance(error, ChecksumMismatch) else str(error)
            raise NoProgram(problem) from error
        if header.spec != target.spec:
            raise NoProgram(f"'{self.path}' is the program of '{header.spec}'")
        return header, data

    def _measured(self, target: CompileTarget, module: nn.Module, dispatcher: Dispatcher) -> Run:
        harness = self.harness
        with harness.observed(target, module, expect_warm=self.path is not None) as seen:
            dispatcher.provide, dispatcher.served = self._provider(target, dispatcher.function), 0
            try:
                first, last = harness.settle(target, module)
                seen.seconds = first + self.reading, last
            finally:
                dispatcher.provide = None
            seen.peak = peak(torch.device(target.device))
            origin = self.header.device if self.header and self._moves(target) else None
            if self.program is None and not dispatcher.served:
                raise NoProgram("its step never calls the function")
            if self.program is not None:
                self._prove(target, module, self.program)
        if self.program is None:  # a program of an earlier warm-up served it
            return Run(harness.evidence(seen, set()), frozenset(), engine="program")
        assert self.header is not None
        met, settled = self._first_contact, self.path is None or self.known
        ours = (f"{FOLDER}/",) if settled and not met else (f"{FOLDER}/", *TUNED)
        foreign = {path for path in harness.foreign(seen) if not _is(path, ours)}
        evidence = harness.evidence(seen, foreign, found=int(self.path is not None))
        kept = {path for path in harness.needed(seen) if not path.startswith(NOT_PACKED)}
        if self.path is None or met:
            self._keep_winners(target, dispatcher.function)
            path = write_program(harness.cache.root, self.header, self.data)
            kept |= {file for file in self.files if not file.startswith(f"{FOLDER}/")}
            files = frozenset({path, *kept})
            return Run(evidence, files, engine="program", origin=origin, first_contact=met)
        return Run(evidence, frozenset({*self.files, *kept}), engine="program", origin=origin)

    def _keep_winners(self, target: CompileTarget, function: nn.Module) -> None:
        """What the runs have settled is settled for whoever loads the program."""
        assert self.header is not None
        if self.loaded is None or not (self.loaded.kernels or self.loaded.built):
            return
        made = self.made.function if self.made is not None else self.loaded.function
        try:
            tuned = aot_names.tuned(made, self.loaded, function)
        except Exception as error:  # of torch's own; the program is as good, only slower to load
            logger.warning("compilecache: a program keeps untuned kernels: %s", first_line(error))
            return
        for kernel in tuned.untuned:
            logger.info("compilecache: a kernel is tuned wherever it is loaded: %s", kernel)
        self.data = tuned.data
        changes = {
            **sealed(self.data),
            "settled": dict(tuned.settled),
            "device": target.device,  # for which it was saved once more
        }
        self.header = self.header.model_copy(update=changes)

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
            return make_program(target, function, args, kwargs, self.harness.options)
        except Exception as error:  # whatever torch raises: it is no full graph, or cannot be saved
            reason = first_line(error)
            self.give_up(target, reason)
            raise NoProgram(reason) from error

    def _load(self, target: CompileTarget, function: nn.Module) -> Program:
        header = self.header
        assert header is not None
        self._check(header, target, function)
        indices = None
        if self._moves(target):
            indices = torch.device(header.device).index, torch.device(target.device).index
        try:
            self.loaded = loaded = loading_names.load(
                self.data,
                function,
                header.imports,
                indices,
                header.settled,
                again=header.profile is not None,
            )
        except Exception as error:  # whatever torch raises for what it cannot take
            raise NoProgram(first_line(error)) from error
        if loaded.left:
            raise NoProgram(f"a line of it still names {header.device}: {loaded.left[0]}")
        watch = watch_of(
            function, header.conditions, Scope(function, header.imports), state_names.State()
        )
        return Program(loaded.call, watch)

    def _check(self, header: Header, target: CompileTarget, function: nn.Module) -> None:
        """Raises NoProgram caused by FingerprintMismatch for a program of something else."""
        looked = self.looked[id(function), header.spec.phase]
        changed = differences(header, target, function, looked)
        if header.profile is not None and not changed:
            changed = profile_differences(header.profile, torch.device(target.device))
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
            self.give_up(target, reason)
            raise NoProgram(reason)
        self.inputs = []
        if torch.device(target.device).type != "cuda":
            return
        if self.path is None:
            reference = self._reference(target, module, program)
            self.header = self.header.model_copy(update={"reference": reference})
        elif self.header.profile is not None:
            self._first_canary(target, module, program)
        elif self._moves(target) and not self.known:
            self._canary(target, module, program, self.header)

    def _reference(
        self, target: CompileTarget, module: nn.Module, program: Program
    ) -> canary.Reference | None:
        try:
            return canary.reference(self.harness.workload, target, module, program)
        except (RuntimeError, ValueError) as error:  # no memory for a copy, numbers out of range
            self._no_reference = first_line(error)
            logger.info("compilecache: the canary could not run: %s", self._no_reference)
            return None

    def _first_canary(self, target: CompileTarget, module: nn.Module, program: Program) -> None:
        """Nobody has seen it run: it is compared with eager, then it is a reference like any other."""
        assert self.header is not None
        mine = self._reference(target, module, program)
        with torch_names.without_limits(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that eager attention is slow
            function = self.harness.function(target, module)
            eager = self._reference(target, module, Program(type(function).forward))
        torch.cuda.empty_cache()  # eager takes far more memory than anything after it
        allowed = canary.EAGER * canary.tolerance(target.spec.dtype)
        try:
            self._compare(mine, eager, allowed, "eager")
        except NoProgram as error:
            failed = CompileFailed(
                f"the program of '{target}' was compiled without its GPU and is not used here: {error}",
                next_step="A start without strict compiles it on this GPU, and publishes that",
                target=str(target),
            )
            raise NoProgram(str(error)) from failed
        self._first_contact = True
        self.header = self.header.model_copy(update={"reference": mine, "profile": None})

    def _canary(
        self, target: CompileTarget, module: nn.Module, program: Program, header: Header
    ) -> None:
        if header.reference is None:
            raise NoProgram(
                f"it was compiled on {header.device} without a reference to compare with"
            )
        mine = self._reference(target, module, program)
        self._compare(mine, header.reference, canary.tolerance(target.spec.dtype), header.device)

    def _compare(
        self,
        mine: canary.Reference | None,
        other: canary.Reference | None,
        allowed: float,
        whose: str,
    ) -> None:
        if mine is None or other is None:
            raise NoProgram(f"the canary could not run: {self._no_reference}")
        name, difference = canary.difference(mine, other)
        logger.info("compilecache: canary against %s: %s, %.2g", whose, name, difference)
        if difference > allowed:
            raise NoProgram(
                f"the canary failed: {name} differs by {difference:.2g} of its norm from "
                f"{whose}, {allowed:g} is allowed"
            )


def _is(path: str, kinds: tuple[str, ...]) -> bool:
    """Whether a file lies in one of these folders, or ends so."""
    return path.startswith(kinds) or path.endswith(kinds)


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if not value.is_inference():
            yield value
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
