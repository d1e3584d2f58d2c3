"""The trainer on GPUs: batches, hidden states and gradients go from device to device."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from test_gpu import COUNT, DEVICES, HERE, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(COUNT == 0, reason="no CUDA GPU on this machine"),
    pytest.mark.timeout(500),
]


def test_a_run_compiles_nothing_and_keeps_the_replicas_equal(tmp_path: Path) -> None:
    """Averaged gradients over devices; memory is measured step by step."""
    ended = run(str(HERE / "gpu_trainer.py"), ",".join(DEVICES), str(tmp_path))
    assert ended.returncode == 0
    seen = json.loads(ended.stdout.splitlines()[-1])
    assert seen["steps"] == 15
    assert seen["compiles_after_prime"] == 0
    assert seen["equal"]
    assert math.isfinite(seen["last_loss"])
    assert set(seen["memory_peak"]) == set(DEVICES)
    assert 1.0 <= seen["memory_spread"] < 1.5
