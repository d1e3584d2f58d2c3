"""The files of a cache root: which are finished, which come back by themselves, which must travel."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from compilecache.documents import read_json
from compilecache.kernels import FOLDER, is_group, is_stub, kernel_folder

TRANSIENT = re.compile(r"(^|/)(locks/|tmp\.pid_|\.|tmp[a-z0-9_]{8}$)|\.lock$|\.tmp$")
"""Lock files and files still being written: torch's ``.<pid>.<tid>.tmp``, Triton's ``tmp.pid_*``."""
REMADE = re.compile(r"^[0-9a-z]{2}/[^/]+\.(py|cpp|h|hpp|i)$")
"""Generated sources: every FX-graph entry carries its own and writes it out again."""


NATIVE = (".so", ".so.load_ok")
"""A library, and torch's note that this one could be loaded when it was tried."""
SETTLED = re.compile(r"^[0-9a-z]{2}/[^/]+\.best_config$")
"""Which configuration of a kernel was fastest, with the time it took: torch writes it anew whenever it
times them again. Any that can be read is as good as another."""

LIBRARY = re.compile(rf"^([0-9a-z]{{2}}|{FOLDER})/.+\.so$")
"""Native libraries, named by a digest of their source and of how they were built. Their debug information
names the folder they were built in, so those of two roots do the same in other bytes."""


def travels(path: str, kernels: Collection[str] = ()) -> bool:
    """Whether a cache file must be in a pack for a start on another machine to compile nothing.

    Generated sources come out of the FX-graph entries again, and so do Triton's kernels but for
    those in the folders ``kernels``: 6 files of 801 were enough for a drafter on an H200.
    """
    if TRANSIENT.search(path) or REMADE.match(path) or is_group(path):
        return False
    if not path.startswith(f"{FOLDER}/"):
        return True
    return is_stub(path) or kernel_folder(path) in kernels


def is_tuning(path: Path) -> bool:
    """Whether a result of tuning is there and can be read."""
    try:
        return isinstance(read_json(path.read_bytes()), dict)
    except (OSError, ValueError):
        return False


def libraries(used: Collection[str], present: Collection[str]) -> set[str]:
    """The native libraries behind the lock files that were taken.

    torch takes ``locks/<key>.lock`` whenever it builds or loads ``<2 letters>/<key>….so``, also
    when Python has the library in memory already and opens nothing.
    """
    keys = {path[len("locks/") : -len(".lock")] for path in used if path.startswith("locks/")}
    return {
        path
        for path in present
        if path.endswith(NATIVE) and path.rpartition("/")[2].partition(".")[0] in keys
    }
