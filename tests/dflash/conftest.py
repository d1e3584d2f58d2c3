"""A small drafter, rows for it, and a compile cache that no other test has touched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from dflash_model.config import DrafterConfig
from dflash_model.model import Drafter

MakeRows = Callable[..., dict[str, torch.Tensor]]


@pytest.fixture
def small() -> DrafterConfig:
    """Sizes at which eager steps take milliseconds; grouped heads, one layer of each kind."""
    return DrafterConfig(
        hidden_size=32,
        intermediate_size=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        layer_kinds=("full", "sliding"),
        target_layer_ids=(1, 3),
        vocab_size=64,
        rope_theta=1e4,
        mask_token_id=63,
        block_size=4,
        sliding_window=6,
        max_length=256,
        dtype="float32",
    )


@pytest.fixture
def drafter(small: DrafterConfig) -> Drafter:
    """A random drafter of six anchors with weights large enough to make outputs differ."""
    made = Drafter.random(small, torch.device("cpu"), anchors=6)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.mul_(10.0)
    return made


@pytest.fixture
def make_rows(small: DrafterConfig) -> MakeRows:
    """Makes the keyword arguments of ``prepare``: B rows of S tokens with loss almost everywhere."""

    def make(batch: int, length: int, config: DrafterConfig = small) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(length)
        return {
            "input_ids": torch.randint(config.vocab_size, (batch, length), generator=generator),
            "hidden_states": torch.randn(batch, length, config.context_size, generator=generator),
            "loss_mask": torch.rand(batch, length, generator=generator) < 0.9,
        }

    return make


@pytest.fixture
def full_only(small: DrafterConfig) -> DrafterConfig:
    """The small sizes without sliding layers."""
    return replace(small, layer_kinds=("full", "full"), sliding_window=None)


@pytest.fixture
def fresh_compiler(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty Inductor cache and no compiled code, before and after."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", f"{tmp_path}/triton")
    torch.compiler.reset()
    yield
    torch.compiler.reset()
