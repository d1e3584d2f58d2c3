"""Work beside other work leaves the interpreter as it was."""

from __future__ import annotations

import gc
import sys
import threading

import pytest

from compilecache.engines.beside import Beside, without_collecting
from compilecache.turns import TURN


def test_turns_are_short_until_the_last_has_ended() -> None:
    """Also where two overlap, and the first ends first."""
    usual, first, second = sys.getswitchinterval(), threading.Event(), threading.Event()
    one, two = Beside(first.wait), Beside(second.wait)
    assert sys.getswitchinterval() == pytest.approx(TURN)
    first.set()
    one.join()
    assert sys.getswitchinterval() == pytest.approx(TURN)
    second.set()
    two.join()
    two.join()
    assert sys.getswitchinterval() == pytest.approx(usual)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failure_ends_it_too() -> None:
    """Whatever happens in there."""
    usual = sys.getswitchinterval()
    Beside(lambda: 1 / 0).join()
    assert sys.getswitchinterval() == pytest.approx(usual)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_as_it_was(enabled: bool) -> None:
    """Whoever has switched it off keeps it so."""
    was = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with without_collecting():
            assert not gc.isenabled()
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was else gc.disable)()
