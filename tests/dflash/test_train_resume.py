"""Checkpoints of a run: a resumed run is the run that never stopped, and nothing else is resumed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from trainees import TableTarget, Trained, log_of, rows_of, train

from compilecache.errors import PlanError
from dflash_model.checkpoint import CheckpointError, load_drafter
from dflash_model.config import DrafterConfig
from dflash_model.resume import find_checkpoint
from dflash_model.trainer import TrainSettings

pytest.importorskip("safetensors")

STEPS = TrainSettings(steps=8, save_every=3)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def saved(small: DrafterConfig, tmp_path: Path) -> Trained:
    """A run of eight steps that saved after 3, 6 and 8."""
    return train(small, settings=replace(STEPS, save=tmp_path / "a", log=tmp_path / "a.jsonl"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resumed_run_is_the_run_that_never_stopped(
    small: DrafterConfig, tmp_path: Path, dtype: str
) -> None:
    """Losses, gradient norms and learning rates of every later step, and the final weights."""
    config = replace(small, dtype=dtype)
    whole = train(config, settings=replace(STEPS, save=tmp_path / "a", log=tmp_path / "a.jsonl"))
    settings = replace(STEPS, resume=tmp_path / "a/step-000003", log=tmp_path / "b.jsonl")
    resumed = train(config, settings=settings, targets=[TableTarget(config) for _ in range(3)])
    assert log_of(tmp_path / "b.jsonl") == log_of(tmp_path / "a.jsonl")[3:]
    assert resumed.summary.steps == 5 and "going on after step 3" in resumed.log
    for drafter in resumed.drafters:
        for mine, its in zip(drafter.parameters(), whole.drafters[0].parameters(), strict=True):
            assert torch.equal(mine, its)


def test_checkpoints_come_when_asked_for_and_at_the_end(saved: Trained, tmp_path: Path) -> None:
    """Nothing unfinished lies beside them; the newest is found; the summary names the last."""
    assert names(tmp_path / "a") == ["step-000003", "step-000006", "step-000008"]
    assert find_checkpoint(tmp_path / "a").step == 8
    assert saved.summary.checkpoint == str(tmp_path / "a/step-000008")


def test_checkpoint_holds_a_published_drafter(saved: Trained, tmp_path: Path) -> None:
    """``load_drafter`` reads it: what was trained, without the target's embedding and head."""
    loaded = load_drafter(tmp_path / "a/step-000008/drafter")
    mine = dict(loaded.named_parameters())
    for name, its in saved.drafters[0].named_parameters():
        if its.requires_grad:
            assert torch.equal(mine[name], its)


def test_unfinished_checkpoint_is_not_seen(saved: Trained, tmp_path: Path) -> None:
    """What a killed run was writing has another name; a folder without its state is none."""
    (tmp_path / "a/.tmp-rest/drafter").mkdir(parents=True)
    (tmp_path / "a/step-000009").mkdir()
    assert find_checkpoint(tmp_path / "a").step == 8


def test_log_goes_on_where_the_checkpoint_was(
    saved: Trained, small: DrafterConfig, tmp_path: Path
) -> None:
    """Steps after the checkpoint, and a line cut off by a kill, are made again, not doubled."""
    log = tmp_path / "a.jsonl"
    before = log_of(log)
    log.write_text(log.read_text() + '{"step": 9, "lo')
    train(small, settings=replace(STEPS, resume=tmp_path / "a/step-000006", log=log))
    assert log_of(log) == before


def test_another_run_is_not_resumed(saved: Trained, small: DrafterConfig, tmp_path: Path) -> None:
    """Every option that would change the losses is named, with both values."""
    other = replace(STEPS, seed=5, lr=1e-3, resume=tmp_path / "a/step-000003")
    with pytest.raises(CheckpointError) as caught:
        train(small, settings=other, rows=rows_of(*range(20, 48, 2)))
    faults = caught.value.faults
    assert "seed was 0, is 5" in faults and "lr was 0.0006, is 0.001" in faults
    assert [fault.split()[0] for fault in faults] == ["seed", "data", "lr"]


def test_drafter_of_another_size_is_not_resumed(
    saved: Trained, small: DrafterConfig, tmp_path: Path
) -> None:
    """Weights of another config do not fit."""
    other = replace(small, intermediate_size=64)
    with pytest.raises(CheckpointError, match="that of another drafter"):
        train(other, settings=replace(STEPS, resume=tmp_path / "a/step-000003"))


@pytest.mark.parametrize("file", ["training.safetensors", "drafter/model.safetensors"])
def test_damaged_tensors_are_named(
    saved: Trained, small: DrafterConfig, tmp_path: Path, file: str
) -> None:
    """A file that was cut short is refused before a step is made."""
    path = tmp_path / "a/step-000003" / file
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=path.name):
        train(small, settings=replace(STEPS, resume=tmp_path / "a/step-000003"))


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"format": 1}', '{"format": 9, "step": 1, "run": {}}']
)
def test_damaged_state_is_named(saved: Trained, tmp_path: Path, text: str) -> None:
    """So is a state that is not JSON, not complete, or of another format."""
    (tmp_path / "a/step-000003/training.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"training\.json"):
        find_checkpoint(tmp_path / "a/step-000003")


def test_folder_without_checkpoints_is_refused(tmp_path: Path) -> None:
    """The message says which folders would do."""
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        find_checkpoint(tmp_path)


def test_no_checkpoint_is_overwritten(saved: Trained, small: DrafterConfig, tmp_path: Path) -> None:
    """A new run does not save into the folder of another; a resumed one only after the newest."""
    with pytest.raises(CheckpointError, match="already holds step 8"):
        train(small, settings=replace(STEPS, save=tmp_path / "a"))
    earlier = replace(STEPS, save=tmp_path / "a", resume=tmp_path / "a/step-000003")
    with pytest.raises(CheckpointError, match="already holds step 8"):
        train(small, settings=earlier)


def test_run_that_is_over_is_not_resumed(
    saved: Trained, small: DrafterConfig, tmp_path: Path
) -> None:
    """There is no step left to make."""
    with pytest.raises(PlanError, match="is the end of its run"):
        train(small, settings=replace(STEPS, resume=tmp_path / "a"))


def test_state_says_what_it_is(saved: Trained, tmp_path: Path) -> None:
    """Format, step and the run, as documented."""
    state = json.loads((tmp_path / "a/step-000003/training.json").read_text())
    assert set(state) == {"format", "step", "run"}
    assert (state["format"], state["step"], state["run"]["drafters"]) == (1, 3, 2)
