"""A restore from S3 against plain clients that fetch the same objects to files; part of ``restore.py``.

40 packs on a loopback server (``s3_files.py``: sendfile, in a process of its own, so that of two cores it
takes least). The plain clients only write the objects to a disk. A restore looks its records up, checks the
sha256 of each pack and the xxh3 of each file, unpacks, and puts files in place. So that both write the same
bytes, what the packs hold does not compress: ``s3_restore_vs_client`` compares transfer and digests, not
disks. ``…_compressible`` is the same with files as a compile cache has them: there a restore writes more than
twice what the client does.

``s3_fetch_vs_client``: the product's reader alone, objects to files. Clients: boto3 in threads, aiobotocore
and ``aws s3 cp``, the latter two in an environment of their own that is made for the run.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import venv
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from results import Row
from trees import plant

from compilecache.store import ArtifactStore

HERE = Path(__file__).parent
PACKS = 40
FOREIGN = {"aiobotocore": "aiobotocore", "aws s3 cp": "awscli"}
"""Ways that need a package which the project does not."""
TRIES = 3
"""Runs by which the fastest client is chosen, after one that is not counted."""

Took = tuple[float, float]
"""Seconds, and seconds of processor time."""


def rows(folder: Path, size: int, files: int, pairs: int) -> list[Row]:
    """Every figure."""
    foreign = foreign_pythons(folder / "clients")
    found: list[Row] = []
    for dense in (True, False):
        place = folder / ("dense" if dense else "compressible")
        place.mkdir()
        with serving(place, size, files, dense) as (endpoint, listing, packed):
            found += Bench(place, endpoint, listing, packed, foreign).rows(pairs, dense)
    return found


def foreign_pythons(folder: Path) -> dict[str, Path]:
    """By way: a Python that has what it needs. Where that cannot be installed the way is left out."""
    found = {}
    for way, package in FOREIGN.items():
        place = folder / package
        venv.create(place, with_pip=True)
        python = place / "bin/python"
        command = [python, "-m", "pip", "install", "--quiet", package]
        if subprocess.run(command, stdout=sys.stderr, check=False).returncode == 0:
            found[way] = python
    return found


@contextmanager
def serving(folder: Path, size: int, files: int, dense: bool) -> Iterator[tuple[str, Path, int]]:
    """Address of a server with the packs, a file of their names, and what they weigh."""
    from restore import publish

    plant(folder / "tree", size, files, dense=dense)
    store = ArtifactStore.open(folder / "store")
    _, packed = publish(store, folder / "tree", PACKS, folder / "pack")
    names = [path.relative_to(folder / "store") for path in (folder / "store").rglob("*.tar.zst")]
    listing = folder / "names"
    listing.write_text("\n".join(sorted(map(str, names))), encoding="utf-8")
    server = subprocess.Popen(
        [sys.executable, HERE / "s3_files.py", folder / "store"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        yield f"http://127.0.0.1:{int(server.stdout.readline())}", listing, packed
    finally:
        server.kill()
        server.communicate()


class Way:
    """One way to fetch everything, in a process that waits to be asked."""

    def __init__(self, name: str, python: Path, endpoint: str, listing: Path, out: Path) -> None:
        self.name = name
        self._out = out
        self._process = subprocess.Popen(
            [python, HERE / "s3_clients.py", name, endpoint, listing],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self) -> Took:
        """Once more, into a folder that is new; what was written before is on the disk."""
        assert self._process.stdin is not None and self._process.stdout is not None
        subprocess.run(["sync", "-f", self._out.parent], check=True)
        print(self._out, file=self._process.stdin, flush=True)
        seconds, processor = json.loads(self._process.stdout.readline())
        return seconds, processor

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()


class Bench:
    """The ways, on one set of objects."""

    def __init__(
        self, folder: Path, endpoint: str, listing: Path, packed: int, foreign: dict[str, Path]
    ) -> None:
        own = Path(sys.executable)
        pythons = {"boto3": own, "boto3 x8": own, **foreign, "fetch only": own, "restore": own}
        self._packed = packed
        self._ways = {
            name: Way(name, python, endpoint, listing, folder / "out")
            for name, python in pythons.items()
        }

    def rows(self, pairs: int, dense: bool) -> list[Row]:
        """Every figure of these objects."""
        with ExitStack() as stack:
            for way in self._ways.values():
                stack.callback(way.close)
            return self._measured(pairs, dense)

    def _measured(self, pairs: int, dense: bool) -> list[Row]:
        restore, fetch = self._ways.pop("restore"), self._ways.pop("fetch only")
        speeds = {name: self._seconds(way) for name, way in self._ways.items()}
        fastest = self._ways[min(speeds, key=lambda name: speeds[name])]
        whole = paired(restore, fastest, pairs)
        more = "" if dense else "_compressible"
        rows = [
            self._rate(f"s3_restore_vs_client{more}", whole, fastest.name, judged=dense),
            _processor(f"s3_restore_cpu_vs_client{more}", whole, fastest.name, judged=dense),
        ]
        if dense:
            alone = paired(fetch, fastest, pairs)
            rows += [
                self._rate("s3_fetch_vs_client", alone, fastest.name),
                _processor("s3_fetch_cpu_vs_client", alone, fastest.name),
            ]
            rows += [
                Row(f"s3_client {name}", round(self._packed / 1e6 / seconds, 1), "MB/s")
                for name, seconds in sorted(speeds.items(), key=lambda item: item[1])
            ]
        return rows

    def _seconds(self, way: Way) -> float:
        return statistics.median([way.run()[0] for _ in range(TRIES + 1)][1:])

    def _rate(
        self, figure: str, runs: Sequence[tuple[Took, Took]], client: str, *, judged: bool = False
    ) -> Row:
        """The median ratio of rates over pairs of runs; rates in bytes of packs."""
        ratio = round(statistics.median(theirs[0] / ours[0] for ours, theirs in runs), 4)
        rates = [
            round(self._packed / 1e6 / statistics.median(pair[side][0] for pair in runs), 1)
            for side in (0, 1)
        ]
        return Row(
            figure, rates[0], "MB/s", client, ratio, rates[1],
            target=">= 0.8" if judged else None, passed=ratio >= 0.8 if judged else None,
        )  # fmt: skip


def paired(ours: Way, theirs: Way, count: int) -> list[tuple[Took, Took]]:
    """Runs of both, pair by pair, the order alternating; one pair before them is not counted."""
    found = []
    for number in range(count + 1):
        first, second = (theirs, ours) if number % 2 else (ours, theirs)
        took = {first.name: first.run(), second.name: second.run()}
        found.append((took[ours.name], took[theirs.name]))
    return found[1:]


def _processor(
    figure: str, runs: Sequence[tuple[Took, Took]], client: str, *, judged: bool = False
) -> Row:
    ratio = round(statistics.median(ours[1] / theirs[1] for ours, theirs in runs), 4)
    ours, theirs = (round(statistics.median(pair[side][1] for pair in runs), 3) for side in (0, 1))
    return Row(
        figure, ours, "s", client, ratio, theirs,
        target="<= 1.5" if judged else None, passed=ratio <= 1.5 if judged else None,
    )  # fmt: skip
