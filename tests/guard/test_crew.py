"""Threads of a run: one failure reaches the parent and stops the others."""

from __future__ import annotations

import queue
import threading

import pytest

from compilecache import Crew, PlanError, WorkerFailed


def test_leaving_waits_for_all_threads() -> None:
    """Nothing failed."""
    done: list[int] = []
    with Crew() as crew:
        for number in range(4):
            crew.start(done.append, number)
    assert sorted(done) == [0, 1, 2, 3]


def test_a_failing_thread_stops_its_siblings_and_is_raised_in_the_parent() -> None:
    """nanochat#722: it showed as a hang. The original error is the cause."""
    waiting: queue.Queue[int] = queue.Queue()

    def sibling() -> None:
        while True:
            try:
                waiting.get(timeout=0.02)
            except queue.Empty:
                crew.check()

    def failing() -> None:
        raise ValueError("bad batch")

    crew = Crew()
    with (
        pytest.raises(WorkerFailed, match="drafter 1 failed: ValueError: bad batch") as caught,
        crew,
    ):
        threads = [crew.start(sibling, name=f"sibling {n}") for n in range(3)]
        crew.start(failing, name="drafter 1")
    assert isinstance(caught.value.__cause__, ValueError)
    assert caught.value.worker == "drafter 1"
    assert not any(thread.is_alive() for thread in threads)


def test_the_first_failure_counts() -> None:
    """What the others raise because they were told to stop hides nothing."""
    crew, second = Crew(), threading.Event()

    def first() -> None:
        try:
            raise KeyError("first")
        finally:
            second.set()

    def later() -> None:
        second.wait(10)
        crew.stopping.wait(10)
        raise RuntimeError("second")

    with pytest.raises(WorkerFailed, match="first"), crew:
        crew.start(later)
        crew.start(first)


def test_a_thread_that_does_not_stop_is_named() -> None:
    """No hang: after the patience the parent goes on, and says who is still there."""
    release = threading.Event()

    def failing() -> None:
        raise ValueError("bad batch")

    with (
        pytest.raises(WorkerFailed, match=r"bad batch.*still running.*deaf"),
        Crew(patience=0.2) as crew,
    ):
        crew.start(release.wait, 60, name="deaf")
        crew.start(failing)
    release.set()


def test_an_error_of_the_parent_stops_the_threads() -> None:
    """The parent's own error is the one that is seen."""
    crew = Crew()
    with pytest.raises(ZeroDivisionError), crew:
        thread = crew.start(crew.stopping.wait, 60)
        raise ZeroDivisionError
    assert not thread.is_alive()


def test_the_parent_does_not_hide_a_workers_error_behind_its_own() -> None:
    """A parent that reads results fails because a worker did: the worker's error is the news."""
    crew = Crew()

    def failing() -> None:
        raise ValueError("bad batch")

    with pytest.raises(WorkerFailed, match="bad batch"), crew:
        crew.start(failing).join()
        raise TypeError("no result")


def test_a_device_needs_a_warm_process() -> None:
    """A crew of its own prepares no devices."""
    with pytest.raises(PlanError, match=r"warm\.crew"), Crew() as crew:
        crew.start(print, device="cpu")
