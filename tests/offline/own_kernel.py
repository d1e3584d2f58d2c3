"""Models with a Triton kernel of their own; needs Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import nn


@triton.jit
def double_kernel(x, out, count, block: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * block + tl.arange(0, block)
    kept = at < count
    tl.store(out + at, tl.load(x + at, mask=kept) * 2, mask=kept)


class Own(nn.Module):
    """Launches it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any shape → the same."""
        out = torch.empty_like(x)
        double_kernel[(triton.cdiv(x.numel(), 1024),)](x, out, x.numel(), block=1024)  # asks
        return out


@torch.library.triton_op("offline_tests::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    """Any shape → the same."""
    out = torch.empty_like(x)
    grid = (triton.cdiv(x.numel(), 1024),)
    torch.library.wrap_triton(double_kernel)[grid](x, out, x.numel(), block=1024)
    return out


class Registered(nn.Module):
    """Calls an operator that launches it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any shape → the same."""
        return double(x).sin()  # asks
