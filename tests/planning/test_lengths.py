"""Reading lengths, and naming the file and row of whatever is wrong with them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from compilecache.errors import PlanError
from compilecache.lengths import parse_sizes, read_lengths


def jsonl(path: Path, *rows: object) -> Path:
    """A JSONL file with these rows."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_jsonl_counts_numbers_and_lists(tmp_path: Path) -> None:
    """A number is a length; a list counts; blank lines are skipped; bare numbers will do."""
    numbers = jsonl(tmp_path / "a.jsonl", {"id": 7, "length": 5}, {"length": 5}, {"length": 9})
    lists = jsonl(tmp_path / "b.ndjson", {"input_ids": [1, 2, 3]}, {"input_ids": [1]})
    bare = tmp_path / "c.jsonl"
    bare.write_text("4\n\n6\n")
    assert read_lengths(numbers).counts == {5: 2, 9: 1}
    assert read_lengths(lists).counts == {1: 1, 3: 1}
    assert read_lengths(bare).counts == {4: 1, 6: 1}
    assert (read_lengths(numbers).rows, read_lengths(numbers).longest) == (3, 9)


def test_a_named_field_is_read_instead_of_a_known_one(tmp_path: Path) -> None:
    """--field wins over the names that are tried by default."""
    path = jsonl(tmp_path / "a.jsonl", {"length": 5, "target_ids": [1, 2]})
    assert read_lengths(path, field="target_ids").counts == {2: 1}


def test_npy_and_parquet_agree_with_jsonl(tmp_path: Path) -> None:
    """The same lengths in every format, lists in parquet included."""
    lengths = [3, 1, 3]
    np.save(tmp_path / "a.npy", np.array(lengths, dtype=np.uint16))
    table = pa.table({"n": lengths, "ids": [[0] * length for length in lengths]})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    assert read_lengths(tmp_path / "a.npy").counts == {1: 1, 3: 2}
    for field in ("n", "ids"):
        assert read_lengths(tmp_path / "a.parquet", field=field).counts == {1: 1, 3: 2}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"length": 5}, {"length": 0}], "line 2: the length is 0"),
        ([{"input_ids": []}], "line 1: the length is 0"),
        ([{"length": -4}], "line 1: the length is -4"),
        ([{"length": 4.5}], "line 1: the length is 4.5, not a whole number"),
        ([{"length": True}], "line 1: the length is True, not a whole number"),
        ([{"length": "12"}], "line 1: the length is '12', not a whole number"),
        ([{"length": 4}, {"length": 101}], "line 2: 101 tokens are more than the maximum of 100"),
        ([{"lenght": 4}], "line 1 has no field .*Did you mean --field lenght"),
        ([{"length": 4}, {"size": 4}], "line 2 has no field length"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, rows: list[object], message: str) -> None:
    """File and line stand in the message, and what is wrong there."""
    path = jsonl(tmp_path / "rows.jsonl", *rows)
    with pytest.raises(PlanError, match=r"rows\.jsonl' " + message):
        read_lengths(path, max_length=100)


def test_a_long_row_is_cut_only_when_asked(tmp_path: Path) -> None:
    """With truncate it counts as the maximum, and the source says how many were cut."""
    path = jsonl(tmp_path / "a.jsonl", 90, 101, 5000)
    lengths = read_lengths(path, max_length=100, truncate=True)
    assert lengths.counts == {90: 1, 100: 2}
    assert lengths.truncated == 2


def test_a_missing_field_names_a_near_one(tmp_path: Path) -> None:
    """In JSONL and in parquet, with what there is."""
    rows = jsonl(tmp_path / "a.jsonl", {"input_ids": [1]})
    parquet.write_table(pa.table({"input_ids": [[1]]}), tmp_path / "a.parquet")
    for path in (rows, tmp_path / "a.parquet"):
        with pytest.raises(
            PlanError, match=r"no field inputs_ids\. Did you mean --field input_ids"
        ):
            read_lengths(path, field="inputs_ids")


def test_broken_files_are_named(tmp_path: Path) -> None:
    """Absent, empty, torn, of the wrong shape, dtype or format: one PlanError each."""
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "torn.jsonl").write_text('{"length": 3}\n{"length": ')
    (tmp_path / "torn.npy").write_bytes(b"\x93NUMPY")
    (tmp_path / "torn.parquet").write_bytes(b"PAR1")
    np.save(tmp_path / "float.npy", np.array([1.0]))
    np.save(tmp_path / "square.npy", np.ones((2, 2), dtype=int))
    (tmp_path / "a.csv").write_text("1")
    for name, message in {
        "absent.jsonl": "there is no file",
        "empty.jsonl": "holds no rows",
        "torn.jsonl": "line 2 is not JSON",
        "torn.npy": "is not a .npy file",
        "torn.parquet": "is not a parquet file",
        "float.npy": "holds float64 of shape",
        "square.npy": r"holds int64 of shape \[2, 2\]",
        "a.csv": "unknown format '.csv'",
    }.items():
        with pytest.raises(PlanError, match=message):
            read_lengths(tmp_path / name)


def test_a_null_in_parquet_is_a_bad_row(tmp_path: Path) -> None:
    """Rows are counted across row groups, from 1."""
    parquet.write_table(pa.table({"n": [1, 2, None]}), tmp_path / "a.parquet", row_group_size=2)
    with pytest.raises(PlanError, match="row 3: the length is None"):
        read_lengths(tmp_path / "a.parquet", field="n")


def test_parquet_without_pyarrow_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says what to install."""
    (tmp_path / "a.parquet").touch()
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(PlanError, match=r"pip install compilecache\[parquet\]"):
        read_lengths(tmp_path / "a.parquet")


def test_explicit_sizes_keep_their_order_once_each() -> None:
    """Spaces are allowed; anything but whole numbers of at least 1 is refused by name."""
    assert parse_sizes("512, 1024,512", field="--seq-lens") == (512, 1024)
    for text, word in {"512,": "''", "0": "'0'", "-1": "'-1'", "1e3": "'1e3'", "²": "'²'"}.items():
        with pytest.raises(PlanError, match=f"{word} in --seq-lens"):
            parse_sizes(text, field="--seq-lens")
