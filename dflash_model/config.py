"""What defines a drafter: sizes, the layers of the target it reads, and its mask token.

Sizes are those of the published DFlash drafters (arXiv 2602.06036, appendix A.1, and the
``config.json`` files of their checkpoints). Importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from types import MappingProxyType
from typing import Literal, get_args

from compilecache.errors import PlanError

LayerKind = Literal["full", "sliding"]


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """Sizes of one drafter. Raises PlanError, naming the field, when they cannot work together."""

    hidden_size: int
    """H, shared with the target."""
    intermediate_size: int
    """Width of the SwiGLU."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key and value heads; divides ``num_heads``."""
    head_dim: int
    """Elements of one head; even, because RoPE rotates pairs."""
    layer_kinds: tuple[LayerKind, ...]
    """Attention of each drafter layer, first to last."""
    target_layer_ids: tuple[int, ...]
    """Captured target layers, T of them; HF ``hidden_states`` index = id + 1."""
    vocab_size: int
    """Of the target's embedding and ``lm_head``."""
    rope_theta: float
    """Base of the rotary embedding."""
    mask_token_id: int
    """Token of the slots to predict."""
    block_size: int = 16
    """b: the clean anchor and b - 1 slots to predict."""
    sliding_window: int | None = None
    """W, in tokens, for the sliding layers."""
    rms_norm_eps: float = 1e-6
    """Added to the mean square in every RMSNorm."""
    max_length: int = 3072
    """Longest training row, in tokens."""
    dtype: str = "bfloat16"
    """torch's name of the dtype of the weights."""

    def __post_init__(self) -> None:
        faults = list(_faults(self))
        if faults:
            raise PlanError(
                "drafter config: " + "; ".join(problem for _, problem in faults),
                next_step="Mend the fields named",
                field=faults[0][0],
            )

    @property
    def context_size(self) -> int:
        """T·H: elements of one captured position."""
        return len(self.target_layer_ids) * self.hidden_size

    @property
    def mask_kinds(self) -> tuple[LayerKind, ...]:
        """The masks one step needs, "full" before "sliding"."""
        return tuple(sorted(set(self.layer_kinds)))


def target_layer_ids(num_target_layers: int, count: int) -> tuple[int, ...]:
    """The captured layers of an L-layer target: ``round(1 + i·(L-4)/(T-1))``, i = 0..T-1.

    Raises PlanError when the target is too small for ``count`` different layers.
    """
    if count < 2 or num_target_layers < count + 3:
        raise PlanError(
            f"{count} layers cannot be captured from a target of {num_target_layers}",
            next_step="Capture at least 2, and at most three fewer than the target has",
            field="target_layer_ids",
        )
    step = (num_target_layers - 4) / (count - 1)
    return tuple(round(1 + i * step) for i in range(count))


def preset(name: str) -> DrafterConfig:
    """A published size by the name of its target. Raises PlanError with the names nearest to it."""
    found = PRESETS.get(name.lower())
    if found is None:
        near = get_close_matches(name.lower(), PRESETS, n=3, cutoff=0.5) or sorted(PRESETS)
        raise PlanError(
            f"no drafter preset '{name}'", next_step=f"Use one of {', '.join(near)}", field="preset"
        )
    return found


def _faults(config: DrafterConfig) -> list[tuple[str, str]]:
    """Every (field, problem) of a config."""
    sizes = ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim")
    faults = [
        (name, f"{name} is {value}, not positive")
        for name in (*sizes, "vocab_size", "max_length", "rope_theta", "rms_norm_eps")
        if (value := getattr(config, name)) <= 0
    ]
    if faults:
        return faults
    window, ids = config.sliding_window, config.target_layer_ids
    checks = [
        ("num_kv_heads", config.num_heads % config.num_kv_heads == 0, "does not divide num_heads"),
        ("head_dim", config.head_dim % 2 == 0, "is odd"),
        ("layer_kinds", bool(config.layer_kinds), "is empty"),
        ("layer_kinds", set(config.layer_kinds) <= set(get_args(LayerKind)), "has unknown kinds"),
        ("target_layer_ids", bool(ids) and min(ids) >= 0, "is empty or negative"),
        ("target_layer_ids", list(ids) == sorted(set(ids)), "is not ascending"),
        (
            "mask_token_id",
            0 <= config.mask_token_id < config.vocab_size,
            "is outside the vocabulary",
        ),
        ("block_size", config.block_size >= 2, "leaves no slot to predict"),
        ("sliding_window", "sliding" not in config.layer_kinds or (window or 0) > 0, "is missing"),
    ]
    return [(name, f"{name} {problem}") for name, holds, problem in checks if not holds]


_QWEN3_4B = DrafterConfig(
    hidden_size=2560,
    intermediate_size=9728,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    layer_kinds=("full",) * 5,
    target_layer_ids=(1, 9, 17, 25, 33),
    vocab_size=151936,
    rope_theta=1e6,
    mask_token_id=151669,
)
_QWEN3_8B = replace(_QWEN3_4B, hidden_size=4096, intermediate_size=12288)
_QWEN3_CODER_30B = replace(
    _QWEN3_4B,
    hidden_size=2048,
    intermediate_size=6144,
    num_kv_heads=4,
    layer_kinds=("full",) * 8,
    target_layer_ids=(1, 12, 23, 34, 45),
    rope_theta=1e7,
)
_QWEN3_5_4B = replace(
    _QWEN3_4B,
    target_layer_ids=(1, 8, 15, 22, 29),
    vocab_size=248320,
    rope_theta=1e7,
    mask_token_id=248070,
)
_QWEN3_5_27B = replace(
    _QWEN3_5_4B,
    hidden_size=5120,
    intermediate_size=17408,
    target_layer_ids=(1, 16, 31, 46, 61),
    max_length=4096,
)

PRESETS: Mapping[str, DrafterConfig] = MappingProxyType(
    {
        "tiny": DrafterConfig(
            hidden_size=256,
            intermediate_size=512,
            num_heads=4,
            num_kv_heads=2,
            head_dim=64,
            layer_kinds=("full",) * 2,
            target_layer_ids=(1, 3, 5),
            vocab_size=512,
            rope_theta=1e6,
            mask_token_id=511,
            max_length=1024,
            dtype="float32",
        ),
        "qwen3-4b": _QWEN3_4B,
        "qwen3-8b": _QWEN3_8B,
        "qwen3-coder-30b-a3b": _QWEN3_CODER_30B,
        "qwen3.5-4b": _QWEN3_5_4B,
        "qwen3.5-9b": replace(_QWEN3_5_4B, hidden_size=4096, intermediate_size=12288),
        "qwen3.5-27b": _QWEN3_5_27B,
        "qwen3.6-27b": replace(
            _QWEN3_5_27B, layer_kinds=("sliding",) * 4 + ("full",), sliding_window=2048
        ),
        "qwen3.5-35b-a3b": replace(
            _QWEN3_CODER_30B,
            target_layer_ids=(1, 10, 19, 28, 37),
            vocab_size=248320,
            mask_token_id=248070,
        ),
    }
)
"""Drafters by the name of their target; "tiny" is for tests and demonstrations."""
