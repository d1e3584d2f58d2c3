"""What only a GPU can show: device indices, Triton, threads on several devices."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
COUNT = torch.cuda.device_count()
DEVICES = [f"cuda:{index}" for index in range(min(COUNT, 2))]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(COUNT == 0, reason="no CUDA GPU on this machine"),
    pytest.mark.timeout(500),
]


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A fresh Python process; its errors are shown when a test fails."""
    ended = subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), **environment},
    )
    print(ended.stderr[-4000:], file=sys.stderr)
    return ended


class Place:
    """A plan, a store, a cold root, and what the cold process said."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.plan = folder / "plan.yaml"
        self.store = folder / "store"
        ended = run("-m", "compilecache", "plan", "--workload", "dflash_model.workload:tiny",
                    "--seq-lens", "256", "--output", str(self.plan))  # fmt: skip
        assert ended.returncode == 0
        self.cold = self.process(folder / "cold")

    def process(self, root: Path) -> dict[str, Any]:
        """Warms and trains in a fresh process."""
        ended = run(str(HERE / "gpu_process.py"), str(self.plan), str(self.store), str(root),
                    ",".join(DEVICES))  # fmt: skip
        assert ended.returncode == 0
        result: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
        return result


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """One cold warm-up of the tiny drafter for all tests here."""
    return Place(tmp_path_factory.mktemp("gpu"))


@pytest.fixture(scope="module")
def restored(place: Place) -> dict[str, Any]:
    """A fresh process with an empty cache directory."""
    return place.process(place.folder / "restored")


def test_a_cold_warm_up_compiles_every_target_on_its_own_index(place: Place) -> None:
    """Every target of every device was compiled and published."""
    rows = place.cold["report"]["targets"]
    assert {row["device"] for row in rows} == set(DEVICES)
    assert {row["status"] for row in rows} == {"compiled"}
    assert all(row["published"] for row in rows)


def test_a_fresh_process_on_an_empty_root_compiles_nothing(restored: dict[str, Any]) -> None:
    """Counters, compiler launches and new files all say so, on every device index."""
    rows = restored["report"]["targets"]
    assert {row["status"] for row in rows} == {"restored"}
    for row in rows:
        seen = row["evidence"]
        assert (seen["misses"], seen["bypasses"], seen["launches"]) == (0, 0, 0), row
        assert seen["foreign_files"] == [], row
        assert seen["hits"] > 0, row
        assert seen["peak_bytes"] > 0, row
    assert restored["report"]["gave_up"] == []


def test_training_threads_compile_nothing(place: Place, restored: dict[str, Any]) -> None:
    """One thread a device, every planned length, forward and backward: no trace, no error."""
    for result in (place.cold, restored):
        assert result["errors"] == []
        assert result["compiles_after_prime"] == 0


def test_losses_of_a_restored_process_equal_the_cold_ones(
    place: Place, restored: dict[str, Any]
) -> None:
    """The same binaries give the same numbers."""
    for cold, warm in zip(place.cold["losses"], restored["losses"], strict=True):
        assert warm == pytest.approx(cold, rel=1e-5)


def test_the_model_is_left_as_it_was(place: Place, restored: dict[str, Any]) -> None:
    """Weights, gradients and the GPUs' random states."""
    assert place.cold["unchanged"]
    assert restored["unchanged"]


def test_verify_proves_the_restored_root(place: Place, restored: dict[str, Any]) -> None:
    """A third process, on a copy of what travels, compiles nothing."""
    ended = run("-m", "compilecache", "verify", str(place.plan), "--root",
                str(place.folder / "restored"), "--device", ",".join(DEVICES), "--json")  # fmt: skip
    assert ended.returncode == 0, ended.stdout
    assert json.loads(ended.stdout)["warm"]


def test_only_what_is_needed_travels(place: Place, restored: dict[str, Any]) -> None:
    """Triton's files and generated sources come out of the index entries; they are not packed."""
    files = [path for path in (place.folder / "cold").rglob("*") if path.is_file()]
    assert restored["report"]["restored_files"] < len(files) / 2


def test_verify_catches_removed_cubins_although_counters_say_hit(
    place: Place, tmp_path: Path
) -> None:
    """Without bundling, Triton's files are part of the cache; with them gone ptxas must be seen."""
    unbundled = {"TORCHINDUCTOR_BUNDLE_TRITON_INTO_FX_GRAPH_CACHE": "0"}
    words = ["--root", str(tmp_path / "root"), "--device", DEVICES[0]]
    plan = tmp_path / "plan.yaml"
    text = place.plan.read_text().splitlines()
    plan.write_text("\n".join(line for line in text if "eval" not in line))
    warm = run("-m", "compilecache", "warm", str(plan), *words, "--store", str(tmp_path / "store"),
               **unbundled)  # fmt: skip
    assert warm.returncode == 0
    good = run("-m", "compilecache", "verify", str(plan), *words, "--json", **unbundled)
    assert good.returncode == 0, good.stdout
    shutil.rmtree(tmp_path / "root" / "triton")
    bad = run("-m", "compilecache", "verify", str(plan), *words, "--json", **unbundled)
    assert bad.returncode in (3, 4)
    rows = json.loads(bad.stdout)["targets"]
    assert any(row["evidence"]["launches"] > 0 and row["evidence"]["misses"] == 0 for row in rows)


def test_a_device_that_is_not_there_is_named(place: Place) -> None:
    """The error lists the devices that exist."""
    ended = run("-m", "compilecache", "warm", str(place.plan), "--device", "cuda:97")
    assert ended.returncode == 2
    assert "no device 'cuda:97'" in ended.stderr
    assert "cuda:0" in ended.stderr
    assert "Traceback" not in ended.stderr
