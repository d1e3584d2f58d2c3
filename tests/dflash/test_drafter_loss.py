"""Labels, weights, and the chunked loss against the plain one."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from dflash_model.loss import block_targets, slot_weights, weighted_loss


def targets(
    length: int, anchors: list[int], block: int, **changes: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels and weights of one row whose token at position p is 100 + p."""
    arguments = {
        "input_ids": 100 + torch.arange(length).unsqueeze(0),
        "loss_mask": torch.ones(1, length, dtype=torch.bool),
        "anchors": torch.tensor([anchors]),
        "keep": torch.ones(1, len(anchors), dtype=torch.bool),
    }
    labels, weights = block_targets(**(arguments | changes), block_size=block)
    return labels[0], weights[0]


@pytest.mark.parametrize(("block", "gamma"), [(16, 7), (10, 5), (8, 4)])
def test_weights_decay_with_the_published_gamma(block: int, gamma: int) -> None:
    """Slot k weighs exp(-(k-1)/γ), and slot 1 weighs one."""
    expected = [math.exp(-(k - 1) / gamma) for k in range(1, block)]
    assert slot_weights(block).tolist() == pytest.approx(expected)


def test_label_of_slot_k_is_the_token_at_anchor_plus_k() -> None:
    """Labels are not shifted by one, as those of a next-token model are (SpecForge#473)."""
    labels, weights = targets(12, [2, 5], 4)
    assert labels.tolist() == [[103, 104, 105], [106, 107, 108]]
    assert (weights > 0).all()


def test_slots_past_the_row_have_no_weight() -> None:
    """An anchor near the end predicts only what is there."""
    _, weights = targets(8, [5], 6)
    assert (weights > 0).tolist() == [[True, True, False, False, False]]


def test_slots_without_loss_have_no_weight() -> None:
    """The loss mask counts at the position of the label."""
    loss_mask = torch.tensor([[1, 1, 1, 0, 1, 0, 1, 1]])
    _, weights = targets(8, [1], 5, loss_mask=loss_mask)
    assert (weights > 0).tolist() == [[True, False, True, False]]


def test_pads_have_no_weight() -> None:
    """A block that is not kept teaches nothing."""
    _, weights = targets(12, [2, 0], 4, keep=torch.tensor([[True, False]]))
    assert weights.sum(1).tolist() == pytest.approx([float(slot_weights(4).sum()), 0.0])


def test_slots_of_another_document_have_no_weight() -> None:
    """A block of a packed row ends with its document."""
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]])
    _, weights = targets(8, [2], 5, document_ids=documents)
    assert (weights > 0).tolist() == [[True, False, False, False]]


def plain_loss(
    hidden: torch.Tensor, head: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    losses = F.cross_entropy((hidden @ head.T).movedim(-1, 1), labels, reduction="none")
    return (losses * weights).sum() / weights.sum()


@pytest.mark.parametrize("blocks_per_chunk", [1, 3, 7, 14, 128])
def test_chunked_loss_equals_the_plain_one(blocks_per_chunk: int) -> None:
    """Value and gradient do not depend on the chunk, nor on a ragged last one."""
    torch.manual_seed(0)
    hidden = torch.randn(2, 7, 3, 8, dtype=torch.float64, requires_grad=True)
    head = torch.randn(20, 8, dtype=torch.float64)
    labels, weights = torch.randint(20, (2, 7, 3)), torch.rand(2, 7, 3)
    expected = plain_loss(hidden, head, labels, weights)
    (expected_grad,) = torch.autograd.grad(expected, hidden)
    loss = weighted_loss(hidden, head, labels, weights, blocks_per_chunk=blocks_per_chunk)
    (grad,) = torch.autograd.grad(loss, hidden)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-5, atol=1e-8)


def test_loss_without_gradient_is_the_same() -> None:
    """Evaluation takes the path without checkpoints and gets the same number."""
    hidden, head = torch.randn(1, 5, 3, 8), torch.randn(20, 8)
    labels, weights = torch.randint(20, (1, 5, 3)), torch.rand(1, 5, 3)
    with torch.no_grad():
        alone = weighted_loss(hidden, head, labels, weights, blocks_per_chunk=2)
    graded = weighted_loss(hidden.requires_grad_(), head, labels, weights, blocks_per_chunk=2)
    torch.testing.assert_close(alone, graded.detach())


def test_loss_of_nothing_is_zero() -> None:
    """A batch without any weight gives zero and a zero gradient, not NaN."""
    hidden = torch.randn(1, 2, 3, 8, requires_grad=True)
    loss = weighted_loss(
        hidden, torch.randn(20, 8), torch.zeros(1, 2, 3, dtype=torch.long), torch.zeros(1, 2, 3)
    )
    (grad,) = torch.autograd.grad(loss, hidden)
    assert (loss.item(), grad.abs().sum().item()) == (0.0, 0.0)
