"""What a restore of 12 targets and an ``ls`` cost among 10, 100, 1,000 and 10,000; part of ``restore.py``.

On a disk, and on a loopback S3 server over the same files (``s3_files.py``, in a process of its own, whose
listings cost what they list, as S3's do; moto looks through its whole bucket for each). The others are
records like real ones, written directly; each restore is made with a new client into a new root. The
ratio is that of 10,000 to 100.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from results import Row
from trees import aside, plant

from compilecache.store import ArtifactStore

HERE = Path(__file__).parent
COUNTS = (10, 100, 1_000, 10_000)
TARGETS = 12
RUNS = 9
"""Restores at each count; the median counts."""


def rows(folder: Path) -> list[Row]:
    """Every figure."""
    growth = Growth(folder)
    seconds: dict[str, dict[int, tuple[float, float]]] = {"local": {}, "s3": {}}
    for count in COUNTS:
        growth.grow(count)
        seconds["local"][count] = growth.measured(lambda: ArtifactStore.open(growth.place))
        with serving(growth.place) as endpoint:
            options = {"endpoint_url": endpoint, "key": "key", "secret": "secret"}
            seconds["s3"][count] = growth.measured(
                lambda: ArtifactStore.open("s3://bench", storage_options=options)  # noqa: B023
            )
    return [row for name, found in seconds.items() for row in _rows(name, found)]


def _rows(name: str, found: dict[int, tuple[float, float]]) -> list[Row]:
    restores = {count: restore for count, (restore, _) in found.items()}
    ratio = round(restores[10_000] / restores[100], 3)
    figure = "restore_growth_100_to_10000" + ("" if name == "s3" else f"_{name}")
    judged = Row(
        figure,
        round(restores[10_000], 4),
        "s",
        "100",
        ratio,
        round(restores[100], 4),
        target="<= 1.5",
        passed=ratio <= 1.5,
    )
    rows = [judged]
    for count, (restore, listing) in found.items():
        rows.append(Row(f"restore_{name}_of_{count}", round(restore, 4), "s"))
        rows.append(Row(f"ls_{name}_of_{count}", round(listing, 4), "s"))
    return rows


@contextmanager
def serving(place: Path) -> Iterator[str]:
    """Address of a server with the store as it is now."""
    server = subprocess.Popen(
        [sys.executable, HERE / "s3_files.py", place], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        yield f"http://127.0.0.1:{int(server.stdout.readline())}"
    finally:
        server.kill()
        server.communicate()


class Growth:
    """One store that grows."""

    def __init__(self, folder: Path) -> None:
        from restore import MARK, publish

        self.place = folder / "store"
        self._folder = folder
        self._digest = MARK.digest
        plant(folder / "tree", 4_000_000, 10 * TARGETS)
        store = ArtifactStore.open(self.place)
        self._keys, _ = publish(store, folder / "tree", TARGETS, folder / "pack")
        self._model = store.latest(self._digest, self._keys[:1]).records[self._keys[0]]
        self._there = TARGETS

    def grow(self, count: int) -> None:
        """So many targets in all; each new one a record that leans on the pack of another."""
        storage = ArtifactStore.open(self.place).storage
        for number in range(self._there, count):
            key = f"adopted-more-{number}"
            record = self._model.model_copy(update={"key": key, "pack": None})
            storage.create(f"v1/{self._digest}/artifacts/{key}/1.json", record.dump())
        self._there = max(self._there, count)

    def measured(self, opened: Callable[[], ArtifactStore]) -> tuple[float, float]:
        """Seconds of a restore and of an ``ls``, each with a client of its own."""
        restores = [self._restore(opened) for _ in range(RUNS + 1)][1:]
        began = time.perf_counter()
        entries = opened().entries(self._digest)
        listing = time.perf_counter() - began
        assert len(entries) == self._there
        return statistics.median(restores), listing

    def _restore(self, opened: Callable[[], ArtifactStore]) -> float:
        from restore import restore

        root = self._folder / "root"
        if root.exists():
            aside(root)
        began = time.perf_counter()
        restore(opened(), self._keys, root)
        return time.perf_counter() - began
