"""What torch asks a GPU about a workload, recorded there, and used where the GPU is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gpu_answers
import pytest
from test_gpu import COUNT, HERE, run

from compilecache.gpuprofile import GpuProfile

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(COUNT == 0, reason="no CUDA GPU on this machine"),
    pytest.mark.timeout(500),
]


class Recorded:
    """A profile with answers, what was compiled by it, and natively."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        plan, profile, bare = (folder / name for name in ("plan.yaml", "profile.json", "bare.json"))
        plan.write_text(gpu_answers.plan().dump())
        assert run("-m", "compilecache", "gpu-profile", "--output", str(bare)).returncode == 0
        assert run("-m", "compilecache", "gpu-profile", "--plan", str(plan), "--output",
                   str(profile)).returncode == 0  # fmt: skip
        self.profile = GpuProfile.load(profile)
        self.refused = self.warm(plan, "refused", "--gpu-profile", str(bare))
        self.compiled = self.warm(plan, "offline", "--gpu-profile", str(profile))
        self.native = self.warm(plan, "native", "--device", gpu_answers.DEVICE)
        ended = run(str(HERE / "gpu_answers.py"), str(plan), str(folder / "store-offline"),
                    str(folder / "native"))  # fmt: skip
        assert ended.returncode == 0
        self.said: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])

    def warm(self, plan: Path, root: str, *words: str) -> list[dict[str, Any]]:
        """Rows of a warm-up into a store of its own."""
        ended = run("-m", "compilecache", "warm", str(plan), *words, "--root", str(self.folder / root),
                    "--store", str(self.folder / f"store-{root}"), "--json")  # fmt: skip
        rows: list[dict[str, Any]] = json.loads(ended.stdout)["targets"]
        return rows


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """One for all tests here."""
    return Recorded(tmp_path_factory.mktemp("answers"))


def test_the_gpu_answers_what_a_plan_asks(recorded: Recorded) -> None:
    """Both attentions in both phases, and the products that might be padded."""
    names = {
        operation.name
        for answer in recorded.profile.attention.values()
        for operation in answer.operations
    }
    print(recorded.profile.dump())
    assert len(recorded.profile.attention) >= 4
    assert any("flash" in name or "cudnn" in name for name in names)
    assert len(recorded.profile.padding) >= 2


def test_without_answers_it_is_refused_and_with_them_compiled(recorded: Recorded) -> None:
    """The same plan, on the same machine, in a process that sees no GPU."""
    assert {row["status"] for row in recorded.refused} == {"failed"}
    assert all("scaled_dot_product_attention, at " in str(row) for row in recorded.refused)
    assert {row["status"] for row in recorded.compiled} == {"compiled"}, recorded.compiled
    assert {row["status"] for row in recorded.native} == {"compiled"}


def test_first_contact_passes_the_canary(recorded: Recorded) -> None:
    """Nothing is compiled; gradients are those of eager, in bfloat16."""
    assert recorded.said["report"]["gave_up"] == []
    for row in recorded.said["report"]["targets"]:
        assert row["status"] == "restored", row
        assert row["evidence"]["launches"] == 0, row
        assert row["notes"] == [], row
    assert recorded.said["apart"] < 2e-2


@pytest.mark.parametrize("phase", ["train", "eval"])
def test_the_kernels_are_those_of_a_native_compile(recorded: Recorded, phase: str) -> None:
    """Attention, products and generated kernels alike."""
    seen = recorded.said[phase]
    print(seen)
    assert seen["calls"] == seen["native_calls"]
    assert any("_scaled_dot_product" in name for name in seen["calls"])
    assert (seen["missing"], seen["more"]) == (0, 0)
