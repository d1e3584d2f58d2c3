"""Bucket edges: optimal, on the step, and with one knee."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compilecache.buckets import bucket_plan, knee_of, waste_curve
from compilecache.errors import PlanError

STEP = 4
COUNTS = st.dictionaries(st.integers(1, 40), st.integers(1, 9), min_size=1, max_size=12)


def least_waste(counts: dict[int, int], buckets: int) -> int:
    """By brute force, over every choice of at most so many multiples of the step."""
    last = -(-max(counts) // STEP) * STEP
    inner = range(STEP, last, STEP)
    return min(
        bucket_plan([*chosen, last], counts).padded_tokens
        for size in range(min(buckets - 1, len(inner)) + 1)
        for chosen in combinations(inner, size)
    )


@settings(deadline=None, max_examples=60)
@given(COUNTS)
def test_no_choice_of_edges_pads_less(counts: dict[int, int]) -> None:
    """Every point of the curve equals brute force over all multiples of the step."""
    curve = waste_curve(counts, step=STEP, max_buckets=4)
    for k, plan in enumerate(curve.plans, 1):
        assert plan.padded_tokens == least_waste(counts, k)


@settings(deadline=None)
@given(COUNTS, st.integers(1, 9))
def test_every_row_fits_and_every_edge_is_on_the_step(counts: dict[int, int], step: int) -> None:
    """Edges are multiples of the step, the last covers the longest row by less than a step."""
    for k, plan in enumerate(waste_curve(counts, step=step).plans, 1):
        assert len(plan.edges) == k
        assert all(edge % step == 0 for edge in plan.edges)
        assert 0 <= plan.edges[-1] - max(counts) < step
        assert sum(plan.rows) == sum(counts.values())
        assert plan == bucket_plan(plan.edges, counts)


@settings(deadline=None)
@given(COUNTS)
def test_waste_falls_ever_more_slowly(counts: dict[int, int]) -> None:
    """The curve falls strictly while more buckets are of use, and is convex."""
    waste = [plan.padded_tokens for plan in waste_curve(counts, step=STEP).plans]
    gains = [before - after for before, after in pairwise(waste)]
    assert all(gain > 0 for gain in gains)
    assert gains == sorted(gains, reverse=True)


def test_the_curve_ends_where_more_buckets_change_nothing() -> None:
    """Three distinct rounded lengths allow three buckets, whatever the maximum."""
    curve = waste_curve({100: 1, 128: 2, 200: 1, 900: 1}, step=128, max_buckets=16)
    assert [plan.edges for plan in curve.plans] == [(1024,), (256, 1024), (128, 256, 1024)]


@pytest.mark.parametrize(
    ("waste", "knee"),
    [([10], 1), ([10, 4], 1), ([100, 20, 15, 12, 10], 2), ([5, 5, 5], 1), ([90, 60, 30, 0], 1)],
)
def test_the_knee_is_furthest_below_the_chord(waste: list[int], knee: int) -> None:
    """Vertical distance decides and the smallest wins a tie; a straight line has its knee at 1."""
    assert knee_of(waste) == knee


def test_a_thousand_candidates_are_no_matter() -> None:
    """Lengths up to 128 Ki tokens with the default step, 24 buckets: the cubic search would hang."""
    counts = {length: 1 + length % 7 for length in range(1, 131_073, 3)}
    curve = waste_curve(counts, max_buckets=24)
    assert len(curve.plans) == 24


def test_the_padded_share_counts_padding_among_all_tokens() -> None:
    """One row of 96 in a bucket of 128 is a quarter padding."""
    assert bucket_plan([128], {96: 1}).padded_share == 0.25


@pytest.mark.parametrize(
    ("counts", "options", "field"),
    [
        ({}, {}, "lengths"),
        ({0: 1}, {}, "lengths"),
        ({-3: 1, 5: 1}, {}, "lengths"),
        ({5: 1}, {"step": 0}, "step"),
        ({5: 1}, {"max_buckets": 0}, "max_buckets"),
    ],
)
def test_counts_that_cannot_be_planned_are_refused(
    counts: dict[int, int], options: dict[str, int], field: str
) -> None:
    """The error names what is wrong in its field."""
    with pytest.raises(PlanError) as caught:
        waste_curve(counts, **options)
    assert caught.value.field == field


def test_more_buckets_than_the_curve_has_are_refused() -> None:
    """The error says how many there can be."""
    curve = waste_curve({100: 1, 300: 1})
    with pytest.raises(PlanError, match="7 buckets were asked for, the lengths allow 1 to 2"):
        curve.at(7)
    assert curve.at(2).edges == (128, 384)


def test_edges_that_do_not_cover_every_row_are_refused() -> None:
    """The error names the row that fits none."""
    with pytest.raises(PlanError, match="a row of 300 tokens fits no bucket"):
        bucket_plan([128, 256], {100: 1, 300: 1})
