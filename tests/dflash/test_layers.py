"""Attention, rotary positions and norms against references in float64 and against Qwen3."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from dflash_model.batch import block_mask_inputs
from dflash_model.layers import RMSNorm, _kernel_options, attend, rotate, rotation
from dflash_model.masks import (
    BlockLayout,
    BlockMasks,
    block_mask_of,
    dense_mask,
)

# Uncompiled flex says that it is slow; here it is the reference.
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def layout(*, count: int = 5, block: int = 8, length: int = 40) -> BlockLayout:
    """Two rows; the second has a pad and the first block of a context of nothing."""
    anchors = torch.stack([torch.arange(count) * 7 + 2, torch.arange(count) * 5])
    keep = torch.ones(2, count, dtype=torch.bool)
    keep[1, -1] = False
    return BlockLayout(length, block, anchors, keep)


def qkv(place: BlockLayout, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Six query heads over two key heads of 16 elements."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((6, place.q_len), (2, place.kv_len), (2, place.kv_len))
    q, k, v = (
        torch.randn(2, heads, length, 16, generator=generator, dtype=torch.float64).to(dtype)
        for heads, length in shapes
    )
    return q, k, v


def softmax_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Float64, written out; each group of query heads shares one key head."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(~mask, -math.inf)
    return torch.nan_to_num(scores.softmax(-1)) @ v


def block_mask(place: BlockLayout, window: int | None) -> BlockMask:
    inputs = block_mask_inputs(place, window)
    return block_mask_of(
        BlockMasks()(**inputs), inputs["mask_mod"], q_len=place.q_len, kv_len=place.kv_len
    )


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize(("count", "block"), [(5, 8), (8, 16), (9, 16)])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-12), (torch.bfloat16, 1e-2)])
def test_flex_equals_softmax_in_float64(
    window: int | None, count: int, block: int, dtype: torch.dtype, error: float
) -> None:
    """Flex over the BlockMask is dense softmax attention over the dense mask."""
    place = layout(count=count, block=block, length=72)
    q, k, v = qkv(place, dtype)
    expected = softmax_attention(q, k, v, dense_mask(place, window))
    out = attend(q, k, v, block_mask(place, window)).double()
    assert (out - expected).norm() <= error * expected.norm()


@pytest.mark.parametrize("window", [None, 6])
def test_dense_attention_equals_softmax_in_float64(window: int | None) -> None:
    """SDPA over the dense mask gives the same, so CPU training optimises the same loss."""
    place = layout()
    q, k, v = qkv(place, torch.float64)
    mask = dense_mask(place, window)
    torch.testing.assert_close(attend(q, k, v, mask), softmax_attention(q, k, v, mask))


@pytest.mark.parametrize("dense", [False, True])
def test_queries_that_see_nothing_give_zeros(dense: bool) -> None:
    """A padded block yields zeros, not NaN."""
    place = layout()
    q, k, v = qkv(place, torch.float32)
    out = attend(q, k, v, dense_mask(place) if dense else block_mask(place, None))
    assert torch.isfinite(out).all()
    assert (out[1, :, -place.block_size :] == 0).all()


def test_gradient_through_masked_rows_is_finite() -> None:
    """A row with every block padded sends no NaN back."""
    place = layout()
    place.keep[:] = False
    q, k, v = (x.requires_grad_() for x in qkv(place, torch.float32))
    grads = torch.autograd.grad(attend(q, k, v, dense_mask(place)).sum(), (q, k, v))
    assert all(torch.isfinite(grad).all() for grad in grads)


def test_kernel_options_are_accepted_by_this_torch() -> None:
    """The pinned kernel of SpecForge#773 is chosen only where flex knows the option."""
    place = layout()
    q, k, v = qkv(place, torch.float32)
    options = _kernel_options()
    flex_attention(
        q, k, v, block_mask=block_mask(place, None), enable_gqa=True, kernel_options=options
    )


def test_scores_depend_on_distance_alone() -> None:
    """Moving query and key together changes no score: positions are relative."""
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64)

    def score(query_at: int, key_at: int) -> float:
        places = torch.tensor([[query_at], [key_at]])
        cos, sin = rotation(places, 16, 1e4, torch.float64)
        left, right = rotate(q, (cos[:1], sin[:1])), rotate(k, (cos[1:], sin[1:]))
        return float((left * right).sum())

    assert score(9, 4) == pytest.approx(score(109, 104), rel=1e-4)
    assert score(9, 4) != pytest.approx(score(9, 5), rel=1e-3)


def test_norm_and_rotation_are_those_of_qwen3() -> None:
    """The published weights were trained with transformers' Qwen3 layers."""
    qwen3 = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
    x = torch.randn(2, 3, 5, 16)
    theirs = qwen3.Qwen3RMSNorm(16, eps=1e-6)
    torch.testing.assert_close(RMSNorm(16, 1e-6)(x), theirs(x))
    positions = torch.tensor([[0, 1, 2, 7, 3000]])
    cos, sin = rotation(positions, 16, 1e6, torch.float32)
    twice = (torch.cat([cos, cos], -1)[:, 0], torch.cat([sin, sin], -1)[:, 0])
    expected, _ = qwen3.apply_rotary_pos_emb(x, x, *twice)
    torch.testing.assert_close(rotate(x, (cos, sin)), expected)
