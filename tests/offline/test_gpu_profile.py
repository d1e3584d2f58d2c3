"""Profiles of GPUs: what a file may say, what is shipped, what does not fit this environment."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compilecache import gpuprofile
from compilecache.engines.fitting import profile_differences
from compilecache.errors import PlanError
from compilecache.gpuprofile import GpuProfile, refuse_other_versions

H200 = GpuProfile.load("h200")


def said(**changes: object) -> dict[str, Any]:
    """The shipped profile as plain data, changed; None removes a field."""
    data = {**json.loads(H200.dump()), **changes}
    return {name: value for name, value in data.items() if value is not None}


def test_a_profile_comes_back_from_its_file(tmp_path: Path) -> None:
    """Field by field, under any name."""
    path = tmp_path / "mine.json"
    path.write_text(H200.dump())
    assert GpuProfile.load(path) == H200
    assert H200.name == "NVIDIA H200"
    assert H200.capability == (9, 0)
    assert H200.properties()["major"] == 9


BAD = [
    ({"multi_processor_count": None}, "multi_processor_count"),
    ({"multi_processor_count": 0}, "multi_processor_count"),
    ({"multi_processor_count": "132"}, "multi_processor_count"),
    ({"multi_processor_count": 132.5}, "multi_processor_count"),
    ({"multi_processor_count": True}, "multi_processor_count"),
    ({"warp_size": 64}, "warp_size"),
    ({"capability": [9]}, "capability"),
    ({"capability": [9, -1]}, "capability"),
    ({"capability": [1000, 0]}, "capability"),
    ({"capability": "9.0"}, "capability"),
    ({"shared_memory_per_block_optin": 0}, "shared_memory_per_block_optin"),
    ({"shared_memory_per_block_optin": 2**40}, "shared_memory_per_block_optin"),
    ({"shared_memory_per_block_optin": 1024}, "shared_memory_per_block_optin"),
    ({"max_threads_per_block": 4096}, "max_threads_per_block"),
    ({"total_memory": -1}, "total_memory"),
    ({"name": ""}, "name"),
    ({"name": "NVIDIA H200\n"}, "name"),
    ({"cuda": "thirteen"}, "cuda"),
    ({"triton": None}, "triton"),
    ({"vendor": "amd"}, "vendor"),
    ({"format": 2}, "format"),
    ({"tensor_memory": 512}, "tensor_memory"),
]


@pytest.mark.parametrize(("changes", "field"), BAD, ids=lambda value: str(value))
def test_a_profile_with_a_bad_field_is_refused_by_its_name(
    changes: dict[str, object], field: str
) -> None:
    """Missing, absurd, of a newer version, of another vendor."""
    with pytest.raises(PlanError, match=f"field '{field}") as caught:
        GpuProfile.parse(said(**changes))
    assert str(caught.value.field).startswith(field)
    assert "compilecache gpu-profile" in caught.value.next_step


@pytest.mark.parametrize("content", ["[]", "null", "{", '{"a": 1, "a": 2}', "\xff"])
def test_a_file_that_is_no_profile_is_refused(tmp_path: Path, content: str) -> None:
    """Whatever it is instead."""
    path = tmp_path / "profile.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(PlanError, match=r"profile\.json"):
        GpuProfile.load(path)


def test_a_profile_that_is_not_there_names_those_that_are(tmp_path: Path) -> None:
    """By the words of the file system, with what is shipped."""
    with pytest.raises(PlanError, match="No such file") as caught:
        GpuProfile.load(tmp_path / "b300.json")
    assert "h200" in caught.value.next_step


@pytest.mark.parametrize("path", sorted(gpuprofile.SHIPPED.glob("*.json")), ids=lambda p: p.stem)
def test_what_is_shipped_is_as_it_would_be_recorded(path: Path) -> None:
    """Every file is a whole profile, in the form that the command writes."""
    assert GpuProfile.load(path.stem).dump() == path.read_text(encoding="utf-8")


# -- this environment -----------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "cuda:999", "hip"])
def test_recording_where_there_is_no_such_gpu_is_refused(device: str) -> None:
    """With the device named; a CPU is none."""
    with pytest.raises(PlanError, match=device):
        gpuprofile.record(device)


@pytest.mark.parametrize("field", ["cuda", "triton"])
def test_a_profile_of_other_versions_is_refused(
    field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are named: the profile's, and this environment's."""
    here = {"cuda": H200.cuda, "triton": H200.triton, field: "99.0"}
    monkeypatch.setattr(gpuprofile, "versions", lambda: here)
    with pytest.raises(PlanError, match=rf"'{field}' is .*, here it is 99\.0") as caught:
        refuse_other_versions(H200)
    assert caught.value.field == field


def test_the_profiles_versions_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is raised."""
    monkeypatch.setattr(gpuprofile, "versions", lambda: {"cuda": H200.cuda, "triton": H200.triton})
    refuse_other_versions(H200)


@pytest.mark.parametrize("field", ["cuda", "triton"])
def test_a_torch_without_cuda_is_refused(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As CI has it: what to install is said."""
    here = {"cuda": H200.cuda, "triton": H200.triton, field: "none"}
    monkeypatch.setattr(gpuprofile, "versions", lambda: here)
    with pytest.raises(PlanError, match="this torch has no") as caught:
        refuse_other_versions(H200)
    assert "CUDA build" in caught.value.next_step
    assert caught.value.field == field


# -- first contact --------------------------------------------------------------------------------


def test_another_gpu_than_the_profiles_is_told_by_field(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of an H200, an H100, a profile that was edited; capacities may differ from board to board."""
    here = H200.properties() | {"total_memory": 1, "L2_cache_size": 2}
    device = torch.device("cuda:0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**here))
    assert profile_differences(H200, device) == {}
    here |= {"name": "NVIDIA H200 MIG 1g.18gb", "multi_processor_count": 16}
    assert profile_differences(H200, device) == {
        "gpu.name": ("NVIDIA H200", "NVIDIA H200 MIG 1g.18gb"),
        "gpu.multi_processor_count": ("132", "16"),
    }
    del here["regs_per_multiprocessor"]
    assert profile_differences(H200, device)["gpu.regs_per_multiprocessor"][1] == "absent"
