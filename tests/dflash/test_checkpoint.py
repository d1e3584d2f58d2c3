"""Checkpoints: whole, sharded, tied, and every way they can fail to fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dflash_model.checkpoint import CheckpointError, load_drafter, load_target, save_drafter
from dflash_model.config import DrafterConfig
from dflash_model.model import Drafter

safetensors = pytest.importorskip("safetensors.torch")


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = safetensors.load_file(folder / "model.safetensors")
    return loaded


def shard(folder: Path) -> None:
    """Splits a saved checkpoint into two files and an index."""
    tensors = tensors_of(folder)
    names = sorted(tensors)
    files = {"model-00001.safetensors": names[::2], "model-00002.safetensors": names[1::2]}
    for file, held in files.items():
        safetensors.save_file({name: tensors[name] for name in held}, folder / file)
    weight_map = {name: file for file, held in files.items() for name in held}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    (folder / "model.safetensors").unlink()


def assert_same(loaded: Drafter, saved: Drafter) -> None:
    theirs = dict(saved.named_parameters())
    for name, parameter in loaded.named_parameters():
        if name not in ("embed_tokens.weight", "lm_head.weight"):
            assert torch.equal(parameter, theirs[name]), name


@pytest.mark.parametrize("sharded", [False, True])
def test_saved_drafter_loads_back(drafter: Drafter, tmp_path: Path, sharded: bool) -> None:
    """A round trip keeps every weight and the config, in one file or in shards."""
    save_drafter(drafter, tmp_path / "made")
    if sharded:
        shard(tmp_path / "made")
    loaded = load_drafter(tmp_path / "made", anchors=6)
    assert loaded.config == drafter.config
    assert_same(loaded, drafter)


def test_target_weights_are_not_saved(drafter: Drafter, tmp_path: Path) -> None:
    """A drafter's checkpoint holds what was trained, under the published names."""
    save_drafter(drafter, tmp_path)
    names = {name for name, p in drafter.named_parameters() if p.requires_grad}
    assert set(tensors_of(tmp_path)) == names


@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
def test_head_comes_from_the_target(
    drafter: Drafter, small: DrafterConfig, tmp_path: Path, prefix: str
) -> None:
    """Embedding and head are read from the target's folder, whichever way it names them."""
    target = {
        f"{prefix}embed_tokens.weight": torch.randn(small.vocab_size, small.hidden_size),
        "lm_head.weight": torch.randn(small.vocab_size, small.hidden_size),
        f"{prefix}layers.0.mlp.up_proj.weight": torch.randn(3, 3),
    }
    save_drafter(drafter, tmp_path / "drafter")
    (tmp_path / "target").mkdir()
    safetensors.save_file(target, tmp_path / "target" / "model.safetensors")
    loaded = load_drafter(tmp_path / "drafter", target=tmp_path / "target")
    assert torch.equal(loaded.embed_tokens.weight, target[f"{prefix}embed_tokens.weight"])
    assert torch.equal(loaded.lm_head.weight, target["lm_head.weight"])


def test_tied_target_gives_its_embedding_twice(
    drafter: Drafter, small: DrafterConfig, tmp_path: Path
) -> None:
    """A target without a head of its own uses its embedding as one."""
    embedding = torch.randn(small.vocab_size, small.hidden_size)
    safetensors.save_file({"model.embed_tokens.weight": embedding}, tmp_path / "a.safetensors")
    load_target(drafter, tmp_path)
    assert torch.equal(drafter.lm_head.weight, embedding)
    assert torch.equal(drafter.embed_tokens.weight, embedding)


def test_every_name_that_does_not_fit_is_listed_at_once(drafter: Drafter, tmp_path: Path) -> None:
    """Missing, unexpected and mis-shaped names are gathered into one error."""
    save_drafter(drafter, tmp_path)
    tensors = tensors_of(tmp_path)
    del tensors["norm.weight"]
    tensors["layers.7.mlp.up_proj.weight"] = torch.zeros(2)
    tensors["fc.weight"] = torch.zeros(3, 5)
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load_drafter(tmp_path)
    assert set(caught.value.faults) == {
        "missing norm.weight",
        "unexpected layers.7.mlp.up_proj.weight",
        "fc.weight is [3, 5], expected [32, 64]",
    }


def test_missing_shard_is_named(drafter: Drafter, tmp_path: Path) -> None:
    """An index that names a file which is not there is refused before anything is read."""
    save_drafter(drafter, tmp_path)
    shard(tmp_path)
    (tmp_path / "model-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"missing shard model-00002\.safetensors"):
        load_drafter(tmp_path)


def test_folder_without_tensors_is_refused(drafter: Drafter, tmp_path: Path) -> None:
    """A folder that holds only a config is not a checkpoint."""
    save_drafter(drafter, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors file"):
        load_drafter(tmp_path)


def test_target_of_another_vocabulary_is_refused(drafter: Drafter, tmp_path: Path) -> None:
    """The head of another target does not fit, and the message says by how much."""
    safetensors.save_file(
        {"model.embed_tokens.weight": torch.zeros(65, 32)}, tmp_path / "model.safetensors"
    )
    with pytest.raises(CheckpointError, match=r"is \[65, 32\], expected \[64, 32\]"):
        load_target(drafter, tmp_path)


def test_truncated_file_is_refused(drafter: Drafter, tmp_path: Path) -> None:
    """A download that stopped half-way is an error that names the file."""
    save_drafter(drafter, tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load_drafter(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_index_that_is_none_is_refused(drafter: Drafter, tmp_path: Path, content: str) -> None:
    """An index without a weight map is an error that names it."""
    save_drafter(drafter, tmp_path)
    shard(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError, match="holds no weight_map"):
        load_drafter(tmp_path)
