"""The layers of a drafter: Qwen3-style attention over context and block, SwiGLU, RMSNorm, RoPE.

Parameter names are those of the published checkpoints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from dflash_model.config import DrafterConfig, LayerKind

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import FlexKernelOptions

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines, each ``[B, 1, length, head_dim/2]``."""


def _kernel_options() -> FlexKernelOptions | None:
    """Pins the Triton kernel where this torch lets one choose.

    Left to itself flex sends fewer than 128 queries to a decoding kernel that may have no
    configuration at all (SpecForge#773).
    """
    known = getattr(getattr(flex, "FlexKernelOptions", None), "__annotations__", {})
    return {"BACKEND": "TRITON"} if "BACKEND" in known else None


_CUDA_KERNEL_OPTIONS = _kernel_options()


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | BlockMask) -> Tensor:
    """Grouped-query attention with scale ``head_dim ** -0.5``: flex for a BlockMask, else SDPA.

    ``q`` is ``[B, heads, Q, D]``, ``k`` and ``v`` ``[B, kv_heads, S+Q, D]``, a dense mask
    ``[B, 1, Q, S+Q] bool``. Queries that see nothing give zeros.
    """
    if isinstance(mask, Tensor):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    options = _CUDA_KERNEL_OPTIONS if q.device.type == "cuda" else None
    out = flex_attention(q, k, v, block_mask=mask, enable_gqa=True, kernel_options=options)
    assert isinstance(out, Tensor)
    return out


def rotation(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rotation:
    """The RoPE rotation of ``positions [B, length]``, computed in float32."""
    pairs = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    angles = positions[:, None, :, None].float() * theta ** (-pairs / head_dim)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, by: Rotation) -> Tensor:
    """Rotates ``x [B, heads, length, D]``, pairing element i with i + D/2 as Qwen3 does."""
    cos, sin = by
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last dimension, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """``x [..., size]``, same shape and dtype out."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Attention(nn.Module):
    """Queries from the blocks; keys and values from ``concat[context ; blocks]``."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        heads, kv_heads = config.num_heads * self.head_dim, config.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, heads, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_heads, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_heads, bias=False)
        self.o_proj = nn.Linear(heads, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(
        self,
        blocks: Tensor,
        context: Tensor,
        q_rotation: Rotation,
        k_rotation: Rotation,
        mask: Tensor | BlockMask,
    ) -> Tensor:
        """``blocks [B, Q, H]``, ``context [B, S, H]`` → ``[B, Q, H]``."""
        memory = torch.cat([context, blocks], dim=1)
        q = rotate(self.q_norm(self._heads(self.q_proj(blocks))), q_rotation)
        k = rotate(self.k_norm(self._heads(self.k_proj(memory))), k_rotation)
        v = self._heads(self.v_proj(memory))
        out: Tensor = self.o_proj(attend(q, k, v, mask).transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        """``x [B, length, heads·D]`` → ``[B, heads, length, D]``."""
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``x [..., H]``, same shape out."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """One pre-norm layer. ``input_layernorm`` acts on the blocks only; the context stays as it is."""

    def __init__(self, config: DrafterConfig, kind: LayerKind) -> None:
        super().__init__()
        self.kind = kind
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        blocks: Tensor,
        context: Tensor,
        q_rotation: Rotation,
        k_rotation: Rotation,
        mask: Tensor | BlockMask,
    ) -> Tensor:
        """``blocks [B, Q, H]``, ``context [B, S, H]`` → ``[B, Q, H]``."""
        attended = self.self_attn(
            self.input_layernorm(blocks), context, q_rotation, k_rotation, mask
        )
        blocks = blocks + attended
        out: Tensor = blocks + self.mlp(self.post_attention_layernorm(blocks))
        return out
