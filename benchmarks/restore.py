"""How fast a store fills a cache root, digests included: from a disk, from S3, and as it grows.

``--local``: against ``cp -r`` of the same files. ``--s3``: against the fastest plain client of the same
objects (``restore_s3.py``). ``--growth``: 12 targets and ``ls`` among 10 to 10,000 (``restore_growth.py``).
Without any of them: all.

A restore is what ``compilecache restore`` does once it knows the fingerprint: records looked up, packs
fetched and unpacked, every digest checked, files put in place, records kept. Runs come in pairs, the order
alternating, everything read once before (warm page cache) and dirty pages written out before each run. Like
``cp -r``, a restore leaves writing out to the kernel: a file lost to a power cut is found by its digest.
``local_restore_vs_cp_synced`` has both wait for the disk.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import restore_growth
import restore_s3
from results import Row, report
from trees import aside, plant

from compilecache.artifact import FileEntry, Record, hash_files
from compilecache.cachedir import CacheDir
from compilecache.exchange import Exchange
from compilecache.fingerprint import Fingerprint
from compilecache.pack import write_pack
from compilecache.store import ArtifactStore

MARK = Fingerprint({"bench": "restore"})
TARGETS = 12


def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--local", action="store_true", help="only this, and others that are named")
    parser.add_argument("--s3", action="store_true", help="the same")
    parser.add_argument("--growth", action="store_true", help="the same")
    parser.add_argument("--mb", type=int, default=500, help="megabytes of files (default 500)")
    parser.add_argument("--files", type=int, default=1000, help="number of files (default 1000)")
    parser.add_argument("--pairs", type=int, default=7, help="measured pairs (default 7)")
    parser.add_argument("--dir", type=Path, help="where to measure (default: the temp directory)")
    options = parser.parse_args()
    size, files, pairs = options.mb * 1_000_000, options.files, options.pairs
    parts: dict[str, Callable[[Path], list[Row]]] = {
        "local": lambda folder: Bench(folder, size, files).rows(pairs),
        "s3": lambda folder: restore_s3.rows(folder, size, files, pairs),
        "growth": lambda folder: restore_growth.rows(folder),
    }
    chosen = [name for name in parts if getattr(options, name)] or list(parts)
    rows: list[Row] = []
    # Nothing is deleted before all is measured: see ``aside``.
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="restore-") as folder:
        for name in chosen:
            place = Path(folder, name)
            place.mkdir()
            rows += parts[name](place)
    whole = len(chosen) == len(parts)
    report("restore" if whole else f"restore_{'_'.join(chosen)}", rows, as_json=options.json)


def publish(store: ArtifactStore, tree: Path, targets: int, scratch: Path) -> tuple[list[str], int]:
    """The files of a tree as so many targets, a pack each. Returns their keys and the packs' bytes."""
    names = sorted(p.relative_to(tree).as_posix() for p in tree.rglob("*.*"))
    keys, packed = [], 0
    for number in range(targets):
        info = write_pack(tree, names[number::targets], scratch)
        files = tuple(
            FileEntry(name, size, digest, info.sha256)
            for name, (size, digest) in sorted(hash_files(tree, names[number::targets]).items())
        )
        keys.append(f"adopted-{number}")
        record = Record(fingerprint=MARK.digest, target=None, key=keys[-1], files=files, pack=info)
        store.publish(record, scratch)
        packed += info.size
    return keys, packed


def restore(store: ArtifactStore, keys: list[str], root: Path) -> None:
    """The product's way, into a root that is new."""
    cache = CacheDir(root)
    cache.create()
    exchange = Exchange(cache, store, MARK, keys)
    exchange.look()
    done = exchange.restore()
    assert len(done.keys) == len(keys), done.faults


class Bench:
    """A tree, a store that holds it in one pack a target, and the two ways to copy it."""

    def __init__(self, folder: Path, size: int, files: int) -> None:
        self._tree = folder / "tree"
        self._out = folder / "out"
        self._store = ArtifactStore.open(folder / "store")
        self._bytes = plant(self._tree, size, files)
        self._keys, self._packed = publish(self._store, self._tree, TARGETS, folder / "pack")

    def restore(self) -> None:
        """The product's way."""
        restore(self._store, self._keys, self._out)

    def copy(self) -> None:
        """``cp -r``."""
        subprocess.run(["cp", "-r", self._tree, self._out], check=True)

    def _timed(self, act: Callable[[], None], *, synced: bool) -> float:
        subprocess.run(["sync", "-f", self._tree], check=True)
        began = time.perf_counter()
        act()
        if synced:
            subprocess.run(["sync", "-f", self._out], check=True)
        took = time.perf_counter() - began
        aside(self._out)
        return took

    def pairs(self, count: int, *, synced: bool) -> list[tuple[float, float]]:
        """Seconds of restore and of ``cp -r``, pair by pair; one pair before them is not counted."""
        found = []
        for number in range(count + 1):
            ways = [self.restore, self.copy]
            if number % 2:
                ways.reverse()
            took = {way.__name__: self._timed(way, synced=synced) for way in ways}
            found.append((took["restore"], took["copy"]))
        return found[1:]

    def rows(self, count: int) -> list[Row]:
        """Every figure."""
        warm = self.pairs(count, synced=False)
        synced = self.pairs(max(5, count // 2), synced=True)
        return [
            self._row("local_restore_vs_cp", warm, 0.8),
            self._row("local_restore_vs_cp_synced", synced),
            Row(
                "pack_bytes_vs_files",
                self._packed / 1e6,
                "MB",
                "files",
                round(self._packed / self._bytes, 4),
                self._bytes / 1e6,
            ),
        ]

    def _row(self, figure: str, pairs: list[tuple[float, float]], least: float = 0.0) -> Row:
        """The median ratio of rates over pairs of seconds."""
        ratio = round(statistics.median(cp / ours for ours, cp in pairs), 4)
        rates = [
            round(self._bytes / 1e6 / statistics.median(way), 1) for way in zip(*pairs, strict=True)
        ]
        return Row(
            figure,
            rates[0],
            "MB/s",
            "cp -r",
            ratio,
            rates[1],
            target=f">= {least}" if least else None,
            passed=ratio >= least if least else None,
        )


if __name__ == "__main__":
    main()
