"""What a seal costs a call that is compiled already, and whether seal and gate hold under stress.

Every cost is the median over pairs of batches, one of bare calls and one of guarded calls in turn;
the ratio is the cost over the time of the bare compiled call. Then threads that call sealed
functions run beside threads that try to compile and to trace, and six threads ask a gate for new
shapes at random. Exits with 1 when a cost is above the limit or anything went wrong.
Usage: overhead.py [--pairs 200] [--calls 2000] [--stress-calls 20000] [--rounds 100] [--json]
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from results import Row, report
from torch import nn
from torch._dynamo import convert_frame

from compilecache import UnexpectedCompile, Warm, ensure_warm, torch_names
from compilecache.engines import dispatch
from compilecache.guard.seal import OnMiss

LIMIT_US = 5.0
WIDTH = 8
PLANNED = (1, 2, 3)
UNPLANNED = 5
CALLERS = 8
ASKERS = 6
ASKED_SHAPES = 12
STEPS = 4
UNGATED_ROUNDS = 10
WATCHDOG = 120.0


class Product(nn.Module):
    """A compiled call with next to nothing in it: one small matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, 8] → [B, 8]."""
        return x @ self.weight


@dataclass(frozen=True)
class Sealed:
    """A compiled module in a sealed process, and the call that it had before."""

    warm: Warm
    module: nn.Module
    guarded: Callable[..., torch.Tensor]
    bare: Callable[..., torch.Tensor]

    def take(self, call: Callable[..., torch.Tensor]) -> None:
        """Makes this the call that ``module(x)`` runs."""
        self.module._compiled_call_impl = call  # type: ignore[assignment]


@contextmanager
def sealed(
    on_miss: OnMiss, counts: tuple[int, ...] = PLANNED, *, backend: str = "inductor"
) -> Iterator[Sealed]:
    """A module warmed for these numbers of rows; afterwards torch has forgotten it."""
    torch.manual_seed(0)
    module = Product()
    module.compile(dynamic=False, backend=backend, **limit())
    bare = module._compiled_call_impl
    examples = [(torch.empty(count, WIDTH, device="meta"),) for count in counts]
    with tempfile.TemporaryDirectory() as root:
        warm = ensure_warm(
            module,
            examples,
            store=False,
            root=root,
            compile_options={"backend": backend},
            on_miss=on_miss,
        )
        with warm:
            yield Sealed(warm, module, module._compiled_call_impl, bare)
    torch._dynamo.reset()


def limit() -> dict[str, int]:
    """Room for every shape that a gate may be asked for."""
    torch_names.raise_limits(torch_names.Limits(64, 256))
    return {"recompile_limit": 64} if torch_names.takes_recompile_limit() else {}


# -- what a call costs ------------------------------------------------------------------------


def call_seconds(module: nn.Module, x: torch.Tensor, calls: int) -> float:
    """One batch of calls."""
    began = time.perf_counter()
    for _ in range(calls):
        module(x)
    return time.perf_counter() - began


def step_seconds(step: Callable[[], AbstractContextManager[Any]], calls: int) -> float:
    """One batch of empty steps."""
    began = time.perf_counter()
    for _ in range(calls):
        with step():
            pass
    return time.perf_counter() - began


def loop_seconds(calls: int) -> float:
    """One batch of nothing."""
    began = time.perf_counter()
    for _ in range(calls):
        pass
    return time.perf_counter() - began


@dataclass(frozen=True)
class Cost:
    """Medians of one comparison, in microseconds a call."""

    added: float
    """By the guard."""
    bare: float
    """The bare compiled call."""

    def row(self, figure: str) -> Row:
        """The figure."""
        return Row(figure, self.added, "us", "bare call", self.added / self.bare)


def compared(
    plain: Callable[[int], float], other: Callable[[int], float], pairs: int, calls: int
) -> Cost:
    """Batches of both in turn, whichever first; the median of what the other took longer."""
    plain(calls), other(calls)
    added, bare = [], []
    for number in range(pairs):
        if number % 2:
            late, early = other(calls), plain(calls)
        else:
            early, late = plain(calls), other(calls)
        added.append((late - early) / calls * 1e6)
        bare.append(early / calls * 1e6)
    return Cost(median(added), median(bare))


@torch.no_grad()
def call_cost(on_miss: OnMiss, pairs: int, calls: int) -> Cost:
    """Of a guarded call over the bare one."""
    x = torch.ones(PLANNED[0], WIDTH)
    with sealed(on_miss) as made:

        def timed(call: Callable[..., torch.Tensor], calls: int) -> float:
            made.take(call)
            return call_seconds(made.module, x, calls)

        return compared(
            lambda calls: timed(made.bare, calls),
            lambda calls: timed(made.guarded, calls),
            pairs,
            calls,
        )


def step_cost(bare: float, pairs: int, calls: int) -> Cost:
    """Of an empty step of a process that has a gate, over an empty loop."""
    with sealed("serialize") as made:
        cost = compared(loop_seconds, lambda n: step_seconds(made.warm.step, n), pairs, calls)
    return Cost(cost.added, bare)


@torch.no_grad()
def stance_cost(pairs: int, calls: int) -> Cost:
    """Of torch's own ``fail_on_recompile``, in a process without a seal."""
    x = torch.ones(PLANNED[0], WIDTH)
    with sealed("error") as made:
        module = made.module
    module(x)  # the reset dropped it

    def under_stance(calls: int) -> float:
        with torch.compiler.set_stance("fail_on_recompile"):
            return call_seconds(module, x, calls)

    return compared(lambda n: call_seconds(module, x, n), under_stance, pairs, calls)


@torch.no_grad()
def program_cost(pairs: int, calls: int) -> Cost:
    """Of a call that goes by a program over the same call compiled by torch; negative when it is less."""
    x = torch.ones(PLANNED[0], WIDTH)
    torch.manual_seed(0)
    compiled, by_program = Product(), Product()
    compiled.compile(dynamic=False, **limit())
    compiled(x)
    with tempfile.TemporaryDirectory() as root:
        ensure_warm(by_program, [(x,)], store=False, root=root, engine="program").close()
        programs = dispatch.of(by_program)
        if programs is None or programs.find((x,), {}) is None:
            raise SystemExit("error: no program serves the call")
        return compared(
            lambda n: call_seconds(compiled, x, n),
            lambda n: call_seconds(by_program, x, n),
            pairs,
            calls,
        )


def costs(pairs: int, calls: int) -> list[Row]:
    """The figures of this part."""
    error = call_cost("error", pairs, calls)
    gated = call_cost("serialize", pairs, calls)
    return [
        Row("bare_call_us", error.bare, "us"),
        error.row("sealed_call_overhead_us"),
        gated.row("gated_call_overhead_us"),
        step_cost(gated.bare, pairs, calls).row("step_overhead_us"),
        stance_cost(pairs, calls).row("stance_call_overhead_us"),
        program_cost(pairs, calls).row("program_call_overhead_us"),
    ]


# -- a seal under stress ----------------------------------------------------------------------


@dataclass
class Tally:
    """What threads count together."""

    counts: dict[str, int] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, name: str, number: int = 1) -> None:
        """Counts."""
        with self._lock:
            self.counts[name] = self.counts.get(name, 0) + number

    def of(self, name: str) -> int:
        """So far."""
        return self.counts.get(name, 0)

    @contextmanager
    def catching(self, name: str) -> Iterator[None]:
        """Counts an error under a name and keeps its words."""
        try:
            yield
        except Exception as error:
            self.add(name)
            self.errors.append(f"{name}: {type(error).__name__}: {str(error)[:200]}")


def stress(calls: int) -> list[Row]:
    """Callers beside threads that try to compile and to trace."""
    tally, over = Tally(), threading.Event()
    with sealed("error", backend="eager") as made, torch.no_grad():
        inputs = [torch.randn(count, WIDTH) for count in PLANNED]
        expected = [made.module(x).clone() for x in inputs]

        def caller(seed: int) -> None:
            with torch.no_grad():
                for number in range(calls):
                    place = (number + seed) % len(inputs)
                    with tally.catching("wrong"):
                        if not torch.equal(made.module(inputs[place]), expected[place]):
                            tally.add("wrong")

        attacks = [compile_attack(made.module), trace_attack()]
        callers = [threading.Thread(target=caller, args=(n,), daemon=True) for n in range(CALLERS)]
        attackers = [
            threading.Thread(target=attacker, args=(attack, over, tally), daemon=True)
            for attack in attacks
        ]
        stuck = joined(attackers, callers, over)
        compiled = made.warm.compiles_after_prime
    tell(tally)
    return [
        Row("stress_calls", CALLERS * calls, "calls"),
        Row("sealed_wrong_results", tally.of("wrong"), "calls"),
        Row("stress_attempts", tally.of("attempts"), "attempts"),
        Row("stress_attempts_refused", tally.of("refused"), "attempts"),
        Row("stress_attempts_let_through", tally.of("through") + compiled, "attempts"),
        Row("stress_deadlocks", stuck, "threads"),
    ]


def compile_attack(module: nn.Module) -> Callable[[], object]:
    """Calls a shape that no plan has, and a function that nobody compiled, in turn."""
    x = torch.ones(UNPLANNED, WIDTH)
    turn = iter(range(10**9))

    def attack() -> object:
        if next(turn) % 2:
            return torch.compile(lambda y: y + 1, backend="eager")(x)
        return module(x)

    return attack


def trace_attack() -> Callable[[], object]:
    """Traces with torch.fx, which closes compiled functions to all other threads."""
    return lambda: torch.fx.symbolic_trace(nn.ReLU())


def attacker(attack: Callable[[], object], over: threading.Event, tally: Tally) -> None:
    """Tries until the callers have ended; only a refusal is right."""
    with torch.no_grad():
        while not over.is_set():
            tally.add("attempts")
            try:
                attack()
            except UnexpectedCompile:
                tally.add("refused")
                continue
            except Exception as error:
                tally.errors.append(f"attack: {type(error).__name__}: {str(error)[:200]}")
            tally.add("through")


def joined(
    attackers: list[threading.Thread], callers: list[threading.Thread], over: threading.Event
) -> int:
    """Runs all threads; how many had not ended in time."""
    for thread in (*attackers, *callers):
        thread.start()
    stuck = unfinished(callers)
    over.set()
    return stuck + unfinished(attackers)


def unfinished(threads: list[threading.Thread]) -> int:
    """How many threads the watchdog gave up on; their stacks go to standard error."""
    deadline = time.monotonic() + WATCHDOG
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    stuck = sum(thread.is_alive() for thread in threads)
    if stuck:
        faulthandler.dump_traceback()
    return stuck


def tell(tally: Tally) -> None:
    """Shows what went wrong."""
    for line in tally.errors[:5]:
        print(line, file=sys.stderr)


# -- a gate under stress ----------------------------------------------------------------------


class Compilers:
    """Counts threads that convert a frame while another thread does, outside torch's own lock."""

    def __init__(self) -> None:
        self.concurrent = 0
        self.seen = 0
        self._inside: dict[int, int] = {}
        self._lock = threading.Lock()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Looks at the place where Dynamo takes over a frame that it has no code for."""
        original = convert_frame.CatchErrorsWrapper.__call__
        codes = torch_names.codes_of(Product())

        def converting(wrapper: Any, frame: Any, *rest: Any) -> Any:
            if frame.f_code not in codes:
                return original(wrapper, frame, *rest)
            with self._entered():
                return original(wrapper, frame, *rest)

        convert_frame.CatchErrorsWrapper.__call__ = converting  # type: ignore[method-assign]
        try:
            yield
        finally:
            convert_frame.CatchErrorsWrapper.__call__ = original  # type: ignore[method-assign]

    @contextmanager
    def _entered(self) -> Iterator[None]:
        me = threading.get_ident()
        with self._lock:
            self.seen += 1
            self.concurrent += any(other != me for other in self._inside)
            self._inside[me] = self._inside.get(me, 0) + 1
        try:
            yield
        finally:
            with self._lock:
                self._inside[me] -= 1
                if not self._inside[me]:
                    del self._inside[me]


def gate_round(on_miss: OnMiss, seed: int, tally: Tally) -> int:
    """Threads that take steps with shapes at random; how many never came back."""
    with sealed(on_miss, (1,), backend="eager") as made:

        def asker(place: int) -> None:
            chance = random.Random(seed * ASKERS + place)
            with torch.no_grad(), made.warm.worker("cpu"):
                for _ in range(STEPS):
                    x = torch.randn(chance.randint(1, ASKED_SHAPES), WIDTH)
                    with tally.catching("wrong"), made.warm.step():
                        right = torch.equal(made.module(x), torch.mm(x, made.module.weight))
                        tally.add("wrong", int(not right))

        threads = [
            threading.Thread(target=asker, args=(place,), name=f"asker-{place}", daemon=True)
            for place in range(ASKERS)
        ]
        for thread in threads:
            thread.start()
        return unfinished(threads)


def gate(rounds: int) -> list[Row]:
    """Rounds with the gate, and a few without one to show that the watcher sees what it looks for."""
    gated, ungated, tally = Compilers(), Compilers(), Tally()
    stuck = 0
    with gated.watching():
        for seed in range(rounds):
            stuck += bool(gate_round("serialize", seed, tally))
            if stuck:
                break
    tell(tally)
    with ungated.watching():
        for seed in range(min(rounds, UNGATED_ROUNDS)):
            gate_round("warn", seed, Tally())
    return [
        Row("gate_compiles", gated.seen, "compiles"),
        Row("gate_deadlocks", stuck, "rounds"),
        Row("gate_concurrent_compiles", gated.concurrent, "compiles"),
        Row("gate_wrong_results", tally.of("wrong"), "calls"),
        Row("ungated_concurrent_compiles", ungated.concurrent, "compiles"),
    ]


# -- verdict ----------------------------------------------------------------------------------

ZEROS = (
    "sealed_wrong_results",
    "stress_attempts_let_through",
    "stress_deadlocks",
    "gate_deadlocks",
    "gate_concurrent_compiles",
    "gate_wrong_results",
)
LIMITED = ("sealed_call_overhead_us", "gated_call_overhead_us", "step_overhead_us")


def faults(rows: list[Row]) -> list[str]:
    """What does not hold, in words."""
    values = {row.figure: row.value for row in rows}
    found = [f"{name} is {values[name]:.2f} us" for name in LIMITED if values[name] > LIMIT_US]
    found += [f"{name} is {values[name]:g}, not 0" for name in ZEROS if values[name]]
    if (
        values["stress_attempts_refused"] != values["stress_attempts"]
        or not values["stress_attempts"]
    ):
        found.append("not every attempt was refused")
    if not values["ungated_concurrent_compiles"]:
        found.append("without a gate nothing compiled at the same time: its count proves nothing")
    return found


def main() -> int:
    """0 when every cost is within the limit and every count is as it should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--stress-calls", type=int, default=20000)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    logging.getLogger("compilecache").setLevel(logging.ERROR)
    rows = costs(arguments.pairs, arguments.calls)
    rows += stress(arguments.stress_calls)
    rows += gate(arguments.rounds)
    report("overhead", rows, as_json=arguments.json)
    found = faults(rows)
    told = sys.stderr if arguments.json else sys.stdout
    print(f"limit of {LIMIT_US:g} us a call: {'; '.join(found) or 'holds, every count is right'}",
          file=told)  # fmt: skip
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
