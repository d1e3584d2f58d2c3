"""What a compiler that was killed in the middle, or a machine that went down, leaves in a cache root.

torch takes any file under the right name for a finished one. Half a library does not merely fail to
load: it ends the process with SIGBUS, at every start. Digests find it only where a record lists it.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

from compilecache.cachedir import CacheDir
from compilecache.contents import REMADE, SETTLED, is_tuning

_ELF64_SECTIONS = struct.Struct("40xQ10xHH2x")
"""Of the header: where the section table starts, the size of an entry, how many there are."""


def unfinished(cache: CacheDir) -> list[str]:
    """Libraries and generated sources below the root that cannot be whole."""
    return sorted(path for path in cache.files() if not _may_be_whole(cache.root, path))


def sweep(cache: CacheDir) -> list[str]:
    """Moves them aside, under the lock only. Returns their names."""
    return [path for path in unfinished(cache) if cache.move_aside(path)]


def _may_be_whole(root: Path, path: str) -> bool:
    try:
        if path.endswith(".so"):
            return _is_library(root / path)
        if SETTLED.match(path):
            return is_tuning(root / path)
        return not REMADE.match(path) or os.lstat(root / path).st_size > 0
    except OSError:
        return True


def _is_library(path: Path) -> bool:
    """Linkers write the section table last, at the end of the file."""
    with path.open("rb") as file:
        header = file.read(_ELF64_SECTIONS.size)
        size = os.fstat(file.fileno()).st_size
    if header[:4] != b"\x7fELF" or len(header) < _ELF64_SECTIONS.size:
        return False
    if header[4:6] != b"\x02\x01":  # not 64 bit, little-endian: nothing is known about it
        return True
    start, entry, count = map(int, _ELF64_SECTIONS.unpack(header))
    return start > 0 and start + entry * count <= size
