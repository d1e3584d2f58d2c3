"""The gate by itself: threads, no torch."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest

from compilecache.errors import LockTimeout, WorkerFailed
from compilecache.guard.gate import Gate

DEADLINE = 60.0


def run_threads(*functions: Callable[[], None]) -> list[BaseException]:
    """Runs every function in a thread of its own; a thread that does not end fails the test."""
    errors: list[BaseException] = []

    def guarded(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=guarded, args=(f,), name=f"t{i}", daemon=True)
        for i, f in enumerate(functions)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
        assert not thread.is_alive(), f"{thread.name} hangs"
    return errors


class Watch:
    """Notices when somebody compiles while another is in a step and does not want to compile."""

    def __init__(self) -> None:
        self.compiling = 0
        self.most = 0
        self.disturbed = 0
        self.working = 0
        self.lock = threading.Lock()

    def compile(self) -> None:
        with self.lock:
            self.compiling += 1
            self.most = max(self.most, self.compiling)
            self.disturbed += self.working
        threading.Event().wait(0.001)
        with self.lock:
            self.compiling -= 1

    def work(self) -> None:
        with self.lock:
            self.working += 1
            self.disturbed += self.compiling
        threading.Event().wait(0.0005)
        with self.lock:
            self.working -= 1


@pytest.mark.parametrize("seed", range(3))
def test_random_steps_and_compilations_never_overlap_and_always_end(seed: int) -> None:
    """Eight threads, some compile several times in a step, some outside of any."""
    gate, watch = Gate(DEADLINE), Watch()

    def worker(number: int) -> Callable[[], None]:
        def run() -> None:
            dice = random.Random(seed * 100 + number)
            for _ in range(60):
                if dice.random() < 0.1:
                    with gate.exclusive():
                        watch.compile()
                    continue
                with gate.step():
                    watch.work()
                    while dice.random() < 0.3:
                        with gate.exclusive():
                            watch.compile()
                    watch.work()

        return run

    assert run_threads(*(worker(number) for number in range(8))) == []
    assert watch.most == 1
    assert watch.disturbed == 0


def test_all_threads_may_want_to_compile_at_once() -> None:
    """Each waits for the others inside its step, and each gets its turn."""
    gate, together, done = Gate(DEADLINE), threading.Barrier(12), []

    def worker() -> None:
        with gate.step():
            together.wait(DEADLINE)
            with gate.exclusive():
                done.append(threading.current_thread().name)

    assert run_threads(*[worker] * 12) == []
    assert len(set(done)) == 12


def test_who_compiled_is_alone_until_its_step_ends() -> None:
    """The backward, which torch may compile on another thread, belongs to the step."""
    gate, order = Gate(DEADLINE), []
    compiled = threading.Event()

    def compiler() -> None:
        with gate.step():
            with gate.exclusive():
                compiled.set()
            threading.Event().wait(0.05)
            order.append("end of the step")

    def other() -> None:
        compiled.wait(DEADLINE)
        with gate.step():
            order.append("next step")

    assert run_threads(compiler, other) == []
    assert order == ["end of the step", "next step"]


def test_a_step_that_raises_leaves_the_gate_open() -> None:
    """Also one that was compiling."""
    gate = Gate(DEADLINE)

    def failing() -> None:
        with gate.step(), gate.exclusive():
            raise ValueError("a step failed")

    assert [type(error) for error in run_threads(failing)] == [ValueError]
    assert run_threads(lambda: gate.enter()) == []


def test_a_thread_may_compile_for_others_that_wait_for_it() -> None:
    """Autograd's thread of a device: the workers whose backwards it runs are all in their steps."""
    gate, done, together = Gate(DEADLINE), [], threading.Barrier(3)
    finished = threading.Event()

    def worker() -> None:
        with gate.step("cuda:1"):
            together.wait(DEADLINE)
            assert finished.wait(DEADLINE)
            with gate.exclusive():
                done.append("worker")

    def autograd() -> None:
        together.wait(DEADLINE)
        blocked = gate.stepping_on("cuda:1")
        assert len(blocked) == 2
        with gate.exclusive(blocked):
            done.append("autograd")
        with gate.exclusive(gate.stepping_on("cuda:1")):
            done.append("autograd")
        finished.set()

    def bystander() -> None:
        for _ in range(20):
            with gate.step("cuda:0"):
                threading.Event().wait(0.001)

    assert run_threads(worker, worker, autograd, bystander) == []
    assert done == ["autograd", "autograd", "worker", "worker"]


def test_waiting_for_a_thread_that_never_comes_ends_with_its_name() -> None:
    """No silent deadlock: who waits inside a step for another thread is named."""
    gate, release = Gate(0.3), threading.Event()
    stepping = threading.Event()

    def stuck() -> None:
        with gate.step():
            stepping.set()
            release.wait(DEADLINE)

    def compiler() -> None:
        stepping.wait(DEADLINE)
        try:
            with gate.exclusive():
                raise AssertionError("was let in")
        finally:
            release.set()

    errors = run_threads(stuck, compiler)
    assert [type(error) for error in errors] == [LockTimeout]
    assert isinstance(errors[0], LockTimeout)
    assert errors[0].holder == "t0"
    assert "t0" in str(errors[0])
    assert "gate_timeout" in str(errors[0])


def test_waiting_ends_when_the_run_stops() -> None:
    """A sibling failed: nobody waits for it."""
    stopped = threading.Event()

    def check() -> None:
        if stopped.is_set():
            raise WorkerFailed("t1 failed", next_step="See its error", worker="t1")

    gate, inside = Gate(DEADLINE, check), threading.Event()

    def stuck() -> None:
        with gate.step():
            inside.set()
            stopped.wait(DEADLINE)

    def compiler() -> None:
        inside.wait(DEADLINE)
        threading.Timer(0.1, stopped.set).start()
        with gate.exclusive():
            pass

    kinds = {type(error) for error in run_threads(stuck, compiler)}
    assert kinds <= {WorkerFailed}


def test_a_nested_step_has_no_boundary() -> None:
    """Only the outermost ends let others compile."""
    gate = Gate(0.2)
    with gate.step():
        with gate.step():
            assert gate.stepping()
        assert gate.stepping()
        errors = run_threads(lambda: gate.exclusive().__enter__())
        assert [type(error) for error in errors] == [LockTimeout]
    assert not gate.stepping()
