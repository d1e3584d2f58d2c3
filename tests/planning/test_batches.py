"""Collating rows to planned shapes."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compilecache.batches import PlannedCollate
from compilecache.errors import PlanError
from compilecache.shapes import InputSpec, ShapePlan


def plan(*shapes: tuple[int, int]) -> ShapePlan:
    """A plan with these (seq_len, batch)."""
    return ShapePlan(specs=tuple(InputSpec(dims={"seq_len": s, "batch": b}) for s, b in shapes))


def row(length: int) -> dict[str, torch.Tensor]:
    """One row of every kind of field."""
    return {
        "input_ids": torch.arange(1, length + 1),
        "hidden": torch.ones(length, 3, dtype=torch.bfloat16),
        "labels": torch.arange(length),
        "loss_mask": torch.ones(length, dtype=torch.bool),
        "weight": torch.tensor(2.0),
    }


def test_rows_are_padded_on_the_right_and_the_batch_is_filled_up() -> None:
    """Two rows of 3 and 5 in a planned batch of four rows of 8."""
    batch = PlannedCollate(plan((8, 4), (16, 4)), pad_values={"input_ids": 9})([row(3), row(5)])
    assert batch["input_ids"].tolist() == [
        [1, 2, 3, 9, 9, 9, 9, 9],
        [1, 2, 3, 4, 5, 9, 9, 9],
        [9] * 8,
        [9] * 8,
    ]
    assert batch["hidden"].shape == (4, 8, 3)
    assert batch["hidden"].dtype == torch.bfloat16
    assert batch["labels"][0].tolist() == [0, 1, 2, -100, -100, -100, -100, -100]
    assert batch["loss_mask"].sum(dim=1).tolist() == [3, 5, 0, 0]
    assert batch["weight"].tolist() == [2.0, 2.0, 0.0, 0.0]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 32), min_size=1, max_size=4))
def test_every_batch_that_fits_gets_a_planned_shape(lengths: list[int]) -> None:
    """No other shape comes out, and no real token is lost."""
    shapes = ((8, 1), (8, 2), (16, 4), (32, 4))
    batch = PlannedCollate(plan(*shapes))([row(length) for length in lengths])
    assert tuple(reversed(batch["input_ids"].shape)) in shapes
    assert int(batch["loss_mask"].sum()) == sum(lengths)


def test_a_longer_bucket_is_taken_where_only_it_holds_the_batch() -> None:
    """Three rows of 4 tokens fit no batch of 8 tokens, but one of 16."""
    collate = PlannedCollate(plan((8, 2), (16, 4)))
    assert collate.shape_of(3, 4) == (16, 4)
    assert collate.shape_of(2, 4) == (8, 2)


def test_a_plan_without_batch_sizes_leaves_the_batch_alone() -> None:
    """Only the sequence is padded."""
    collate = PlannedCollate(ShapePlan(specs=(InputSpec(dims={"seq_len": 8}),)))
    assert collate([row(2)] * 3)["input_ids"].shape == (3, 8)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([row(17)], "1 rows and 17 tokens fits no planned shape; the nearest is 2 rows of 16"),
        ([row(3)] * 3, "3 rows and 3 tokens fits no planned shape; the nearest is 2 rows of 8"),
        ([], "a batch has no rows"),
        ([row(3), {"labels": torch.ones(3)}], "row 1 and row 0 differ in fields: hidden"),
        ([row(3) | {"labels": torch.ones(4)}], "row 0 has no one length.*labels 4"),
        ([row(0)], "row 0 has no one length"),
        ([{"weight": torch.tensor(1.0)}], "row 0 has no one length of at least 1: no sequence"),
        ([row(3), row(3) | {"hidden": torch.ones(3, 4)}], "field 'hidden' of row 1 is"),
        ([row(3), row(3) | {"labels": torch.ones(3)}], "field 'labels' of row 1 is torch.float32"),
    ],
)
def test_what_fits_no_planned_shape_is_refused_at_once(
    rows: list[dict[str, torch.Tensor]], message: str
) -> None:
    """The error names the row or the nearest planned shape."""
    with pytest.raises(PlanError, match=message):
        PlannedCollate(plan((8, 2), (16, 2)))(rows)


def test_whole_fields_are_stacked_as_they_are() -> None:
    """A vector per row that is no sequence keeps its size."""
    rows = [row(3) | {"image": torch.ones(2, 2)}]
    assert PlannedCollate(plan((8, 2)), whole=["image"])(rows)["image"].shape == (2, 2, 2)


def test_a_plan_without_the_dimension_is_refused() -> None:
    """At construction, before any batch is made."""
    with pytest.raises(PlanError, match="no spec of 'forward' in the plan has a size for 'tokens'"):
        PlannedCollate(plan((8, 2)), seq_dim="tokens")


def test_it_serves_as_collate_fn_of_a_dataloader() -> None:
    """Also after pickling, as worker processes need."""
    collate = pickle.loads(pickle.dumps(PlannedCollate(plan((8, 2), (16, 2)))))
    rows = [row(length) for length in (3, 9, 5)]
    loader = torch.utils.data.DataLoader(rows, batch_size=2, collate_fn=collate)
    assert [tuple(batch["labels"].shape) for batch in loader] == [(2, 16), (2, 8)]
