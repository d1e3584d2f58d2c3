"""Trees of files to measure with, the same in every run."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path


def aside(folder: Path) -> None:
    """Makes room for the next run: files are emptied and kept under another name.

    ext4 passes over inodes that were deleted in the last minutes, one by one; who creates many files
    right after as many were deleted pays for that, and not for what is measured.
    """
    for path in folder.rglob("*"):
        if path.is_file():
            os.truncate(path, 0)
    folder.rename(folder.with_name(f"{folder.name}-{time.monotonic_ns()}"))


def plant(root: Path, size: int, files: int, *, dense: bool = False) -> int:
    """Files as a compile cache has them: text, machine code, constants. Returns their bytes.

    ``dense``: of the same sizes, and nothing in them compresses.
    """
    made = random.Random(20)
    text = _text(made, 16_000_000)
    weights = [made.lognormvariate(0, 1) for _ in range(files)]
    unit = size / sum(weights)
    total = 0
    for number, weight in enumerate(weights):
        length = max(64, int(weight * unit))
        data = made.randbytes(length) if dense else _content(made, text, length)
        path = root / f"{number % 97:02x}" / f"c{number:05d}.{made.choice(['so', 'cubin', 'py'])}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        total += len(data)
    return total


def _content(made: random.Random, text: bytes, size: int) -> bytes:
    """Two fifths text, two fifths that do not compress, one fifth zeros and tables."""
    parts = [made.randbytes(size * 2 // 5), bytes(size // 10), made.randbytes(64) * (size // 640)]
    left = size - sum(map(len, parts))
    while left:
        start = made.randrange(len(text) - 200_000)
        parts.append(text[start : start + min(left, 200_000)])
        left -= len(parts[-1])
    return b"".join(parts)


def _text(made: random.Random, size: int) -> bytes:
    lines: list[bytes] = []
    length = 0
    while length < size:
        a, b, c = made.randrange(400), made.randrange(400), made.randrange(1 << 16)
        lines.append(b"    tmp%d = tl.load(in_ptr%d + (x%d + %d), xmask)\n" % (a, b % 9, b, c))
        length += len(lines[-1])
    return b"".join(lines)
