"""The seal and the gate on GPUs: device indices, autograd's threads, several devices at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_gpu import COUNT, DEVICES, HERE, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(COUNT == 0, reason="no CUDA GPU on this machine"),
    pytest.mark.timeout(500),
]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """One process with all scenarios."""
    ended = run(str(HERE / "gpu_guard.py"), ",".join(DEVICES))
    assert ended.returncode == 0
    seen: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return seen


def test_threads_find_what_is_warm_on_their_device(found: dict[str, Any]) -> None:
    """triton#3729, 152639: threads that never used the GPU before, on every index."""
    assert found["refused"]["planned"] == [""] * len(DEVICES)
    assert found["refused"]["compiles"] == 0


def test_new_shapes_traces_and_dense_attention_are_refused(found: dict[str, Any]) -> None:
    """Before anything compiles or runs."""
    assert "x.shape[0] is 5, planned is 3" in found["refused"]["shape"]
    assert (
        "would run, uncompiled and on the dense path, flex_attention, called in"
        in found["refused"]["flex"]
    )
    assert "would trace with torch.fx" in found["refused"]["trace"]


@pytest.mark.skipif(COUNT < 2, reason="needs two GPUs")
def test_another_device_is_refused(found: dict[str, Any]) -> None:
    """The device index is part of a graph: warm on one is not warm on the other."""
    assert found["other_device"].startswith("UnexpectedCompile")
    assert f"{DEVICES[1]}" in found["other_device"]


def test_a_backward_on_autograds_thread_is_refused(found: dict[str, Any]) -> None:
    """The error comes out of ``backward()`` in the worker."""
    assert "would compile the backward of" in found["lazy_error"]["heard"]
    assert not found["lazy_error"]["gradient"]
    assert found["lazy_error"]["compiles"] == 0


def test_a_backward_on_autograds_thread_compiles_in_the_gate(found: dict[str, Any]) -> None:
    """It belongs to the step of the worker that waits for it: no deadlock."""
    assert found["lazy_serialize"]["heard"] == ""
    assert found["lazy_serialize"]["gradient"]


def test_new_shapes_on_several_devices_take_turns(found: dict[str, Any]) -> None:
    """Results as eager; nothing failed, nothing hung."""
    seen = found["serialized"]
    assert seen["wrong"] == []
    assert seen["gave_up"] == []
    assert seen["targets"] == 2 * len(DEVICES) + 3 * len(DEVICES)


def test_a_side_thread_has_a_context_after_a_restore(tmp_path: Path) -> None:
    """triton#3729: in a process that only loads, a thread's first kernel found no context (pytorch#152639)."""
    assert torch.cuda.is_available()
    words = [str(HERE / "gpu_restored_thread.py"), str(tmp_path)]
    assert run(*words, "cold", DEVICES[-1]).returncode == 0
    ended = run(*words, "restored", DEVICES[-1])
    assert ended.returncode == 0
    assert json.loads(ended.stdout.splitlines()[-1]) == {"status": ["restored"] * 2, "compiles": 0}
