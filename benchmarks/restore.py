"""How fast a local store fills a cache directory, digests included, against ``cp -r``.

Runs come in pairs on one disk, the order alternating, everything read once before (warm page cache)
and dirty pages written out before each run. Like ``cp -r``, a restore leaves writing out to the kernel: a
file lost to a power cut is found by its digest. ``restore_vs_cp_synced`` has both wait for the disk.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from results import Row, report

from compilecache.artifact import FileEntry, Record, hash_files
from compilecache.fetch import fetch_packs
from compilecache.pack import write_pack
from compilecache.store import ArtifactStore

FINGERPRINT = "be" * 16
TARGETS = 12


def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--mb", type=int, default=500, help="megabytes of files (default 500)")
    parser.add_argument("--files", type=int, default=1000, help="number of files (default 1000)")
    parser.add_argument("--pairs", type=int, default=7, help="measured pairs (default 7)")
    parser.add_argument("--dir", type=Path, help="where to measure (default: the temp directory)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="restore-") as folder:
        bench = Bench(Path(folder), options.mb * 1_000_000, options.files)
        rows = bench.rows(options.pairs)
    report("restore", rows, as_json=options.json)


class Bench:
    """A tree, a store that holds it in one pack a target, and the two ways to copy it."""

    def __init__(self, folder: Path, size: int, files: int) -> None:
        self._tree = folder / "tree"
        self._out = folder / "out"
        self._staging = folder / "staging"
        self._store = ArtifactStore.open(folder / "store")
        self._bytes = plant(self._tree, size, files)
        self._entries: list[FileEntry] = []
        self._packed = 0
        for number, names in enumerate(self._shares(files)):
            self._publish(number, names, folder / "pack")

    def _shares(self, files: int) -> Iterator[list[str]]:
        names = sorted(p.relative_to(self._tree).as_posix() for p in self._tree.rglob("*.*"))
        step = -(-files // TARGETS)
        for start in range(0, files, step):
            yield names[start : start + step]

    def _publish(self, number: int, names: list[str], pack: Path) -> None:
        info = write_pack(self._tree, names, pack)
        files = tuple(
            FileEntry(name, size, digest, info.sha256)
            for name, (size, digest) in hash_files(self._tree, names).items()
        )
        record = Record(
            fingerprint=FINGERPRINT, target=None, key=f"adopted-{number}", files=files, pack=info
        )
        self._store.publish(record, pack)
        self._entries.extend(files)
        self._packed += info.size

    def restore(self) -> None:
        """The product's way: fetch into staging, every digest checked, rename into place."""
        self._staging.mkdir()
        fetch_packs(self._store, FINGERPRINT, self._entries, self._staging)
        self._staging.rename(self._out)

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
        shutil.rmtree(self._out)
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
        rate = self._bytes / 1e6 / statistics.median(ours for ours, _ in warm)
        plain = self._bytes / 1e6 / statistics.median(cp for _, cp in warm)
        return [
            ratio_row("restore_vs_cp", warm),
            ratio_row("restore_vs_cp_synced", synced),
            Row("restore_rate", round(rate, 1), "MB/s"),
            Row("cp_rate", round(plain, 1), "MB/s"),
            Row(
                "pack_bytes_vs_files",
                self._packed,
                "bytes",
                "files",
                round(self._packed / self._bytes, 4),
            ),
        ]


def ratio_row(figure: str, pairs: list[tuple[float, float]]) -> Row:
    """The median ratio of rates over pairs of seconds."""
    ratio = round(statistics.median(cp / ours for ours, cp in pairs), 4)
    return Row(figure, ratio, "ratio of rates", "cp -r", ratio)


def plant(root: Path, size: int, files: int) -> int:
    """Files as a compile cache has them: text, machine code, constants. Returns their bytes."""
    made = random.Random(20)
    text = _text(made, 16_000_000)
    weights = [made.lognormvariate(0, 1) for _ in range(files)]
    unit = size / sum(weights)
    total = 0
    for number, weight in enumerate(weights):
        data = _content(made, text, max(64, int(weight * unit)))
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


if __name__ == "__main__":
    main()
