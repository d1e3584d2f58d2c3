"""Transfers at a time: more of them only while they wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from compilecache.streams import in_streams


class Watched:
    """An act that notes how many of it ran at once."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act = act
        self._lock = threading.Lock()
        self._now = 0
        self.most = 0

    def __call__(self, item: int) -> int:
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        try:
            self._act()
            return item * item
        finally:
            with self._lock:
                self._now -= 1


def compute() -> None:
    """Half a second of processor time, however long that takes."""
    until = time.thread_time() + 0.5
    while time.thread_time() < until:
        sum(range(1000))


def test_results_come_in_order() -> None:
    """Whatever ended first; nothing to do is nothing done."""
    assert in_streams(range(50), Watched(lambda: None), 3, 8) == [n * n for n in range(50)]
    assert in_streams([], Watched(lambda: None), 1, 8) == []


def test_transfers_that_wait_become_more() -> None:
    """From a store that is far away one stream is not enough."""
    everybody = threading.Barrier(8)
    watched = Watched(lambda: everybody.wait(60))  # nobody goes on before eight are there
    in_streams(range(8), watched, 1, 8)
    assert watched.most == 8


def test_there_are_never_more_than_may_be() -> None:
    """Nor more than there are items."""
    watched = Watched(lambda: time.sleep(0.15))
    in_streams(range(12), watched, 2, 3)
    assert watched.most <= 3


def test_a_busy_one_stays_alone_while_it_has_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is always computing would only take turns with more of its kind."""
    monkeypatch.setattr("compilecache.streams.BUSY", 1e-6)  # however slow this machine is now
    watched = Watched(compute)
    in_streams(range(3), watched, 1, 8)
    assert watched.most == 1


def test_the_first_failure_ends_it() -> None:
    """Nothing more is begun, what runs is waited for, and every thread is gone."""
    begun: list[int] = []

    def fail(item: int) -> None:
        begun.append(item)
        raise ValueError(f"item {item}")

    with pytest.raises(ValueError, match="item"):
        in_streams(range(100), fail, 2, 2)
    assert len(begun) <= 4
    assert not [t for t in threading.enumerate() if t.name == "compilecache-stream"]
