"""Rows of token ids to train on, from JSONL or parquet, checked before anything else starts.

A row is ``{"input_ids": [...], "loss_mask": [...]}``; without a mask there is loss everywhere. Every
fault names the file and the line or row, counted from 1.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn, cast

import torch
from torch import Tensor

from compilecache.errors import PlanError

TooLong = Literal["drop", "truncate", "error"]

_JSONL = {".jsonl", ".ndjson", ".json"}
_FIELDS = ("input_ids", "loss_mask")
_TOKENIZE = (
    "Tokenize the rows first, with the target's tokenizer, "
    'and write {"input_ids": [...], "loss_mask": [...]}'
)


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Every row that is trained on, end to end in two tensors."""

    ids: Tensor
    """``[tokens] int32``."""
    learned: Tensor
    """``[tokens] bool``: where there is loss."""
    starts: tuple[int, ...]
    """Where each row starts, and at the end where the last one ends."""
    dropped: Mapping[str, int]
    """Rows left out, by the reason: ``too_long`` or ``no_anchor``."""
    truncated: int = 0
    """Rows that were cut to the longest planned length."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    def row(self, index: int) -> dict[str, Tensor]:
        """``input_ids [length] int64``, ``loss_mask`` and ``attention_mask [length] bool``."""
        place = slice(self.starts[index], self.starts[index + 1])
        learned = self.learned[place]
        ids = self.ids[place].long()
        return {"input_ids": ids, "loss_mask": learned, "attention_mask": torch.ones_like(learned)}

    @property
    def digest(self) -> str:
        """16 hex digits over all rows, to know the same data again."""
        state = hashlib.sha256(repr(self.starts).encode())
        state.update(self.ids.numpy().tobytes())
        state.update(self.learned.numpy().tobytes())
        return state.hexdigest()[:16]


def read_rows(
    source: str | Path, *, vocab_size: int, max_length: int, too_long: TooLong = "drop"
) -> TokenRows:
    """The rows of a JSONL or parquet file that can be trained on.

    Rows without an anchor (loss on two neighbouring tokens) are left out and counted; what becomes
    of those longer than ``max_length`` tokens is for ``too_long`` to say. Raises PlanError naming
    file and row for a malformed row and for an id outside the vocabulary.
    """
    file = _RowFile(Path(source))
    kept = _Kept(file, vocab_size, max_length, too_long)
    for number, row in file:
        kept.add(number, row)
    return kept.rows()


class _RowFile:
    """Yields (row number, row) of a file, whatever its format."""

    def __init__(self, path: Path) -> None:
        self._path = path
        suffix = path.suffix.lower()
        if suffix not in (*_JSONL, ".parquet"):
            self.fault(f"has an unknown format '{path.suffix}'", "Use .jsonl or .parquet")
        if not path.is_file():
            self.fault("is no file", "Check the path")
        self._unit = "line" if suffix in _JSONL else "row"
        self._rows = self._jsonl if suffix in _JSONL else self._parquet

    def __iter__(self) -> Iterator[tuple[int, Mapping[object, object]]]:
        try:
            yield from self._rows()
        except OSError as error:
            self.fault(f"cannot be read: {error.strerror or error}", "Check its permissions")

    def refuse(self, number: int, problem: str, next_step: str) -> NoReturn:
        """Raises PlanError for one row."""
        self.fault(f"{self._unit} {number}: {problem}", next_step)

    def fault(self, problem: str, next_step: str) -> NoReturn:
        """Raises PlanError for the whole file."""
        raise PlanError(f"'{self._path}' {problem}", next_step=next_step, field="data")

    def _jsonl(self) -> Iterator[tuple[int, Mapping[object, object]]]:
        with self._path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, self._parsed(number, line)

    def _parsed(self, number: int, line: bytes) -> Mapping[object, object]:
        try:
            row: object = json.loads(line)
        except ValueError as error:
            self.refuse(number, f"is not JSON: {error}", "Write one JSON object a line")
        if not isinstance(row, dict):
            self.refuse(number, f"holds a {type(row).__name__}, not an object", _TOKENIZE)
        return row

    def _parquet(self) -> Iterator[tuple[int, Mapping[object, object]]]:
        try:
            import pyarrow as pa
            import pyarrow.parquet as parquet
        except ImportError:
            self.fault("needs pyarrow", "pip install compilecache[train]")
        try:
            with parquet.ParquetFile(self._path) as file:
                names = file.schema_arrow.names
                columns = [name for name in _FIELDS if name in names]
                if "input_ids" not in columns:
                    self.fault(f"has no column 'input_ids', only {', '.join(names)}", _TOKENIZE)
                first = 1
                for batch in file.iter_batches(batch_size=1024, columns=columns):
                    yield from enumerate(batch.to_pylist(), first)
                    first += batch.num_rows
        except pa.ArrowInvalid as error:
            self.fault(f"is not a parquet file: {error}", "Write it anew")


class _Kept:
    """Checks rows one by one and holds those that are trained on."""

    def __init__(self, file: _RowFile, vocab_size: int, max_length: int, too_long: TooLong) -> None:
        self._file = file
        self._vocab_size = vocab_size
        self._max_length = max_length
        self._too_long = too_long
        self._ids = array("i")
        self._learned = bytearray()
        self._starts = [0]
        self._dropped: Counter[str] = Counter()
        self._truncated = 0

    def add(self, number: int, row: Mapping[object, object]) -> None:
        """Takes the row in, or counts why not. Raises PlanError for one that is malformed."""
        ids = self._token_ids(number, row)
        learned = self._loss_mask(number, row, len(ids))
        if len(ids) > self._max_length:
            if self._too_long == "drop":
                self._dropped["too_long"] += 1
                return
            self._may_cut(number, len(ids))
            ids, learned = ids[: self._max_length], learned[: self._max_length]
        if b"\1\1" not in learned:
            self._dropped["no_anchor"] += 1
            return
        self._ids.extend(ids)
        self._learned += learned
        self._starts.append(len(self._ids))

    def rows(self) -> TokenRows:
        """What was taken in. Raises PlanError when that is nothing."""
        if len(self._starts) == 1:
            reasons = ", ".join(f"{count} {why}" for why, count in sorted(self._dropped.items()))
            self._file.fault(
                f"leaves no row to train on ({reasons or 'it is empty'})",
                "Give rows with loss on two neighbouring tokens, or plan longer shapes",
            )
        return TokenRows(
            torch.frombuffer(self._ids, dtype=torch.int32).clone(),
            torch.frombuffer(self._learned, dtype=torch.bool).clone(),
            tuple(self._starts),
            dict(self._dropped),
            self._truncated,
        )

    def _token_ids(self, number: int, row: Mapping[object, object]) -> list[int]:
        ids = row.get("input_ids")
        if ids is None:
            names = ", ".join(map(str, row)) or "nothing"
            problem = f"has no 'input_ids', only {names}; text is not tokenized here"
            self._file.refuse(number, problem, _TOKENIZE)
        if not isinstance(ids, list) or not ids or set(map(type, ids)) != {int}:
            self._file.refuse(number, "'input_ids' is no list of whole numbers", _TOKENIZE)
        for id_ in (min(ids), max(ids)):
            if not 0 <= id_ < self._vocab_size:
                self._file.refuse(
                    number,
                    f"token id {id_} is outside the vocabulary of {self._vocab_size}",
                    "Tokenize with the tokenizer of this very target",
                )
        return cast(list[int], ids)

    def _loss_mask(self, number: int, row: Mapping[object, object], length: int) -> bytes:
        mask = row.get("loss_mask")
        if mask is None:
            return b"\1" * length
        if not isinstance(mask, list) or not set(map(type, mask)) <= {int, bool, float}:
            self._file.refuse(number, "'loss_mask' is no list of 0 and 1", "Mend the row")
        if len(mask) != length:
            problem = f"'loss_mask' has {len(mask)} values for {length} tokens"
            self._file.refuse(number, problem, "Give one value for each token")
        if not set(mask) <= {0, 1}:
            self._file.refuse(number, "'loss_mask' holds other values than 0 and 1", "Mend the row")
        return bytes(map(int, mask))

    def _may_cut(self, number: int, length: int) -> None:
        if self._too_long == "error":
            self._file.refuse(
                number,
                f"{length} tokens are more than the longest planned, {self._max_length}",
                "Plan a longer shape, or pass --too-long drop or truncate",
            )
        self._truncated += 1
