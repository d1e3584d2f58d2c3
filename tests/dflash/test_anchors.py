"""Anchors: which positions are drawn, how often, in which order, and what fills the rest."""

from __future__ import annotations

import torch

from dflash_model.anchors import eligible_anchors, sample_anchors


def learned(text: str) -> torch.Tensor:
    """``[1, S]`` from a picture: ``#`` has loss, ``.`` has none."""
    return torch.tensor([[mark == "#" for mark in text]])


def test_eligible_positions_have_loss_on_themselves_and_the_next() -> None:
    """The last position is never eligible, nor is one before a gap."""
    expected = learned("#.......#.")
    assert torch.equal(eligible_anchors(learned("##.#.#..##")), expected)


def test_every_eligible_position_is_drawn_when_there_is_room() -> None:
    """With more anchors than eligible positions each is drawn once, ascending, then come pads."""
    anchors, keep = sample_anchors(learned("###..##.##"), 8)
    assert anchors.tolist() == [[0, 1, 5, 8, 0, 0, 0, 0]]
    assert keep.tolist() == [[True] * 4 + [False] * 4]


def test_row_without_loss_is_all_pads() -> None:
    """A row that teaches nothing gives only pads, beside one that gives anchors."""
    anchors, keep = sample_anchors(torch.cat([learned("......"), learned("######")]), 3)
    assert (keep.sum(1).tolist(), anchors[0].tolist()) == ([0, 3], [0, 0, 0])


def test_more_anchors_than_positions_are_padded() -> None:
    """N stays N when the row is shorter."""
    anchors, keep = sample_anchors(learned("###"), 5)
    assert (anchors.shape, keep.sum().item()) == ((1, 5), 2)


def test_draw_is_without_replacement_and_sorted() -> None:
    """Kept anchors strictly ascend, in every row."""
    anchors, keep = sample_anchors(torch.ones(16, 64), 20)
    assert keep.all()
    assert (anchors.diff(dim=1) > 0).all()


def test_draw_is_uniform() -> None:
    """Over many rows every eligible position is drawn about equally often."""
    generator = torch.Generator().manual_seed(0)
    anchors, _ = sample_anchors(torch.ones(8000, 11), 5, generator=generator)
    counts = torch.bincount(anchors.flatten(), minlength=11)
    assert counts[10] == 0
    assert ((counts[:10] - 4000).abs() < 250).all()


def test_generator_decides_and_the_global_one_stays() -> None:
    """The same generator state gives the same anchors, and no global draw happens."""
    before = torch.random.get_rng_state()
    draws = [
        sample_anchors(torch.ones(2, 50), 8, generator=torch.Generator().manual_seed(3))[0]
        for _ in range(2)
    ]
    assert torch.equal(*draws)
    assert torch.equal(before, torch.random.get_rng_state())


def test_draws_differ_from_step_to_step() -> None:
    """Anchors are redrawn, not fixed."""
    generator = torch.Generator().manual_seed(0)
    first, second = (sample_anchors(torch.ones(1, 500), 8, generator=generator) for _ in range(2))
    assert not torch.equal(first[0], second[0])
