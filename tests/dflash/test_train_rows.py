"""Rows of token ids: what is read, what is left out, and which fault is told of which row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from compilecache.errors import PlanError
from dflash_model.rows import TokenRows, TooLong, read_rows

Row = dict[str, object]


def write(path: Path, rows: list[Row]) -> Path:
    """JSONL or parquet, as the name says."""
    if path.suffix == ".parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        import pyarrow

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path, too_long: TooLong = "drop") -> TokenRows:
    return read_rows(path, vocab_size=64, max_length=6, too_long=too_long)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_rows_come_as_they_were_written(tmp_path: Path, name: str) -> None:
    """Ids in order; where there is no mask there is loss everywhere."""
    path = write(
        tmp_path / name,
        [{"input_ids": [1, 2, 63], "loss_mask": [0, 1, 1]}, {"input_ids": [0, 5]}],
    )
    rows = read(path)
    assert len(rows) == 2 and rows.dropped == {}
    assert torch.equal(rows.row(0)["input_ids"], torch.tensor([1, 2, 63]))
    assert rows.row(0)["loss_mask"].tolist() == [False, True, True]
    assert rows.row(1)["input_ids"].dtype == torch.int64
    assert rows.row(1)["loss_mask"].tolist() == [True, True]


def test_same_rows_have_the_same_digest(tmp_path: Path) -> None:
    """From either format; one other id makes another one."""
    rows: list[Row] = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}]
    first = read(write(tmp_path / "a.jsonl", rows)).digest
    assert read(write(tmp_path / "a.parquet", rows)).digest == first
    rows[1] = {"input_ids": [4, 6]}
    assert read(write(tmp_path / "b.jsonl", rows)).digest != first


def test_long_rows_are_dropped_cut_or_refused(tmp_path: Path) -> None:
    """As asked for, and counted."""
    path = write(tmp_path / "a.jsonl", [{"input_ids": [1] * 9}, {"input_ids": [2] * 6}])
    assert (len(read(path)), read(path).dropped) == (1, {"too_long": 1})
    cut = read(path, "truncate")
    assert (len(cut), cut.truncated, len(cut.row(0)["input_ids"])) == (2, 1, 6)
    with pytest.raises(PlanError, match=r"line 1: 9 tokens are more than the longest planned, 6"):
        read(path, "error")


def test_rows_without_an_anchor_are_dropped(tmp_path: Path) -> None:
    """No two neighbouring tokens with loss: nothing could be learned from the row."""
    masks = ([0, 0, 0], [1, 0, 1], [0, 1, 1])
    path = write(tmp_path / "a.jsonl", [{"input_ids": [1, 2, 3], "loss_mask": m} for m in masks])
    assert (len(read(path)), read(path).dropped) == (1, {"no_anchor": 2})


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ('{"input_ids": [1, 2', "line 2: is not JSON"),
        ("[1, 2]", "line 2: holds a list, not an object"),
        ('{"text": "hello"}', "line 2: has no 'input_ids', only text; text is not tokenized"),
        ('{"messages": []}', "line 2: has no 'input_ids', only messages"),
        ('{"input_ids": "hello"}', "line 2: 'input_ids' is no list of whole numbers"),
        ('{"input_ids": []}', "line 2: 'input_ids' is no list of whole numbers"),
        ('{"input_ids": [1, 2.5]}', "line 2: 'input_ids' is no list of whole numbers"),
        ('{"input_ids": [1, true]}', "line 2: 'input_ids' is no list of whole numbers"),
        ('{"input_ids": [1, 64]}', "line 2: token id 64 is outside the vocabulary of 64"),
        ('{"input_ids": [-1, 4]}', "line 2: token id -1 is outside the vocabulary of 64"),
        ('{"input_ids": [1, 2], "loss_mask": [1]}', "line 2: 'loss_mask' has 1 values for 2"),
        ('{"input_ids": [1, 2], "loss_mask": [1, 2]}', "line 2: 'loss_mask' holds other values"),
        ('{"input_ids": [1, 2], "loss_mask": "11"}', "line 2: 'loss_mask' is no list of 0 and 1"),
    ],
)
def test_malformed_row_is_named(tmp_path: Path, row: str, problem: str) -> None:
    """File, line, fault and what to do."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"input_ids": [1, 2]}\n' + row + "\n")
    with pytest.raises(PlanError) as caught:
        read(path)
    assert str(caught.value).startswith(f"'{path}' {problem}")
    assert caught.value.next_step and caught.value.field == "data"


def test_malformed_row_of_parquet_is_named(tmp_path: Path) -> None:
    """By its row, counted from 1; a missing list counts as malformed."""
    path = write(tmp_path / "a.parquet", [{"input_ids": [1, 2]}, {"input_ids": [1, 99]}])
    with pytest.raises(PlanError, match="row 2: token id 99"):
        read(path)
    with pytest.raises(PlanError, match="row 2: has no 'input_ids'"):
        read(write(tmp_path / "b.parquet", [{"input_ids": [1, 2]}, {"input_ids": None}]))


def test_file_that_is_none_is_refused(tmp_path: Path) -> None:
    """Missing, of another format, damaged, without the column, or without a row to train on."""
    damaged, empty = tmp_path / "damaged.parquet", tmp_path / "empty.jsonl"
    damaged.write_bytes(b"PAR1 no more")
    empty.write_text("\n")
    text = write(tmp_path / "text.parquet", [{"text": "hello"}])
    for path, problem in (
        (tmp_path / "none.jsonl", "is no file"),
        (tmp_path / "rows.csv", "has an unknown format '.csv'"),
        (damaged, "is not a parquet file"),
        (text, "has no column 'input_ids', only text"),
        (empty, "leaves no row to train on"),
    ):
        with pytest.raises(PlanError, match=problem):
            read(path)
