"""File systems for tests: small, read-only, without execution."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def _run(*words: object) -> None:
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mounts are not permitted here: {done.stderr.strip()}")


def can_mount() -> bool:
    """Whether file systems may be mounted here."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            with tmpfs(Path(folder), "size=1m"):
                return True
        except pytest.skip.Exception:
            return False


@contextmanager
def tmpfs(folder: Path, options: str) -> Iterator[Path]:
    """A file system in memory, mounted on the folder with these options."""
    folder.mkdir(exist_ok=True)
    _run("mount", "-t", "tmpfs", "-o", options, "tmpfs", folder)
    try:
        yield folder
    finally:
        _run("umount", "-l", folder)


@contextmanager
def read_only(folder: Path) -> Iterator[Path]:
    """The folder as it is, but nobody can write below it, not even root."""
    _run("mount", "--bind", folder, folder)
    try:
        _run("mount", "-o", "remount,ro,bind", folder)
        yield folder
    finally:
        _run("umount", "-l", folder)
