"""Sizes of drafters: presets, the layer formula, config.json, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from compilecache.errors import PlanError
from dflash_model.config import PRESETS, DrafterConfig, preset, target_layer_ids
from dflash_model.hf_config import from_hf, to_hf

TARGET_LAYERS = {
    "qwen3-4b": 36,
    "qwen3-8b": 36,
    "qwen3-coder-30b-a3b": 48,
    "qwen3.5-4b": 32,
    "qwen3.5-9b": 32,
    "qwen3.5-27b": 64,
    "qwen3.6-27b": 64,
    "qwen3.5-35b-a3b": 40,
}

PUBLISHED = {
    "architectures": ["DFlashDraftModel"],
    "block_size": 16,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "dtype": "bfloat16",
    "head_dim": 128,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "layer_types": ["full_attention"] * 5,
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 36,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "sliding_window": None,
    "vocab_size": 151936,
}


def write_config(folder: Path, **changes: object) -> Path:
    content = {name: value for name, value in (PUBLISHED | changes).items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", sorted(PRESETS.keys() - {"tiny"}))
def test_preset_captures_the_layers_of_the_formula(name: str) -> None:
    """Every published drafter reads the target layers that the paper's formula gives."""
    ids = preset(name).target_layer_ids
    assert ids == target_layer_ids(TARGET_LAYERS[name], len(ids))


def test_the_incident_preset_projects_25600_to_5120() -> None:
    """The 27B drafter has the sizes of the run that made this project necessary."""
    config = preset("Qwen3.5-27B")
    assert (config.context_size, config.hidden_size, config.max_length) == (25600, 5120, 4096)


def test_mixed_preset_needs_two_masks() -> None:
    """Four sliding layers of window 2048 and one full one need both kinds of mask."""
    config = preset("qwen3.6-27b")
    assert config.layer_kinds == ("sliding",) * 4 + ("full",)
    assert (config.mask_kinds, config.sliding_window) == (("full", "sliding"), 2048)


def test_unknown_preset_names_near_ones() -> None:
    """A misspelt preset is answered with the names that resemble it."""
    with pytest.raises(PlanError, match=r"no drafter preset 'qwen3-4'.*qwen3-4b") as caught:
        preset("qwen3-4")
    assert caught.value.field == "preset"


def test_formula_refuses_a_target_that_is_too_small() -> None:
    """Five layers cannot be captured from a target of six."""
    with pytest.raises(PlanError, match="5 layers cannot be captured from a target of 6"):
        target_layer_ids(6, 5)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"layer_kinds": ()}, "layer_kinds"),
        ({"target_layer_ids": (5, 3)}, "target_layer_ids"),
        ({"mask_token_id": 64}, "mask_token_id"),
        ({"block_size": 1}, "block_size"),
        ({"sliding_window": None}, "sliding_window"),
    ],
)
def test_config_names_the_field_that_cannot_work(
    small: DrafterConfig, change: dict[str, object], field: str
) -> None:
    """A config that could only fail later is refused when it is made."""
    with pytest.raises(PlanError) as caught:
        replace(small, **change)  # type: ignore[arg-type]
    assert caught.value.field == field


def test_published_config_equals_its_preset(tmp_path: Path) -> None:
    """The config.json of the Qwen3-4B drafter gives the preset of that name."""
    assert from_hf(write_config(tmp_path)) == preset("qwen3-4b")


def test_config_is_read_by_file_or_folder(tmp_path: Path) -> None:
    """Both the file and the folder that holds it are accepted."""
    folder = write_config(tmp_path)
    assert from_hf(folder / "config.json") == from_hf(str(folder))


def test_missing_layer_ids_follow_the_formula(tmp_path: Path) -> None:
    """Without listed ids the captured layers follow from the depth of the target."""
    write_config(tmp_path, dflash_config={"mask_token_id": 1})
    assert from_hf(tmp_path).target_layer_ids == (1, 9, 17, 25, 33)


def test_rope_theta_is_found_where_newer_files_put_it(tmp_path: Path) -> None:
    """Newer files nest the RoPE base under rope_parameters."""
    write_config(tmp_path, rope_theta="absent", rope_parameters={"rope_theta": 1e7})
    assert from_hf(tmp_path).rope_theta == 1e7


def test_sliding_layers_are_read(tmp_path: Path) -> None:
    """layer_types and sliding_window of a mixed drafter arrive in the config."""
    kinds = ["sliding_attention"] * 4 + ["full_attention"]
    write_config(tmp_path, layer_types=kinds, sliding_window=2048)
    config = from_hf(tmp_path)
    assert (config.layer_kinds[0], config.layer_kinds[4]) == ("sliding", "full")
    assert config.sliding_window == 2048


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_written_config_reads_back_equal(name: str, tmp_path: Path) -> None:
    """What a saved drafter says about itself loses nothing."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(to_hf(PRESETS[name])), encoding="utf-8")
    assert from_hf(file) == PRESETS[name]


def test_every_bad_field_of_a_file_is_named_at_once(tmp_path: Path) -> None:
    """All faults of a config.json are gathered before one error is raised."""
    write_config(tmp_path, hidden_size="absent", vocab_size="many", layer_types=["linear"])
    with pytest.raises(PlanError) as caught:
        from_hf(tmp_path)
    for name in ("hidden_size", "vocab_size", "layer_types"):
        assert f"'{name}'" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "problem"),
    [(None, "cannot be read"), ("{", "is not JSON"), ("[]", "holds no JSON object")],
)
def test_unusable_file_is_named(tmp_path: Path, content: str | None, problem: str) -> None:
    """A file that is absent, cut short or no object is an error that names it."""
    file = tmp_path / "config.json"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    with pytest.raises(PlanError, match=problem) as caught:
        from_hf(file)
    assert str(file) in str(caught.value)


def test_planning_does_not_import_torch() -> None:
    """What 'compilecache plan' needs of the model starts without torch."""
    code = (
        "import sys, dflash_model, dflash_model.config, dflash_model.workload as w; "
        "w.dflash(preset='qwen3-4b').specs([256], batch_sizes=[1], phases=['train']); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_door_lists_only_what_exists() -> None:
    """Every name of the package's __all__ resolves, and another is refused."""
    import dflash_model

    assert all(getattr(dflash_model, name) is not None for name in dflash_model.__all__)
    with pytest.raises(AttributeError, match="no attribute 'drafters'"):
        dflash_model.drafters  # noqa: B018
