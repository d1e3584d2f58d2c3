"""After priming: what happens when a thread compiles or traces all the same."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import torch

from compilecache import inductor_names, torch_names
from compilecache.engines import dispatch
from compilecache.errors import RecompileBudgetExceeded, UnexpectedCompile
from compilecache.guard import calls, hooks
from compilecache.guard.attempt import Attempt, Kind
from compilecache.guard.calls import Call, PlannedFunction
from compilecache.guard.gate import Gate
from compilecache.guard.nearest import nearest
from compilecache.guard.state import ThreadState
from compilecache.shapes import CompileTarget, InputSpec
from compilecache.workload import Workload

OnMiss = Literal["error", "serialize", "warn"]
"""error: refuse. serialize: compile while every other worker stands still. warn: only count."""

SHAPES_SHOWN = 8
"""Of the tensors of a call, in a message; ``UnexpectedCompile.shapes`` has all."""

REASONS_SHOWN = 3
"""Of torch's reasons why no compiled entry fits."""


@dataclass(frozen=True, slots=True)
class Planned:
    """What is warm."""

    workload: Workload
    targets: tuple[CompileTarget, ...]
    failed: frozenset[str] = frozenset()
    """Keys of targets that could not be made warm."""

    @property
    def specs(self) -> tuple[InputSpec, ...]:
        """Without devices."""
        return tuple(dict.fromkeys(target.spec for target in self.targets))

    @property
    def devices(self) -> tuple[str, ...]:
        """All planned ones."""
        return tuple(dict.fromkeys(target.device for target in self.targets))


@dataclass
class Seal:
    """Hears of every attempt in the process and refuses, serialises or counts it."""

    planned: Planned
    on_miss: OnMiss
    state: ThreadState
    gate: Gate
    extend: Callable[[InputSpec, Call], None]
    """Warms a spec that was not planned, alone; the call goes on after it."""
    working: Callable[[], Sequence[str]]
    """Names of the workers that are alive."""
    functions: tuple[PlannedFunction, ...] = ()
    """Whose calls are judged here; those of another warm model are judged by its own seal."""
    refused: Counter[Kind] = field(default_factory=Counter)
    """Attempts that raised, by kind."""
    allowed: Counter[Kind] = field(default_factory=Counter)
    """Attempts that went on."""
    _counting: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def attempt(self, attempt: Attempt) -> Iterator[None]:
        """Part of the hooks' listener."""
        call = calls.current()
        foreign = call is not None and call.planned not in self.functions
        problem = self._foreign(attempt) if foreign else self._refusal(attempt, call)
        if problem is not None:
            with self._counting:
                self.refused[attempt.kind] += 1
            raise problem
        with ExitStack() as stack:
            if self.on_miss == "serialize" and attempt.kind != "reset":
                stack.enter_context(self._alone(attempt, call))
            with self._counting:
                self.allowed[attempt.kind] += 1
            yield

    def _refusal(self, attempt: Attempt, call: Call | None) -> UnexpectedCompile | None:
        if attempt.kind == "reset":
            kept = self.on_miss == "error" or self.working()
            return self._reset(attempt) if kept else None
        if self.on_miss == "warn" or (self.on_miss == "serialize" and attempt.kind != "dense"):
            return None
        if attempt.kind == "dense":
            return self._error(attempt, "It takes heads x queries x keys of memory", _DENSE_STEP)
        if attempt.kind == "trace":
            others = ", ".join(self.working()) or "none is alive"
            detail = f"While one thread traces, no other can call a module (workers: {others})"
            return self._error(attempt, detail, _TRACE_STEP)
        if attempt.kind == "backward":
            return self._error(attempt, "No planned step ran it", _BACKWARD_STEP)
        return self._unplanned(attempt, call)

    def _foreign(self, attempt: Attempt) -> UnexpectedCompile | None:
        """Another warm model may compile, unless workers of this one run and cannot be stopped."""
        if self.on_miss != "error" or not self.working():
            return None
        others = ", ".join(self.working())
        return self._error(
            attempt, f"Workers of another warm model are alive: {others}", _OTHER_STEP
        )

    # -- words ------------------------------------------------------------------------------

    def _reset(self, attempt: Attempt) -> UnexpectedCompile:
        named = ", ".join(self.working())
        detail = f"Workers are alive: {named}" if named else "Every planned shape would be gone"
        return self._error(attempt, detail, "Close what ensure_warm returned first")

    def _error(
        self,
        attempt: Attempt,
        detail: str,
        next_step: str,
        *,
        target: str = "",
        planned: InputSpec | None = None,
    ) -> UnexpectedCompile:
        shown = [*attempt.shapes[:SHAPES_SHOWN], *["…"][: len(attempt.shapes) > SHAPES_SHOWN]]
        shapes = f" with {', '.join(shown)}" if shown else ""
        return UnexpectedCompile(
            f"{attempt.words}{shapes}. {detail}",
            next_step=next_step,
            target=target or attempt.function,
            thread=attempt.thread,
            shapes=attempt.shapes,
            nearest=str(planned) if planned is not None else None,
        )

    def _unplanned(self, attempt: Attempt, call: Call | None) -> UnexpectedCompile:
        if call is not None and attempt.code in call.planned.codes:
            # The frame may be a wrapper of torch's, shared by all modules.
            attempt = replace(attempt, function=call.planned.words)
        if call is None:
            return self._error(attempt, f"It is in no plan{self._reasons(attempt)}", _OTHER_STEP)
        if reasons := _program_reasons(call):
            detail = f"Its program does not fit any more: {'; '.join(reasons)}"
            return self._error(attempt, detail, _PROGRAM_STEP, target=call.planned.name)
        if attempt.code not in call.planned.codes:
            detail = f"It runs inside '{call.planned.name}' and did not when that was warmed"
            return self._error(attempt, f"{detail}{self._reasons(attempt)}", _INSIDE_STEP)
        spec = call.spec(self.planned.workload)
        found = nearest(spec, self.planned.specs) if spec is not None else None
        if spec is None or found is None:
            name = call.planned.name
            detail = f"No spec of '{name}' fits it{self._reasons(attempt)}"
            return self._error(attempt, detail, _PLAN_STEP)
        if found.differences:
            detail = f"The nearest planned spec is '{found.spec}': {'; '.join(found.differences)}"
            return self._error(attempt, detail, _PAD_STEP, target=str(spec), planned=found.spec)
        detail, step = self._planned_but(attempt, call, found.spec)
        return self._error(attempt, detail, step, target=str(spec), planned=found.spec)

    def _planned_but(self, attempt: Attempt, call: Call, spec: InputSpec) -> tuple[str, str]:
        """Why a planned spec is not found: the device, a failed warm-up, or the thread's state."""
        target = CompileTarget(device=call.planned.device, spec=spec)
        if target not in self.planned.targets:
            devices = ", ".join(self.planned.devices)
            return (
                f"'{spec}' is planned for {devices}, not for {target.device}",
                "Pass this device's replica to ensure_warm too",
            )
        if target.key in self.planned.failed:
            return f"'{target}' is planned, but warming it failed", "See warm.report for the reason"
        differs = self.state.differences()
        state = f"; this thread differs in {', '.join(differs)}" if differs else ""
        return (
            f"'{target}' is warm, but was called in another way{state}{self._reasons(attempt)}",
            "Call it as it was warmed: same autocast, grad mode, settings and argument style",
        )

    def _reasons(self, attempt: Attempt) -> str:
        found = attempt.why()[:REASONS_SHOWN]
        return (
            f"; torch says: {' | '.join(' '.join(one.split()) for one in found)}" if found else ""
        )

    # -- compiling alone ----------------------------------------------------------------------

    @contextmanager
    def _alone(self, attempt: Attempt, call: Call | None) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(self.gate.exclusive(self._blocked()))
            if call is not None and self.gate.stepping() and call.planned in self.functions:
                self._leave(attempt, call)
            if attempt.kind == "backward":
                # On a thread of autograd's own. In a call the settings stay those of that call.
                stack.enter_context(self.state.adopt())
            stack.enter_context(inductor_names.compiling_in_process())
            stack.enter_context(torch_names.failing_at_limit())
            stack.enter_context(_naming_the_limit())
            yield

    def _leave(self, attempt: Attempt, call: Call) -> None:
        """Leaves a call of which nothing has run yet; it is made again with its shape warm.

        Raises Again. Another thread may have compiled the very shape while this one waited, so
        the call is made again in any case, and compiles only if that does not help.
        """
        if calls.tries() or attempt.code is None or not calls.can_be_made_again(attempt.code):
            return
        spec = call.spec(self.planned.workload)
        if spec is None:
            raise calls.Again
        found = nearest(spec, self.planned.specs)
        if found is not None and not found.differences:
            spec = found.spec  # planned, but perhaps for other devices
        if CompileTarget(device=call.planned.device, spec=spec) in self.planned.targets:
            raise calls.Again
        raise calls.Again(partial(self.extend, spec, call))

    def _blocked(self) -> list[int]:
        """Who waits in a step for this thread, one of autograd's own; nobody when it is none."""
        if not hooks.is_foreign_thread() or not torch.cuda.is_available():
            return []
        stepping = self.gate.stepping_on(f"cuda:{torch.cuda.current_device()}")
        return [ident for ident in stepping if hooks.in_backward(ident)]


def _program_reasons(call: Call) -> list[str]:
    """Why the program of such a call was not taken; empty where there is none."""
    programs = dispatch.of(call.planned.function)
    return [] if programs is None else programs.why(call.args, call.kwargs)[:REASONS_SHOWN]


@contextmanager
def _naming_the_limit() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if not torch_names.is_limit_error(error):
            raise
        limit = torch_names.limits().per_code
        raise RecompileBudgetExceeded(
            "one more shape would exceed the entries that torch keeps, and run on the slow path",
            next_step="Plan the shapes beforehand, so that the limit is sized for them",
            needed=limit + 1,
            limit=limit,
        ) from error


_DENSE_STEP = "Compile what calls flex_attention, and plan its shape"
_TRACE_STEP = "Trace before ensure_warm, or after warm.close()"
_BACKWARD_STEP = "Let the workload's step call backward() in phase train, and warm again"
_OTHER_STEP = (
    "Run it once before ensure_warm, give it a plan of its own, or pass on_miss='serialize'"
)
_INSIDE_STEP = "Register hooks and change what the model calls before ensure_warm, not after"
_PROGRAM_STEP = "Undo that, or do it before ensure_warm; engine 'trace' takes more kinds of change"
_PLAN_STEP = "Add the call to the plan and warm again, or pass on_miss='serialize'"
_PAD_STEP = "Pad the batch to a planned shape (PlannedCollate), or add this one to the plan"
