"""Small trees, packs and records for the tests of the store."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

from compilecache.artifact import FileEntry, PackInfo, Record, hash_files
from compilecache.pack import write_pack
from compilecache.shapes import CompileTarget, InputSpec

FINGERPRINT = "ab" * 16
TARGET = CompileTarget(InputSpec(dims={"seq_len": 128, "mask": "full"}), "cuda:0")


def plant(root: Path, files: Mapping[str, bytes]) -> Path:
    """Writes the files below ``root`` and returns it."""
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root


def harvest(root: Path) -> dict[str, bytes]:
    """Every file below ``root`` by its relative name."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def listed(root: Path, names: list[str], info: PackInfo) -> dict[str, FileEntry]:
    """The entries of files that one pack holds."""
    found = hash_files(root, names)
    return {name: FileEntry(name, *found[name], info.sha256) for name in sorted(names)}


def packed(folder: Path, files: Mapping[str, bytes]) -> tuple[Path, dict[str, FileEntry], PackInfo]:
    """A pack of the files, made in ``folder``, with the entries that its record would list."""
    root = folder / "tree"
    root.mkdir(parents=True, exist_ok=True)
    plant(root, files)
    info = write_pack(root, files, folder / "pack")
    return folder / "pack", listed(root, list(files), info), info


def sample(
    folder: Path, seed: int = 0, *, key: str = "adopted", size: int = 20_000
) -> tuple[Record, Path]:
    """A record of an adopted directory and its pack; equal seeds give equal content."""
    made = random.Random(seed)
    files = {f"{i:02d}/kernel{i}.so": made.randbytes(size) for i in range(3)}
    pack, entries, info = packed(folder / f"{key}-{seed}", files)
    record = Record(
        fingerprint=FINGERPRINT,
        target=None,
        key=key,
        files=tuple(entries.values()),
        pack=info,
    )
    return record, pack
