"""A primed process: its workers, its seal, its report."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import TracebackType
from typing import Protocol, Self

import torch

from compilecache import torch_names
from compilecache.errors import CompileCacheError, PlanError, UnexpectedCompile
from compilecache.guard import hooks
from compilecache.guard.calls import Call, PlannedFunction, announced
from compilecache.guard.crew import Crew
from compilecache.guard.failure import Failure
from compilecache.guard.gate import Gate
from compilecache.guard.probe import TraceEffect, trace_effect
from compilecache.guard.seal import OnMiss, Planned, Seal
from compilecache.guard.state import ThreadState
from compilecache.report import Report
from compilecache.shapes import CompileTarget, InputSpec, ShapePlan
from compilecache.tagging import Words

logger = logging.getLogger("compilecache")

Extend = Callable[[CompileTarget, PlannedFunction], Report]
"""Restores, or compiles and publishes, one more target."""


class Tagger(Protocol):
    """Names what a process uses in its store."""

    def __call__(self, name: str, plan: ShapePlan, words: Words) -> str | None:
        """The tag's full name; None when the store did not take it."""


class Warm:
    """A process in which every planned target is compiled and loaded; sealed until it is closed."""

    def __init__(
        self,
        report: Report,
        plan: ShapePlan,
        planned: Planned,
        functions: Sequence[PlannedFunction],
        state: ThreadState,
        *,
        on_miss: OnMiss = "error",
        gate_timeout: float = 600.0,
        extend: Extend | None = None,
        tagger: Tagger | None = None,
    ) -> None:
        self.report = report
        """What it took, target by target; shapes added later are in it too."""
        self.plan = plan
        """The shapes that are warm."""
        self.trace_effect: TraceEffect = trace_effect()
        """What a trace in one thread would do to the others, in this torch."""
        self._functions = tuple(functions)
        self._extend = extend
        self._tagger = tagger
        self._failure = Failure()
        self._gate = Gate(gate_timeout, self._failure.check)
        self._state = state
        self._entries = [self._entries_of(function) for function in self._functions]
        self._home = threading.get_ident()
        self._here = threading.local()
        self._workers: dict[int, str] = {}
        self._attached: list[threading.Thread] = []
        self._compiles: list[str] = []
        self._seal = Seal(
            planned,
            on_miss,
            self._state,
            self._gate,
            self._extend_to,
            self._working,
            self._functions,
        )
        self._guards = ExitStack()
        self._close_over()

    def _close_over(self) -> None:
        gate = self._gate if self._seal.on_miss == "serialize" else None
        for function in self._functions:
            self._guards.enter_context(announced(function, self._failure, gate))
        self._guards.enter_context(torch_names.on_compile(self._compiles.append))
        self._guards.enter_context(hooks.listening(self._seal))

    # -- what the threads of a run use ----------------------------------------------------------

    @contextmanager
    def worker(self, device: str | torch.device) -> Iterator[None]:
        """What each training thread runs in: device and CUDA context, torch's settings, a check.

        An error that leaves the block stops the other workers at their next step or call. Raises
        PlanError for a device that is not planned, UnexpectedCompile when this thread would not
        find what is warm.
        """
        thread = threading.current_thread()
        with ExitStack() as stack:
            try:
                self._failure.check()
                self._prepare(_named(device), stack)
                self._workers[threading.get_ident()] = thread.name
                yield
            except BaseException as error:
                self._failure.record(f"{thread.name} on {device}", error)
                raise
            finally:
                self._workers.pop(threading.get_ident(), None)

    def attach(self, device: str | torch.device) -> None:
        """As ``worker``, for the rest of the thread's life: the initializer of a ThreadPoolExecutor."""
        self._prepare(_named(device), ExitStack())
        self._attached.append(threading.current_thread())

    @contextmanager
    def step(self) -> Iterator[None]:
        """One step of a worker: forward and backward, and nothing that waits for another thread.

        Its ends are where the worker stands still when another thread has to compile
        (``on_miss="serialize"``), and where it hears that a sibling failed (WorkerFailed).
        """
        self._failure.check()
        if self._seal.on_miss != "serialize":
            yield
            return
        with self._gate.step(getattr(self._here, "device", None)):
            yield

    def crew(self, *, patience: float = 10.0) -> Crew:
        """Starts and joins the threads of a run; ``patience``: seconds to stop after a failure."""
        return Crew(self._failure, self.worker, patience=patience)

    def check(self) -> None:
        """Raises WorkerFailed once a worker has failed."""
        self._failure.check()

    # -- what happened ---------------------------------------------------------------------------

    @property
    def compiles_after_prime(self) -> int:
        """Compilations that any thread has started since, traces that hit the cache included."""
        let = self._seal.allowed["compile"] + self._seal.allowed["backward"]
        return max(let, len(self._compiles))  # torch tells only of the first of several at once

    @property
    def refused(self) -> int:
        """Attempts to compile or trace that raised."""
        return self._seal.refused.total()

    @property
    def dense_steps(self) -> int:
        """How often flex_attention ran uncompiled since; only ``on_miss="warn"`` lets it."""
        return self._seal.allowed["dense"]

    def tag(
        self, name: str, *, tokens_per_second: float | None = None, note: str = ""
    ) -> str | None:
        """Names what this process uses as a state that works: artifacts, plan, packages, settings.

        From any thread, once the run is seen to go well. Returns the tag's full name ("good@2") for
        ``compilecache restore --tag`` and ``explain --tag``; None when the store did not take it,
        which ends no run unless it is strict: the log says why. Raises PlanError for a bad name.
        """
        if self._tagger is None:
            raise PlanError(
                "there is no store that could keep a tag",
                next_step="Pass one to ensure_warm(store=…)",
                field="store",
            )
        return self._tagger(name, self.plan, Words(tokens_per_second, note))

    def close(self) -> None:
        """Ends the seal. The compiled functions stay."""
        self._guards.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
        if error is None and self._failure.error is not None:
            raise self._failure.as_error()

    # -- one thread ------------------------------------------------------------------------------

    def _prepare(self, device: str, stack: ExitStack) -> None:
        planned = self._seal.planned.devices
        if device not in planned:
            raise PlanError(
                f"device '{device}' is not warm, only {', '.join(planned)}",
                next_step="Pass a replica on it to ensure_warm",
                field="device",
            )
        self._refuse_graphs()
        if device.startswith("cuda"):
            stack.callback(torch.cuda.set_device, torch.cuda.current_device())
            torch.cuda.set_device(device)
            # A thread that only loads from a warm cache may never have made a context (triton#3729).
            torch.empty(1, device=device)
        stack.enter_context(self._state.adopt())
        self._here.device = device
        if problem := self._unfit(device):
            if self._seal.on_miss == "error":
                raise problem
            logger.warning("%s", problem)

    def _refuse_graphs(self) -> None:
        """CUDA graphs are recorded and replayed by one thread (123177)."""
        if threading.get_ident() == self._home:
            return
        for planned in self._functions:
            if torch_names.uses_cuda_graphs(planned.function):
                raise PlanError(
                    f"'{planned.name}' is compiled with CUDA graphs (mode reduce-overhead or "
                    "max-autotune), which only the thread that recorded them can replay",
                    next_step="Compile it in mode default or max-autotune-no-cudagraphs",
                    field="mode",
                )

    def _unfit(self, device: str) -> UnexpectedCompile | None:
        """Why a thread would not find every planned target of the device; None when it would."""
        thread = threading.current_thread().name
        with self._state.autocast():
            differs = self._state.differences()
        if differs:
            return UnexpectedCompile(
                f"thread {thread} would compile everything again: its {', '.join(differs)} "
                "differs from when the process was primed",
                next_step="Set it before ensure_warm, for every thread alike",
                target=device,
                thread=thread,
            )
        for planned, entries in zip(self._functions, self._entries, strict=True):
            if planned.device == device and self._entries_of(planned) < entries:
                return UnexpectedCompile(
                    f"thread {thread} would compile '{planned.name}' again: its compiled entries "
                    "were dropped since the process was primed",
                    next_step="Do not call torch._dynamo.reset() or recompile the model after it",
                    target=device,
                    thread=thread,
                )
        return None

    @staticmethod
    def _entries_of(planned: PlannedFunction) -> int:
        return torch_names.entries_of(torch_names.original(planned.function))

    def _working(self) -> list[str]:
        attached = [thread.name for thread in self._attached if thread.is_alive()]
        return [*self._workers.values(), *attached]

    # -- one more shape --------------------------------------------------------------------------

    def _extend_to(self, spec: InputSpec, call: Call) -> None:
        """Warms and publishes a spec that was not planned; the process is this thread's alone."""
        target = CompileTarget(device=call.planned.device, spec=spec)
        if self._extend is None or self._state.differences():
            return
        try:
            with hooks.permitted():
                added = self._extend(target, call.planned)
        except (CompileCacheError, OSError, RuntimeError) as error:
            self._note((), (f"{target} was compiled for this process only: {error}",))
            return
        self._note(added.targets, added.gave_up)
        planned = self._seal.planned
        self._seal.planned = Planned(planned.workload, (*planned.targets, target), planned.failed)
        if spec not in self.plan.specs:
            self.plan = self.plan.model_copy(update={"specs": (*self.plan.specs, spec)})

    def _note(self, rows: Sequence[object], gave_up: Sequence[str]) -> None:
        for text in gave_up:
            logger.warning("%s", text)
        self.report = self.report.model_copy(
            update={
                "targets": (*self.report.targets, *rows),
                "gave_up": (*self.report.gave_up, *gave_up),
            }
        )


def alone() -> AbstractContextManager[None]:
    """The calling thread may compile. Raises UnexpectedCompile while workers of a Warm are alive."""
    for listener in hooks.listeners():
        if isinstance(listener, Seal) and (working := listener.working()):
            raise UnexpectedCompile(
                f"ensure_warm was called while workers are alive: {', '.join(working)}",
                next_step="Warm every model before the first worker starts",
                target="ensure_warm",
                thread=threading.current_thread().name,
            )
    return hooks.permitted()


def _named(device: str | torch.device) -> str:
    wanted = torch.device(device)
    if wanted.type == "cuda" and wanted.index is None:
        return f"cuda:{torch.cuda.current_device()}"
    return str(wanted)
