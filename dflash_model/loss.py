"""The training loss: which token each slot should predict, how much it counts, and the sum of it.

Full logits of one row would be 2.5 to 4 GB, so ``lm_head`` and cross entropy run in chunks of
blocks and are computed again in the backward pass (arXiv 2602.06036, appendix A.1).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

BLOCKS_PER_CHUNK = 128
_GAMMAS = {16: 7.0, 10: 5.0, 8: 4.0}
_SMALLEST_WEIGHT = 1e-8


def slot_weights(block_size: int, device: torch.device | None = None) -> Tensor:
    """``w_k = exp(-(k-1)/γ)`` of slots 1..b-1 as ``[b-1] float32``.

    γ is 7, 5 or 4 for b = 16, 10 or 8, and b/2 for sizes without a published value.
    """
    gamma = _GAMMAS.get(block_size, block_size / 2)
    slots = torch.arange(1, block_size, device=device, dtype=torch.float32)
    return torch.exp(-(slots - 1) / gamma)


def block_targets(
    input_ids: Tensor,
    loss_mask: Tensor,
    anchors: Tensor,
    keep: Tensor,
    block_size: int,
    document_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Labels ``[B, N, b-1] int64`` and weights ``[B, N, b-1] float32`` of slots 1..b-1.

    The label of slot k is the token *at* anchor + k, not the one after it. Slots of pads, past the
    row, without loss or in another document weigh 0. Slot 0 is the clean anchor: it has no loss.

    ``input_ids``, ``loss_mask`` and ``document_ids`` are ``[B, S]``; ``anchors``, ``keep`` ``[B, N]``.
    """
    length = input_ids.shape[1]
    positions = anchors.unsqueeze(-1) + torch.arange(1, block_size, device=anchors.device)
    inside = keep.unsqueeze(-1) & (positions < length)
    at = positions.clamp(max=length - 1)
    learned = inside & _pick(loss_mask, at).bool()
    if document_ids is not None:
        learned = learned & (
            _pick(document_ids, at) == document_ids.gather(1, anchors).unsqueeze(-1)
        )
    return _pick(input_ids, at), slot_weights(block_size, anchors.device) * learned


def _pick(values: Tensor, at: Tensor) -> Tensor:
    """``values [B, S]`` at the positions ``at [B, N, K]``."""
    return values.gather(1, at.flatten(1)).view(at.shape)


def weighted_loss(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    weights: Tensor,
    *,
    blocks_per_chunk: int = BLOCKS_PER_CHUNK,
) -> Tensor:
    """``Σ w·CE / Σ w`` over all slots, a float32 scalar; 0 when no slot has weight.

    ``hidden`` is ``[B, N, b-1, H]``, ``head`` the ``lm_head`` weight ``[V, H]``, ``labels`` and
    ``weights`` ``[B, N, b-1]``. The last chunk may hold fewer blocks than the others.
    """
    chunks = zip(
        torch.split(hidden.flatten(0, 1), blocks_per_chunk),
        torch.split(labels.flatten(0, 1), blocks_per_chunk),
        torch.split(weights.flatten(0, 1), blocks_per_chunk),
        strict=True,
    )
    total = weights.new_zeros(())
    for part in chunks:
        total = total + _chunk_loss(head, *part)
    return total / weights.sum().clamp_min(_SMALLEST_WEIGHT)


def _chunk_loss(head: Tensor, hidden: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return _weighted_sum(head, hidden, labels, weights)
    total = checkpoint(_weighted_sum, head, hidden, labels, weights, use_reentrant=False)
    assert isinstance(total, Tensor)
    return total


def _weighted_sum(head: Tensor, hidden: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    logits = F.linear(hidden.flatten(0, 1), head).float()
    losses = F.cross_entropy(logits, labels.flatten(), reduction="none")
    return (losses * weights.flatten()).sum()
