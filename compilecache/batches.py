"""Pads batches to the shapes of a plan, so that no step brings a new one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from compilecache.errors import PlanError
from compilecache.shapes import InputSpec, ShapePlan

if TYPE_CHECKING:
    import torch

PAD_VALUES: Mapping[str, float] = {"labels": -100, "loss_mask": 0, "attention_mask": 0}
"""What fills padded positions of these fields by default; every other field gets 0."""

Row = Mapping[str, "torch.Tensor"]


class PlannedCollate:
    """A DataLoader's ``collate_fn``: rows of any length become one batch of a planned [B, S].

    Every field of a row with dimensions is a sequence along its first one and is padded on the
    right; fields without dimensions, and those named in ``whole``, are stacked as they are. Where
    the plan names batch sizes, rows of nothing but padding fill the batch up: ``loss_mask`` is 0
    and ``labels`` are -100 there, so a loss that uses either ignores them.
    """

    def __init__(
        self,
        plan: ShapePlan,
        *,
        pad_values: Mapping[str, float] | None = None,
        whole: Sequence[str] = (),
        function: str = "forward",
        seq_dim: str = "seq_len",
        batch_dim: str = "batch",
    ) -> None:
        """``seq_dim`` and ``batch_dim`` are the plan's names; only ``function``'s specs count.

        Raises PlanError when none of them has a size for ``seq_dim``.
        """
        self._pad_values = {**PAD_VALUES, **(pad_values or {})}
        self._whole = frozenset(whole)
        self._shapes = _planned_shapes(plan.specs, function, seq_dim, batch_dim)
        if not self._shapes:
            raise PlanError(
                f"no spec of '{function}' in the plan has a size for '{seq_dim}'",
                next_step=f"Plan with '{seq_dim}' among the dims, or name another seq_dim",
                field=seq_dim,
            )

    def __call__(self, rows: Sequence[Row]) -> dict[str, torch.Tensor]:
        """The batch: sequence fields ``[B, S, …]``, others ``[B, …]``.

        Raises PlanError for rows that disagree, and for a batch that fits no planned shape.
        """
        names = self._names(rows)
        lengths = [self._length(row, index) for index, row in enumerate(rows)]
        seq_len, batch = self.shape_of(len(rows), max(lengths))
        return {name: self._field(name, rows, seq_len, batch) for name in names}

    def shape_of(self, rows: int, length: int) -> tuple[int, int]:
        """The planned (S, B) of a batch: the shortest S that holds it, then the smallest B.

        Raises PlanError naming the nearest planned shape when none holds it.
        """
        for seq_len, batch in self._shapes:
            if length <= seq_len and (batch is None or rows <= batch):
                return seq_len, batch or rows
        near = min(
            self._shapes, key=lambda s: (abs((s[1] or rows) - rows), abs(s[0] - length), s[0])
        )
        raise PlanError(
            f"a batch of {rows} rows and {length} tokens fits no planned shape; "
            f"the nearest is {near[1] or 'any number of'} rows of {near[0]}",
            next_step="Truncate the rows, use a smaller batch, or plan this shape",
            field="specs",
        )

    def _names(self, rows: Sequence[Row]) -> list[str]:
        if not rows:
            raise PlanError("a batch has no rows", next_step="Drop empty batches", field="rows")
        names = list(rows[0])
        for index, row in enumerate(rows):
            if set(row) != set(names):
                odd = ", ".join(sorted(set(row) ^ set(names)))
                raise PlanError(
                    f"row {index} and row 0 differ in fields: {odd}",
                    next_step="Give every row of a batch the same fields",
                    field="rows",
                )
        return names

    def _length(self, row: Row, index: int) -> int:
        lengths = {
            name: value.shape[0] for name, value in row.items() if self._is_sequence(name, value)
        }
        if len(set(lengths.values())) == 1 and min(lengths.values()) > 0:
            return next(iter(lengths.values()))
        found = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise PlanError(
            f"row {index} has no one length of at least 1: {found or 'no sequence fields'}",
            next_step="Make its fields equally long, or name those that are no sequence in 'whole'",
            field="rows",
        )

    def _is_sequence(self, name: str, value: torch.Tensor) -> bool:
        return value.dim() > 0 and name not in self._whole

    def _field(self, name: str, rows: Sequence[Row], seq_len: int, batch: int) -> torch.Tensor:
        first = rows[0][name]
        tail = first.shape[1:] if self._is_sequence(name, first) else first.shape
        head = (batch, seq_len) if self._is_sequence(name, first) else (batch,)
        padded = first.new_full((*head, *tail), self._pad_values.get(name, 0))
        for index, row in enumerate(rows):
            value = row[name]
            if value.shape[len(head) - 1 :] != tail or value.dtype != first.dtype:
                raise PlanError(
                    f"field '{name}' of row {index} is {value.dtype} {list(value.shape)}, "
                    f"that of row 0 is {first.dtype} {list(first.shape)}",
                    next_step="Give a field one dtype and one size per position",
                    field=name,
                )
            target = padded[index, : value.shape[0]] if len(head) == 2 else padded[index]
            target.copy_(value)
        return padded


def _planned_shapes(
    specs: Sequence[InputSpec], function: str, seq_dim: str, batch_dim: str
) -> tuple[tuple[int, int | None], ...]:
    """(S, B) of every spec, shortest and smallest first; B is None where the plan leaves it open."""
    shapes = set()
    for spec in specs:
        seq_len, batch = spec.dims.get(seq_dim), spec.dims.get(batch_dim)
        if spec.function == function and isinstance(seq_len, int):
            shapes.add((seq_len, batch if isinstance(batch, int) else None))
    return tuple(sorted(shapes, key=lambda shape: (shape[0], shape[1] or 0)))
