"""What a restore of 12 targets and an ``ls`` cost among 10, 100, 1,000 and 10,000; part of ``restore.py``.

On a disk, and on a moto server in a process of its own. The others are records like real ones, written
directly; each restore is made with a new client into a new root. The ratio is that of 10,000 to 100.
"""

from __future__ import annotations

import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import boto3
from results import Row
from trees import plant

from compilecache.store import ArtifactStore

COUNTS = (10, 100, 1_000, 10_000)
TARGETS = 12
RUNS = 9
"""Restores at each count; the median counts."""


def rows(folder: Path) -> list[Row]:
    """Every figure."""
    with moto() as endpoint:
        options = {"endpoint_url": endpoint, "key": "testing", "secret": "testing"}
        return [
            *Growth("local", str(folder / "store"), {}, folder).rows(),
            *Growth("s3", "s3://bench", options, folder).rows(),
        ]


@contextmanager
def moto() -> Iterator[str]:
    """A server with a bucket."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert server.poll() is None
                time.sleep(0.1)
        endpoint = f"http://127.0.0.1:{port}"
        client = boto3.client(
            "s3",
            endpoint_url=endpoint,
            aws_access_key_id="testing",
            aws_secret_access_key="testing",
            region_name="us-east-1",
        )
        client.create_bucket(Bucket="bench")
        yield endpoint
    finally:
        server.kill()
        server.wait()


class Growth:
    """One store that grows."""

    def __init__(self, name: str, url: str, options: dict[str, str], folder: Path) -> None:
        from restore import MARK, publish

        self._name, self._url, self._options, self._folder = name, url, options, folder
        self._digest = MARK.digest
        tree = folder / f"tree-{name}"
        plant(tree, 4_000_000, 10 * TARGETS)
        self._keys, _ = publish(self._open(), tree, TARGETS, folder / "pack")
        view = self._open().latest(self._digest, self._keys[:1])
        self._model = view.records[self._keys[0]]
        self._there = TARGETS

    def _open(self) -> ArtifactStore:
        return ArtifactStore.open(self._url, storage_options=self._options)

    def rows(self) -> list[Row]:
        """Seconds at each count, and how much they grow."""
        restores, listings, found = {}, {}, []
        for count in COUNTS:
            self._grow(count)
            restores[count] = statistics.median([self._restore() for _ in range(RUNS + 1)][1:])
            listings[count] = self._ls()
            found.append(self._seconds(f"restore_{self._name}_of_{count}", restores[count]))
            found.append(self._seconds(f"ls_{self._name}_of_{count}", listings[count]))
        ratio = round(restores[10_000] / restores[100], 3)
        figure = "restore_growth_100_to_10000" + ("" if self._name == "s3" else f"_{self._name}")
        judged = Row(
            figure, round(restores[10_000], 4), "s", "100", ratio, round(restores[100], 4),
            target="<= 1.5", passed=ratio <= 1.5,
        )  # fmt: skip
        return [judged, *found]

    def _seconds(self, figure: str, seconds: float) -> Row:
        return Row(figure, round(seconds, 4), "s")

    def _grow(self, count: int) -> None:
        """So many targets besides the 12; each a record that leans on the pack of another."""
        storage = self._open().storage

        def add(number: int) -> None:
            key = f"adopted-more-{number}"
            record = self._model.model_copy(update={"key": key, "pack": None})
            storage.create(f"v1/{self._digest}/artifacts/{key}/1.json", record.dump())

        with ThreadPoolExecutor(storage.workers) as pool:
            list(pool.map(add, range(self._there, count)))
        self._there = max(self._there, count)

    def _restore(self) -> float:
        from restore import restore

        root = self._folder / "root"
        shutil.rmtree(root, ignore_errors=True)
        began = time.perf_counter()
        restore(self._open(), self._keys, root)
        return time.perf_counter() - began

    def _ls(self) -> float:
        began = time.perf_counter()
        entries = self._open().entries(self._digest)
        assert len(entries) == self._there
        return time.perf_counter() - began
