"""Files that appear whole or not at all."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

import pytest

from compilecache.files import creating, replacing

Finishing = Callable[[Path], AbstractContextManager[BinaryIO]]


def test_replacing_puts_the_new_content_in_place(tmp_path: Path) -> None:
    """The old content is there until the block ends, the new one after it, private to the user."""
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with replacing(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("finishing", [replacing, creating])
def test_an_error_leaves_no_trace(tmp_path: Path, finishing: Finishing) -> None:
    """After an exception in the block the directory is as it was, temp files included."""
    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(KeyError), finishing(tmp_path / "file") as file:
        file.write(b"half")
        raise KeyError
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"old"


def test_creating_refuses_what_is_there(tmp_path: Path) -> None:
    """The second creator gets FileExistsError and changes nothing."""
    path = tmp_path / "file"
    with creating(path) as file:
        file.write(b"first")
    with pytest.raises(FileExistsError), creating(path) as file:
        file.write(b"second")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert path.read_bytes() == b"first"
