"""Anchors: the clean tokens that training blocks start from, redrawn for every step."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def sample_anchors(
    loss_mask: Tensor, count: int, *, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Draws N anchors a row, uniformly without replacement, from ``eligible_anchors``.

    ``loss_mask`` is ``[B, S]``. Returns ``anchors [B, N] int64`` and ``keep [B, N] bool``: each
    row's anchors ascend (unsorted ones visit almost every attention tile), then come pads at
    position 0 with ``keep`` False, so N never depends on the data. Does not wait for the device.
    """
    batch, length = loss_mask.shape
    device = loss_mask.device
    drawn_on = device if generator is None else generator.device
    scores = torch.rand(batch, length, generator=generator, device=drawn_on).to(device)
    scores = scores.masked_fill(~eligible_anchors(loss_mask), -1.0)
    best, positions = scores.topk(min(count, length), dim=1)
    # Pads sort behind every position; then they become 0, which is always a valid index.
    ordered = positions.masked_fill(best < 0, length).sort(dim=1).values
    ordered = F.pad(ordered, (0, count - ordered.shape[1]), value=length)
    keep = ordered < length
    return ordered.masked_fill(~keep, 0), keep


def eligible_anchors(loss_mask: Tensor) -> Tensor:
    """``[B, S] bool``: positions p ≤ S-2 with loss on p and on p + 1 (arXiv 2602.06036, A.1)."""
    learned = loss_mask.bool()
    return F.pad(learned[:, :-1] & learned[:, 1:], (0, 1), value=False)
