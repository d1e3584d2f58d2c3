"""The target: the hidden states that transformers itself gives, without what is not needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from trainees import plan_for, rows_of

from compilecache.errors import PlanError
from dflash_model.checkpoint import CheckpointError
from dflash_model.config import DrafterConfig
from dflash_model.microbatch import MicroBatch, MicroBatches
from dflash_model.target import HfTarget

transformers = pytest.importorskip("transformers")

MakeModel = Callable[[], torch.nn.Module]


def model_of(kind: str, **changes: int) -> torch.nn.Module:
    """Four random layers of Qwen3 or Llama, as wide as the small drafter."""
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes | changes)
    made: torch.nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config)
    return made.eval()


def batch_of(config: DrafterConfig, rows: int) -> MicroBatch:
    """Padded rows of several lengths, with one more that only fills up."""
    plan = plan_for(config, 32, batch=rows + 1)
    held = rows_of(*range(10, 10 + 5 * rows, 5))
    return MicroBatches(held, plan, batch_size=rows, drafters=1, seed=0).at(0)


@pytest.mark.parametrize("kind", ["Qwen3", "Llama"])
@pytest.mark.parametrize("layers", [(0, 2), (1, 3), (0, 1)])
def test_hidden_states_are_those_of_transformers(
    small: DrafterConfig, kind: str, layers: tuple[int, ...]
) -> None:
    """Index id + 1 of ``output_hidden_states``, the normalised last one included; pads are 0."""
    config = replace(small, target_layer_ids=layers)
    batch = batch_of(config, 1)
    with torch.no_grad():
        every = model_of(kind)(batch.input_ids, output_hidden_states=True).hidden_states
    expected = torch.cat([every[layer + 1] for layer in layers], dim=-1)
    hidden = HfTarget(model_of(kind), config).hidden(batch)
    assert torch.equal(hidden[batch.attention_mask], expected[batch.attention_mask])
    assert not hidden[~batch.attention_mask].any()
    assert not hidden.requires_grad


def test_padding_does_not_change_a_row(small: DrafterConfig) -> None:
    """A row among others, padded, has the states that it has alone with an attention mask."""
    batch = batch_of(small, 3)
    hidden = HfTarget(model_of("Qwen3"), small).hidden(batch)
    assert hidden.shape == (4, 32, small.context_size)
    reference = model_of("Qwen3")
    for ids, real, states in zip(batch.input_ids, batch.attention_mask, hidden, strict=True):
        if real.any():
            alone = ids[real].unsqueeze(0)
            mask = torch.ones_like(alone)
            with torch.no_grad():
                every = reference(alone, attention_mask=mask, output_hidden_states=True)
            expected = torch.cat([every.hidden_states[i + 1] for i in (1, 3)], dim=-1)
            torch.testing.assert_close(states[real], expected[0], rtol=1e-4, atol=1e-5)


def test_layers_that_nobody_reads_are_not_run(small: DrafterConfig) -> None:
    """Neither those after the last captured one nor the head."""
    model = model_of("Qwen3", num_hidden_layers=6)
    ran: list[str] = []
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *_, name=name: ran.append(name))
    HfTarget(model, small).hidden(batch_of(small, 1))
    assert "model.layers.3" in ran
    assert not {"model.layers.4", "model.layers.5", "lm_head"} & set(ran)


def test_saved_model_is_loaded_in_its_dtype(small: DrafterConfig, tmp_path: Path) -> None:
    """From a folder on this machine, frozen."""
    model_of("Qwen3").to(torch.bfloat16).save_pretrained(tmp_path)
    target = HfTarget.load(tmp_path, small)
    assert target.hidden(batch_of(small, 1)).dtype == torch.bfloat16
    assert target.device == torch.device("cpu")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_hidden_layers": 3}, "it has 3 layers, but layer 3 is captured"),
        ({"hidden_size": 64}, "its hidden size is 64, the drafter's 32"),
    ],
)
def test_target_that_does_not_fit_is_refused(
    small: DrafterConfig, changes: dict[str, int], problem: str
) -> None:
    """Before anything runs, with both sizes."""
    with pytest.raises(PlanError, match=problem):
        HfTarget(model_of("Qwen3", **changes), small)


def test_model_of_another_build_is_refused(small: DrafterConfig) -> None:
    """A module without decoder layers is no target."""
    with pytest.raises(PlanError, match="Linear has no decoder"):
        HfTarget(torch.nn.Linear(2, 2), small)


def test_folder_without_a_model_is_refused(small: DrafterConfig, tmp_path: Path) -> None:
    """Nothing is looked up elsewhere; a config of no known kind, or without weights, is named."""
    with pytest.raises(CheckpointError, match=r"holds no config\.json"):
        HfTarget.load(tmp_path, small)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        HfTarget.load(tmp_path, small)
    model_of("Qwen3").config.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        HfTarget.load(tmp_path, small)
