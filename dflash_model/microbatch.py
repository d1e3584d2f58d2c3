"""Micro-batches: which rows, padded how, and which random numbers go with them.

Micro-batch ``i`` is a pure function of the data, the seed and ``i``, and belongs to drafter
``i mod D``; no timing of threads enters it. A pass over the data is shuffled anew by its number.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from compilecache.batches import PlannedCollate
from compilecache.errors import PlanError
from compilecache.shapes import ShapePlan
from dflash_model.rows import TokenRows

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Right-padded rows of one planned shape, on the CPU."""

    number: int
    """Which one, counted from 0 over the whole run."""
    input_ids: Tensor
    """``[B, S] int64``, 0 on pads."""
    loss_mask: Tensor
    """``[B, S] bool``, False on pads."""
    attention_mask: Tensor
    """``[B, S] bool``, False on pads; a row that only fills the batch up is all pads."""

    @property
    def tokens(self) -> int:
        """Tokens that are no pads."""
        return int(self.attention_mask.sum())


class MicroBatches:
    """The micro-batches of a run, by their number.

    One optimizer step takes ``drafters`` of them. Rows of a pass that do not fill a step are left
    out; since every pass is shuffled, they are others each time.
    """

    def __init__(
        self, rows: TokenRows, plan: ShapePlan, *, batch_size: int, drafters: int, seed: int
    ) -> None:
        """Raises PlanError when the rows do not fill one step, or no planned shape holds them."""
        self._rows = rows
        self._collate = PlannedCollate(training_plan(plan))
        self._collate.shape_of(batch_size, 1)
        self._batch_size = batch_size
        self._order = lru_cache(maxsize=2)(partial(_shuffled, len(rows), seed))
        self._in_a_pass = len(rows) // (batch_size * drafters) * drafters
        self.left_over = len(rows) - self._in_a_pass * batch_size
        """Rows that each pass leaves out."""
        self.steps_in_a_pass = self._in_a_pass // drafters
        """Optimizer steps of one pass over the data."""
        if self.steps_in_a_pass == 0:
            raise PlanError(
                f"{len(rows)} rows do not fill one step of {drafters} drafters with "
                f"{batch_size} rows each",
                next_step="Give more rows, or use fewer drafters or smaller batches",
                field="data",
            )

    def at(self, number: int) -> MicroBatch:
        """Micro-batch ``number``, at whatever time and from whatever thread it is asked for."""
        turn, place = divmod(number, self._in_a_pass)
        chosen = self._order(turn)[place * self._batch_size : (place + 1) * self._batch_size]
        fields = self._collate([self._rows.row(index) for index in chosen])
        return MicroBatch(number=number, **fields)


def training_plan(plan: ShapePlan) -> ShapePlan:
    """The part of a plan that training runs. Raises PlanError when there is none."""
    specs = tuple(spec for spec in plan.specs if spec.phase in ("train", "both"))
    if not any(spec.function == "forward" and spec.phase == "train" for spec in specs):
        raise PlanError(
            "the plan has no spec of 'forward' for training",
            next_step="Plan with --phase train",
            field="specs",
        )
    return plan.model_copy(update={"specs": specs})


def longest_row(plan: ShapePlan, batch_size: int) -> int:
    """Tokens of the longest planned training shape for that many rows. Raises PlanError."""
    specs = [spec for spec in training_plan(plan).specs if spec.function == "forward"]
    fitting = [spec.size("seq_len") for spec in specs if spec.size("batch") >= batch_size]
    if not fitting:
        raise PlanError(
            f"the plan has no shape for batches of {batch_size} rows",
            next_step="Plan with that --batch-size, or train with a smaller one",
            field="batch",
        )
    return max(fitting)


def random_numbers(seed: int, number: int, device: torch.device) -> torch.Generator:
    """What the anchors of micro-batch ``number`` are drawn from; another one on a GPU than on a CPU."""
    return _generator(f"anchors {seed} {number}", device)


def _shuffled(count: int, seed: int, turn: int) -> list[int]:
    order: list[int] = torch.randperm(
        count, generator=_generator(f"rows {seed} {turn}", _CPU)
    ).tolist()
    return order


def _generator(name: str, device: torch.device) -> torch.Generator:
    digest = hashlib.sha256(name.encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:4], "big"))
