"""Triton's part of a cache root: one folder a kernel, and what of it must travel.

Inductor's kernels come out of the FX-graph entries again. Two kinds do not: libraries that Triton
builds with gcc to reach the driver, and kernels that somebody launches through Triton alone.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from pathlib import Path

from compilecache.documents import read_json
from compilecache.files import replacing

FOLDER = "triton"
GROUP = "__grp__"
"""Triton's list of a kernel's files. It holds absolute paths, so it is written anew in every root."""


def is_stub(path: str) -> bool:
    """Whether a file is a library that Triton built to reach the driver, loaded once a process."""
    return path.startswith(f"{FOLDER}/") and path.endswith(".so")


def is_group(path: str) -> bool:
    """Whether a file is such a list."""
    return path.startswith(f"{FOLDER}/") and path.rpartition("/")[2].startswith(GROUP)


def kernel_folder(path: str) -> str:
    """The folder of the kernel that a file belongs to, also of one still being written."""
    folder = path.rpartition("/")[0]
    parent, _, last = folder.rpartition("/")
    return parent if last.startswith("tmp.pid_") else folder


def looked_up(used: Iterable[str], bundled: Collection[str] = ()) -> set[str]:
    """Folders of the kernels that this process looked for in, or added to, Triton's own cache.

    Without those, by name, that FX-graph entries carry: they are read to be put there.
    """
    folders = {kernel_folder(path) for path in used if is_group(path)}
    return {folder for folder in folders if folder.rpartition("/")[2] not in bundled}


def regroup(root: Path, paths: Collection[str], folder: str = f"{FOLDER}/") -> None:
    """Writes the lists of those kernels among ``paths`` that have none, or that of another root.

    Triton takes a kernel only if its list names files that exist. ``folder``: what the names of its
    files begin with. Raises OSError.
    """
    kernels = {path for path in paths if path.startswith(folder) and path.endswith(".json")}
    for path in kernels:
        if not path.rpartition("/")[2].startswith(GROUP):
            _write_group(root / path)


def _write_group(metadata: Path) -> None:
    group = metadata.parent / f"{GROUP}{metadata.name}"
    if _names_its_own(group, metadata.name):
        return
    files = [file for file in metadata.parent.iterdir() if file.is_file()]
    own = {file.name: str(file) for file in sorted(files) if not file.name.startswith((GROUP, "."))}
    with replacing(group) as file:
        file.write(json.dumps({"child_paths": own}).encode())


def _names_its_own(group: Path, metadata: str) -> bool:
    try:
        found = read_json(group.read_bytes())
        children = found["child_paths"] if isinstance(found, dict) else {}
        paths = [Path(child) for child in children.values()]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False
    whole = all(path.parent == group.parent and path.exists() for path in paths)
    return whole and metadata in children
