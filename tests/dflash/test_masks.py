"""The mask against its definition, against a picture, and against what others got wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from dflash_model.anchors import sample_anchors
from dflash_model.batch import block_mask_inputs
from dflash_model.masks import (
    TILE,
    BlockLayout,
    BlockMasks,
    block_mask_of,
    build_mask_mod,
    dense_mask,
    mask_kind,
    reference_mask,
)


def random_layout(
    length: int, count: int, block: int, *, batch: int = 2, packed: bool = False
) -> BlockLayout:
    generator = torch.Generator().manual_seed(length + count)
    loss = torch.rand(batch, length, generator=generator) < 0.8
    loss[0, length // 4 :] = False
    anchors, keep = sample_anchors(loss, count, generator=generator)
    starts = torch.rand(batch, length, generator=generator) < 4 / length
    return BlockLayout(length, block, anchors, keep, starts.long().cumsum(1) if packed else None)


def all_pads(length: int, count: int, block: int) -> BlockLayout:
    """Two rows, the first without any anchor."""
    layout = random_layout(length, count, block)
    keep = layout.keep & torch.tensor([[False], [True]])
    return replace(layout, keep=keep)


def make_block_mask(layout: BlockLayout, window: int | None = None) -> BlockMask:
    inputs = block_mask_inputs(layout, window)
    tiles = BlockMasks()(**inputs)
    return block_mask_of(tiles, inputs["mask_mod"], q_len=inputs["q_len"], kv_len=inputs["kv_len"])


def seen_tiles(mask: torch.Tensor) -> torch.Tensor:
    """``[B, 1, rows, columns] bool``: the 128 x 128 tiles in which any query sees any key."""
    rows, columns = (-(-size // TILE) for size in mask.shape[2:])
    padded = torch.zeros(*mask.shape[:2], rows * TILE, columns * TILE, dtype=torch.bool)
    padded[:, :, : mask.shape[2], : mask.shape[3]] = mask
    return padded.view(*mask.shape[:2], rows, TILE, columns, TILE).any(5).any(3)


LAYOUTS = {
    "one tile": random_layout(48, 8, 16),
    "queries past a tile": random_layout(40, 9, 16),
    "queries within a tile": random_layout(40, 3, 10),
    "fewer than 8 anchors": random_layout(40, 5, 8),
    "one anchor": random_layout(20, 1, 4),
    "every anchor of a row padded": all_pads(40, 5, 8),
    "just past a bucket": random_layout(257, 4, 4),
    "just short of a bucket": random_layout(255, 4, 4),
    "packed": random_layout(60, 6, 8, packed=True),
}


@pytest.mark.parametrize("window", [None, 1, 7, 1000])
@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_dense_mask_equals_the_loop_over_its_definition(name: str, window: int | None) -> None:
    """Vectorised and element by element, the mask is the same."""
    layout = LAYOUTS[name]
    assert torch.equal(dense_mask(layout, window), reference_mask(layout, window))


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_block_mask_visits_exactly_the_tiles_that_are_seen(name: str, window: int | None) -> None:
    """No tile with a visible key is skipped, no other is visited."""
    layout = LAYOUTS[name]
    tiles = make_block_mask(layout, window).to_dense().bool()
    assert torch.equal(tiles, seen_tiles(reference_mask(layout, window)))


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("name", LAYOUTS)
def test_block_mask_equals_the_one_torch_makes(name: str, window: int | None) -> None:
    """Counts, indices in their order, sizes and closure are those of create_block_mask."""
    layout = LAYOUTS[name]
    mine = make_block_mask(layout, window)
    mod = build_mask_mod(layout, window)
    theirs = create_block_mask(
        mod, layout.anchors.shape[0], None, layout.q_len, layout.kv_len, device="cpu"
    )
    assert mine.shape == theirs.shape
    assert mine.seq_lengths == theirs.seq_lengths
    for here, there in zip(mine.as_tuple(), theirs.as_tuple(), strict=True):
        if isinstance(there, torch.Tensor):
            assert here.dtype == there.dtype
            assert torch.equal(here, there)


def test_mask_drawn_by_hand() -> None:
    """Anchors 2 and 4 in six positions, blocks of two, the last block a pad."""
    anchors, keep = torch.tensor([[2, 4, 0]]), torch.tensor([[True, True, False]])
    picture = [
        "##....##....",
        "##....##....",
        "####....##..",
        "####....##..",
        "............",
        "............",
    ]
    expected = torch.tensor([[mark == "#" for mark in line] for line in picture])
    assert torch.equal(dense_mask(BlockLayout(6, 2, anchors, keep))[0, 0], expected)


def test_sliding_mask_drawn_by_hand() -> None:
    """A window of three tokens, measured from each slot, and causal inside the block."""
    anchors, keep = torch.tensor([[4]]), torch.tensor([[True]])
    picture = ["..##..#..", "...#..##.", "......###"]
    expected = torch.tensor([[mark == "#" for mark in line] for line in picture])
    assert torch.equal(dense_mask(BlockLayout(6, 3, anchors, keep), window=3)[0, 0], expected)


def test_packed_mask_drawn_by_hand() -> None:
    """The block of anchor 4 sees its own document, which began at 3, and not the one before."""
    layout = BlockLayout(
        6, 2, torch.tensor([[4]]), torch.tensor([[True]]), torch.tensor([[0, 0, 0, 1, 1, 1]])
    )
    assert dense_mask(layout)[0, 0].int().tolist() == [[0, 0, 0, 1, 0, 0, 1, 1]] * 2


def test_the_anchor_itself_is_not_context() -> None:
    """Context ends strictly before the anchor: the clean token is slot 0 of the block (SpecForge#470) (SpecForge#470)."""
    layout = LAYOUTS["one tile"]
    mask = dense_mask(layout)[:, 0]
    for row, slot in layout.keep.nonzero().tolist():
        query, anchor = slot * layout.block_size, int(layout.anchors[row, slot])
        assert not mask[row, query, anchor : layout.context].any()
        assert mask[row, query, :anchor].all()


def test_blocks_never_see_each_other() -> None:
    """The part of the mask over block keys is block diagonal (SpecForge#473)."""
    layout = LAYOUTS["queries past a tile"]
    own = dense_mask(layout)[:, 0, :, layout.context :]
    slots = torch.arange(layout.q_len) // layout.block_size
    same = slots[:, None] == slots[None, :]
    kept = layout.keep.repeat_interleave(layout.block_size, dim=1).unsqueeze(-1)
    assert torch.equal(own, same & kept)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("packed", [False, True])
def test_queries_past_the_last_block_see_nothing(window: int | None, packed: bool) -> None:
    """create_block_mask asks for rows up to a whole tile: no error, and nothing seen (SpecForge#511)."""
    layout = random_layout(40, 5, 8, packed=packed)
    row = torch.zeros((), dtype=torch.long)
    queries = torch.arange(layout.q_len, 2 * TILE).unsqueeze(1)
    keys = torch.arange(2 * TILE).unsqueeze(0)
    assert not build_mask_mod(layout, window)(row, row, queries, keys).any()


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("packed", [False, True])
def test_closures_hold_no_state_in_default_arguments(window: int | None, packed: bool) -> None:
    """Dynamo guards closure cells, not defaults (pytorch#178365)."""
    mod = build_mask_mod(random_layout(40, 5, 8, packed=packed), window)
    assert mod.__defaults__ is None and mod.__kwdefaults__ is None
    assert mod.__closure__


@pytest.mark.parametrize(
    ("window", "packed", "kind"),
    [
        (None, False, "full"),
        (5, False, "sliding"),
        (None, True, "packed"),
        (5, True, "packed_sliding"),
    ],
)
def test_kind_is_told_from_the_closure(window: int | None, packed: bool, kind: str) -> None:
    """A BlockMask's closure says which kind of graph it belongs to."""
    assert mask_kind(build_mask_mod(random_layout(40, 5, 8, packed=packed), window)) == kind


def test_block_mask_is_one_for_all_heads() -> None:
    """A mask a head would be an out-of-memory bug."""
    mask = make_block_mask(LAYOUTS["one tile"])
    assert mask.shape == (2, 1, 128, 176)
    assert mask.BLOCK_SIZE == (TILE, TILE)


def test_sorted_anchors_visit_a_sixth_of_the_tiles() -> None:
    """At S = 3072 and N = 512 sorted anchors visit 16% of the tiles, unsorted ones far more."""
    generator = torch.Generator().manual_seed(0)
    anchors, keep = sample_anchors(torch.ones(1, 3072), 512, generator=generator)
    layout = BlockLayout(3072, 16, anchors, keep)
    shuffled = replace(layout, anchors=anchors[:, torch.randperm(512, generator=generator)])
    share, worse = (seen_tiles(dense_mask(one)).float().mean().item() for one in (layout, shuffled))
    assert share == pytest.approx(0.16, abs=0.015)
    assert worse > 1.5 * share
