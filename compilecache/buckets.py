"""Bucket edges that pad the fewest tokens: exact dynamic programming over the observed lengths.

A row of length l is padded to the smallest edge that holds it. Edges are multiples of a step, the
last one covers the longest row. An optimal edge is always some row's length rounded up to the step,
so only those are candidates.

The cost of one bucket over the candidates i+1..j is ``edge_j * rows(i, j] - tokens(i, j]``. It
satisfies the quadrangle inequality, which gives two things: each row of the table is filled by
divide and conquer in O(M log M) for M candidates, and the least waste is convex in the number of
buckets, so that its curve has one knee.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from compilecache.errors import PlanError

DEFAULT_STEP = 128
DEFAULT_MAX_BUCKETS = 16


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """Bucket edges and what they cost over the observed rows."""

    edges: tuple[int, ...]
    """Padded lengths in tokens, ascending."""
    rows: tuple[int, ...]
    """Observed rows in each bucket."""
    real_tokens: int
    """Tokens of all rows before padding."""
    padded_tokens: int
    """Tokens that padding adds."""

    @property
    def padded_share(self) -> float:
        """Padding as a share of all tokens computed, 0 to 1."""
        return self.padded_tokens / (self.real_tokens + self.padded_tokens)


@dataclass(frozen=True, slots=True)
class WasteCurve:
    """The least-waste bucket plan for every number of buckets from 1 on."""

    step: int
    """Edges are multiples of this, in tokens."""
    plans: tuple[BucketPlan, ...]
    """``plans[k - 1]`` has k buckets."""
    knee: int
    """The number of buckets beyond which one more buys little; see ``knee_of``."""

    def at(self, buckets: int) -> BucketPlan:
        """The plan with so many buckets. Raises PlanError outside the curve."""
        if 1 <= buckets <= len(self.plans):
            return self.plans[buckets - 1]
        raise PlanError(
            f"{buckets} buckets were asked for, the lengths allow 1 to {len(self.plans)}",
            next_step="Ask for fewer, or use a smaller --step or a larger --max-buckets",
            field="buckets",
        )


def waste_curve(
    counts: Mapping[int, int],
    *,
    step: int = DEFAULT_STEP,
    max_buckets: int = DEFAULT_MAX_BUCKETS,
) -> WasteCurve:
    """The best buckets for 1..max_buckets, from ``counts``: rows of each length in tokens.

    The curve ends earlier where more buckets change nothing. Raises PlanError for an empty count, a
    length below 1, or a step or maximum below 1.
    """
    _check(counts, step, max_buckets)
    table = _Table(counts, step)
    plans = tuple(
        bucket_plan(edges, counts) for edges in table.solve(min(max_buckets, len(table.edges)))
    )
    return WasteCurve(step, plans, knee_of([plan.padded_tokens for plan in plans]))


def bucket_plan(edges: Sequence[int], counts: Mapping[int, int]) -> BucketPlan:
    """What given edges cost over the rows. Raises PlanError when a row fits none."""
    ascending = tuple(sorted(set(edges)))
    rows = [0] * len(ascending)
    padded = 0
    for length, count in counts.items():
        index = bisect_left(ascending, length)
        if index == len(ascending):
            raise PlanError(
                f"a row of {length} tokens fits no bucket (largest {max(ascending, default=0)})",
                next_step="Add a larger bucket, or truncate with --max-length and --truncate",
                field="lengths",
            )
        rows[index] += count
        padded += (ascending[index] - length) * count
    real = sum(length * count for length, count in counts.items())
    return BucketPlan(ascending, tuple(rows), real, padded)


def knee_of(waste: Sequence[int]) -> int:
    """The knee of ``waste[k - 1]``: where the curve lies furthest below its chord, counted from 1.

    The chord joins the first and the last point; distance is vertical, and the smallest k wins a
    tie. On a convex falling curve this is the rule of Kneedle (Satopää et al. 2011) without
    smoothing. A flat curve has its knee at 1.
    """
    last = len(waste) - 1
    if last < 1:
        return 1
    # In integers (times `last`), so that ties are exact.
    gaps = [(waste[0] - value) * last - (waste[0] - waste[-1]) * k for k, value in enumerate(waste)]
    return gaps.index(max(gaps)) + 1


def _check(counts: Mapping[int, int], step: int, max_buckets: int) -> None:
    for name, value in (("step", step), ("max_buckets", max_buckets)):
        if value < 1:
            raise PlanError(
                f"{name} is {value}", next_step="Give a whole number of at least 1", field=name
            )
    if not counts:
        raise PlanError(
            "there are no lengths to plan from",
            next_step="Name a source that holds at least one row",
            field="lengths",
        )
    if min(counts) < 1:
        raise PlanError(
            f"a length is {min(counts)}",
            next_step="Drop empty rows from the source",
            field="lengths",
        )


class _Table:
    """The dynamic programme: ``best[j]`` is the least waste of candidates 1..j with k buckets."""

    def __init__(self, counts: Mapping[int, int], step: int) -> None:
        rows: dict[int, int] = {}
        tokens: dict[int, int] = {}
        for length, count in counts.items():
            edge = -(-length // step) * step
            rows[edge] = rows.get(edge, 0) + count
            tokens[edge] = tokens.get(edge, 0) + length * count
        self.edges = sorted(rows)
        self._rows = [0, *accumulate(rows[edge] for edge in self.edges)]
        self._tokens = [0, *accumulate(tokens[edge] for edge in self.edges)]

    def solve(self, buckets: int) -> list[tuple[int, ...]]:
        """The best edges for 1..buckets; needs ``buckets <= len(edges)``."""
        size = len(self.edges)
        best = [0, *(self._cost(0, j) for j in range(1, size + 1))]
        cuts: list[list[int]] = [[0] * (size + 1)]
        solved = [self._trace(cuts)]
        for k in range(2, buckets + 1):
            best, cut = self._extend(best, k)
            cuts.append(cut)
            solved.append(self._trace(cuts))
        return solved

    def _cost(self, i: int, j: int) -> int:
        rows = self._rows[j] - self._rows[i]
        return self.edges[j - 1] * rows - (self._tokens[j] - self._tokens[i])

    def _extend(self, best: list[int], k: int) -> tuple[list[int], list[int]]:
        """One more bucket: least waste and last cut for every j >= k, by divide and conquer."""
        size = len(self.edges)
        extended, cut = [0] * (size + 1), [0] * (size + 1)
        # (first j, last j, first cut, last cut); the best cut never falls as j grows
        spans = [(k, size, k - 1, size - 1)]
        while spans:
            low, high, first, last = spans.pop()
            if low > high:
                continue
            j = (low + high) // 2
            extended[j], cut[j] = min(
                (best[i] + self._cost(i, j), i) for i in range(first, min(last, j - 1) + 1)
            )
            spans.append((low, j - 1, first, cut[j]))
            spans.append((j + 1, high, cut[j], last))
        return extended, cut

    def _trace(self, cuts: list[list[int]]) -> tuple[int, ...]:
        j = len(self.edges)
        chosen = []
        for cut in reversed(cuts):
            chosen.append(self.edges[j - 1])
            j = cut[j]
        return tuple(reversed(chosen))
