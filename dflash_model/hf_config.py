"""Reads and writes the ``config.json`` of published drafters. Importing it does not import torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from pydantic import JsonValue

from compilecache.errors import PlanError
from dflash_model.config import DrafterConfig, LayerKind, target_layer_ids

_LAYER_TYPES: Mapping[str, LayerKind] = {
    "full_attention": "full",
    "sliding_attention": "sliding",
}
_DEFAULT_BLOCK_SIZE = 16
_DEFAULT_MAX_LENGTH = 3072


def from_hf(path: str | Path) -> DrafterConfig:
    """The config of a published drafter: its ``config.json``, or the folder that holds one.

    Raises PlanError naming every field that is missing or has the wrong type.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    return _HfFields(_read_json(file), str(file)).config()


def to_hf(config: DrafterConfig) -> dict[str, JsonValue]:
    """The content of a ``config.json`` that ``from_hf`` reads back as an equal config."""
    types = {kind: name for name, kind in _LAYER_TYPES.items()}
    return {
        "architectures": ["DFlashDraftModel"],
        "block_size": config.block_size,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
        },
        "dtype": config.dtype,
        "head_dim": config.head_dim,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "layer_types": [types[kind] for kind in config.layer_kinds],
        "max_length": config.max_length,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": len(config.layer_kinds),
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "sliding_window": config.sliding_window,
        "vocab_size": config.vocab_size,
    }


class _HfFields:
    """Typed access to a parsed ``config.json`` that gathers faults instead of raising each."""

    def __init__(self, data: Mapping[str, JsonValue], source: str) -> None:
        self._data = data
        self._source = source
        self._faults: list[str] = []
        dflash = data.get("dflash_config")
        self._dflash = dflash if isinstance(dflash, dict) else {}
        rope = data.get("rope_parameters")
        self._rope = rope if isinstance(rope, dict) else {}

    def config(self) -> DrafterConfig:
        heads = self._integer("num_attention_heads")
        hidden = self._integer("hidden_size")
        sizes = {
            "intermediate_size": self._integer("intermediate_size"),
            "num_kv_heads": self._integer("num_key_value_heads", heads),
            "head_dim": self._integer("head_dim", hidden // max(heads, 1)),
            "vocab_size": self._integer("vocab_size"),
            "mask_token_id": self._integer("mask_token_id"),
            "block_size": self._integer("block_size", _DEFAULT_BLOCK_SIZE),
            "max_length": self._integer("max_length", _DEFAULT_MAX_LENGTH),
        }
        layer_kinds = self._layer_kinds()
        window = self._integer("sliding_window") if "sliding" in layer_kinds else None
        theta, eps = self._number("rope_theta", 1e4), self._number("rms_norm_eps", 1e-6)
        layer_ids = self._target_layer_ids()
        dtype = str(self._data.get("dtype") or self._data.get("torch_dtype") or "bfloat16")
        self._raise_faults()
        return DrafterConfig(
            hidden_size=hidden,
            num_heads=heads,
            layer_kinds=layer_kinds,
            target_layer_ids=layer_ids,
            rope_theta=theta,
            sliding_window=window,
            rms_norm_eps=eps,
            dtype=dtype,
            **sizes,
        )

    def _find(self, name: str) -> JsonValue:
        for place in (self._dflash, self._data, self._rope):
            if place.get(name) is not None:
                return place[name]
        return None

    def _integer(self, name: str, default: int | None = None) -> int:
        value = self._find(name)
        value = default if value is None else value
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        self._faults.append(f"'{name}' is {'missing' if value is None else 'no whole number'}")
        return 0

    def _number(self, name: str, default: float) -> float:
        value = self._find(name)
        value = default if value is None else value
        if isinstance(value, int | float):
            return float(value)
        self._faults.append(f"'{name}' is no number")
        return default

    def _layer_kinds(self) -> tuple[LayerKind, ...]:
        count = self._integer("num_hidden_layers")
        types = self._find("layer_types")
        full: LayerKind = "full"
        if types is None:
            return (full,) * count
        named = [str(name) for name in types] if isinstance(types, list) else []
        if len(named) != count or not set(named) <= set(_LAYER_TYPES):
            names = " or ".join(_LAYER_TYPES)
            self._faults.append(f"'layer_types' does not name {count} layers, each {names}")
            return ()
        return tuple(_LAYER_TYPES[name] for name in named)

    def _target_layer_ids(self) -> tuple[int, ...]:
        ids = self._find("target_layer_ids")
        if isinstance(ids, list) and all(isinstance(i, int) for i in ids):
            return tuple(i for i in ids if isinstance(i, int))
        if ids is None and isinstance(total := self._find("num_target_layers"), int):
            return target_layer_ids(total, self._integer("num_hidden_layers"))
        self._faults.append("'target_layer_ids' is no list of whole numbers")
        return ()

    def _raise_faults(self) -> None:
        if self._faults:
            raise PlanError(
                f"{self._source}: " + "; ".join(self._faults),
                next_step="Point at the config.json of a DFlash drafter",
                field=self._faults[0].split("'")[1],
            )


def _read_json(file: Path) -> Mapping[str, JsonValue]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        problem = f"'{file}' cannot be read: {error.strerror or error}"
    except ValueError as error:
        problem = f"'{file}' is not JSON: {error}"
    else:
        if isinstance(data, dict):
            return data
        problem = f"'{file}' holds no JSON object"
    raise PlanError(
        problem, next_step="Point at the config.json of a DFlash drafter", field="config"
    )
