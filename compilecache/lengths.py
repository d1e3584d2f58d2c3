"""Lengths of the rows of a data set, read from JSONL, ``.npy`` or parquet, as counts.

Every fault names the file and the line or row, counted from 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from compilecache.documents import read_json
from compilecache.errors import PlanError

if TYPE_CHECKING:
    import pyarrow

KNOWN_FIELDS = ("length", "seq_len", "num_tokens", "n_tokens", "input_ids", "tokens")
"""Tried in this order when no field is named."""

_JSONL = {".jsonl", ".ndjson", ".json"}


@dataclass(frozen=True, slots=True)
class Lengths:
    """How many rows of each length a source holds."""

    source: str
    """What was read, as it was named."""
    counts: Mapping[int, int]
    """Rows of each length in tokens."""
    truncated: int = 0
    """Rows that were longer than the maximum and count as the maximum."""

    @property
    def rows(self) -> int:
        """Rows in all."""
        return sum(self.counts.values())

    @property
    def longest(self) -> int:
        """The longest row, in tokens."""
        return max(self.counts)


def read_lengths(
    source: str | Path,
    *,
    field: str | None = None,
    max_length: int | None = None,
    truncate: bool = False,
) -> Lengths:
    """The lengths of a JSONL, ``.npy`` or parquet file.

    ``field`` names a whole number, or a list whose length counts; by default the first of
    ``KNOWN_FIELDS`` that the first row has. Rows longer than ``max_length`` tokens are an error, or
    are cut to it with ``truncate``. Raises PlanError naming file and row.
    """
    path = Path(source)
    reader = _Reader(path, field)
    bounds = _Bounds(path, reader.unit, max_length, truncate)
    counts: Counter[int] = Counter()
    for row, length in reader:
        counts[bounds.checked(row, length)] += 1
    if not counts:
        raise PlanError(
            f"'{path}' holds no rows", next_step="Name a source with at least one row", field=field
        )
    return Lengths(str(source), dict(sorted(counts.items())), bounds.truncated)


def parse_sizes(text: str, *, field: str) -> tuple[int, ...]:
    """Whole numbers from "512,1024", in that order. Raises PlanError naming the bad one."""
    sizes = []
    for part in text.split(","):
        word = part.strip()
        if not word.isascii() or not word.isdigit() or int(word) < 1:
            raise PlanError(
                f"'{word}' in {field} '{text}' is no size",
                next_step="Write whole numbers of at least 1, separated by commas: 512,1024",
                field=field,
            )
        sizes.append(int(word))
    return tuple(dict.fromkeys(sizes))


class _Bounds:
    """Checks single lengths, and counts those that were cut."""

    def __init__(self, path: Path, unit: str, max_length: int | None, truncate: bool) -> None:
        self._path = path
        self._unit = unit
        self._max = max_length
        self._truncate = truncate
        self.truncated = 0

    def checked(self, row: int, length: object) -> int:
        if isinstance(length, bool) or not isinstance(length, int):
            self._refuse(row, f"the length is {length!r}, not a whole number", "Mend the row")
        if length < 1:
            self._refuse(row, f"the length is {length}", "Drop the row: it holds no token")
        if self._max is None or length <= self._max:
            return length
        if not self._truncate:
            self._refuse(
                row,
                f"{length} tokens are more than the maximum of {self._max}",
                "Pass --truncate to cut such rows, or drop them",
            )
        self.truncated += 1
        return self._max

    def _refuse(self, row: int, problem: str, next_step: str) -> NoReturn:
        raise PlanError(
            f"'{self._path}' {self._unit} {row}: {problem}", next_step=next_step, field="lengths"
        )


class _Reader:
    """Yields (row number, length) of a file, whatever its format."""

    def __init__(self, path: Path, field: str | None) -> None:
        self._path = path
        self._field = field
        formats = {".npy": self._npy, ".parquet": self._parquet}
        formats |= dict.fromkeys(_JSONL, self._jsonl)
        rows = formats.get(path.suffix.lower())
        if rows is None:
            raise PlanError(
                f"'{path}' has an unknown format '{path.suffix}'",
                next_step=f"Use one of {', '.join(sorted(formats))}, or list buckets: --seq-lens 512,1024",
                field="lengths",
            )
        if not path.is_file():
            raise PlanError(
                f"there is no file '{path}' to read lengths from",
                next_step="Check the path",
                field="lengths",
            )
        self._rows = rows
        self.unit = "line" if path.suffix.lower() in _JSONL else "row"

    def __iter__(self) -> Iterator[tuple[int, object]]:
        try:
            yield from self._rows()
        except OSError as error:
            raise PlanError(
                f"'{self._path}' cannot be read: {error.strerror or error}",
                next_step="Check the file and its permissions",
                field="lengths",
            ) from error

    def _jsonl(self) -> Iterator[tuple[int, object]]:
        with self._path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, self._length_in(self._parsed(line, number), number)

    def _parsed(self, line: bytes, number: int) -> object:
        try:
            parsed = read_json(line)
        except ValueError as error:
            raise PlanError(
                f"'{self._path}' line {number} is not JSON: {error}",
                next_step="Write one JSON object a line",
                field="lengths",
            ) from error
        return parsed

    def _length_in(self, row: object, number: int) -> object:
        if not isinstance(row, dict):
            return row
        value = row.get(self._named(row, f"line {number}"))
        return len(value) if isinstance(value, list) else value

    def _named(self, names: Iterable[str], where: str) -> str:
        """The field to read, settled by the first row. Raises PlanError when it is not there."""
        known = list(names)
        if self._field is None:
            self._field = next((name for name in KNOWN_FIELDS if name in known), None)
        if self._field is not None and self._field in known:
            return self._field
        wanted = self._field or " or ".join(KNOWN_FIELDS)
        near = get_close_matches(self._field or "length", known, n=1)
        hint = f"Did you mean --field {near[0]}" if near else "Name one with --field"
        raise PlanError(
            f"'{self._path}' {where} has no field {wanted}",
            next_step=f"{hint}; it has {', '.join(known) or 'none'}",
            field=self._field,
        )

    def _npy(self) -> Iterator[tuple[int, object]]:
        import numpy as np

        try:
            array = np.load(self._path, allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise PlanError(
                f"'{self._path}' is not a .npy file: {error}",
                next_step="Write it with numpy.save",
                field="lengths",
            ) from error
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise PlanError(
                f"'{self._path}' holds {array.dtype} of shape {list(array.shape)}",
                next_step="Save a one-dimensional integer array of lengths",
                field="lengths",
            )
        yield from enumerate(array.tolist(), 1)

    def _parquet(self) -> Iterator[tuple[int, object]]:
        try:
            import pyarrow.parquet as parquet
        except ImportError as error:
            raise PlanError(
                f"'{self._path}' needs pyarrow",
                next_step="pip install compilecache[parquet]",
                field="lengths",
            ) from error
        import pyarrow as pa

        try:
            with parquet.ParquetFile(self._path) as file:
                column = self._named(file.schema_arrow.names, "schema")
                first = 1
                for batch in file.iter_batches(columns=[column]):
                    yield from enumerate(_lengths_of(batch.column(0)), first)
                    first += batch.num_rows
        except pa.ArrowInvalid as error:
            raise PlanError(
                f"'{self._path}' is not a parquet file: {error}",
                next_step="Write it anew",
                field="lengths",
            ) from error


def _lengths_of(column: pyarrow.Array) -> list[object]:
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = column.type
    listed = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if listed or pa.types.is_fixed_size_list(kind):
        column = pc.list_value_length(column)
    values: list[object] = column.to_pylist()
    return values
