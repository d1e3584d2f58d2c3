"""How long a pod waits for its cache: ``warmup pull`` against ``aws s3 cp`` and ``tar -x``.

The same 100 MB of files, for the 12 targets of a plan: published as records and packs for ``warmup pull
--fingerprint``, which checks every digest and writes its ready file; and as one plain tar, which ``aws s3 cp``
fetches and ``tar -x`` unpacks, checking nothing. Both from one loopback server (``s3_files.py``), both from
the start of the first process to the end of the last, in pairs, the order alternating. awscli gets an
environment of its own for the run; where it cannot be had, a script with boto3 fetches, and the result says so.

``pull_first_request_s``: from the start of the process until its first byte is at the store.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from results import Row, report
from s3_files import BUCKET
from trees import aside, plant

from compilecache.artifact import FileEntry, Record, hash_files
from compilecache.examples import specs_of_examples
from compilecache.fingerprint import Fingerprint
from compilecache.pack import write_pack
from compilecache.shapes import ShapePlan, plan_of
from compilecache.store import ArtifactStore

HERE = Path(__file__).parent
WARMUP = Path(sys.executable).with_name("warmup")
MARK = Fingerprint({"bench": "pull"})
TARGETS = 12
TAR = "cache.tar"
KEYS = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_DEFAULT_REGION": "us-east-1",
}
PLAIN = (
    "import boto3, sys; boto3.client('s3', endpoint_url=sys.argv[1])"
    f".download_file('{BUCKET}', sys.argv[2], sys.argv[3])"
)


def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--mb", type=int, default=100, help="megabytes of files (default 100)")
    parser.add_argument("--files", type=int, default=400, help="number of files (default 400)")
    parser.add_argument("--pairs", type=int, default=7, help="measured pairs (default 7)")
    parser.add_argument("--dir", type=Path, help="where to measure (default: the temp directory)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="pull-") as name:
        folder = Path(name)
        plan = laid(folder, options.mb * 1_000_000, options.files)
        with serving(folder / "store") as endpoint:
            bench = Bench(folder, plan, endpoint, client(folder / "awscli"))
            rows = [bench.pairs(options.pairs), bench.first_requests(options.pairs)]
    report("pull", rows, as_json=options.json)


def laid(folder: Path, size: int, files: int) -> Path:
    """Files, the store that has them in packs and in one tar, and the plan that asks for them."""
    tree = folder / "tree"
    plant(tree, size, files)
    model = torch.nn.Linear(8, 8)
    shapes = [{"input": torch.empty(rows, 8, device="meta")} for rows in range(2, 2 + TARGETS)]
    plan = plan_of(specs_of_examples(shapes, model, ("train",)), workload="bench:none")
    publish(ArtifactStore.open(folder / "store"), plan, tree, folder / "pack")
    subprocess.run(["tar", "-cf", folder / "store" / TAR, "-C", tree, "."], check=True)
    place = folder / "plan.yaml"
    place.write_text(plan.dump(), encoding="utf-8")
    return place


def publish(store: ArtifactStore, plan: ShapePlan, tree: Path, scratch: Path) -> None:
    """The files as the plan's targets, a pack each."""
    names = sorted(path.relative_to(tree).as_posix() for path in tree.rglob("*.*"))
    targets = plan.targets(["cpu"])
    assert len(targets) == TARGETS
    for number, target in enumerate(targets):
        own = names[number::TARGETS]
        info = write_pack(tree, own, scratch)
        entries = tuple(
            FileEntry(name, size, digest, info.sha256)
            for name, (size, digest) in sorted(hash_files(tree, own).items())
        )
        record = Record(
            fingerprint=MARK.digest, target=target, key=target.key, files=entries, pack=info
        )
        store.publish(record, scratch)
    store.put_fingerprint(MARK.digest, MARK.dump())


@contextmanager
def serving(store: Path) -> Iterator[str]:
    """The address of a server with the store."""
    command = [sys.executable, HERE / "s3_files.py", store]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        yield f"http://127.0.0.1:{int(server.stdout.readline())}"
    finally:
        server.kill()
        server.communicate()


@dataclass(frozen=True, slots=True)
class Client:
    """What fetches the tar."""

    name: str
    words: tuple[str | Path, ...]
    """Of the command line, before address, key and file."""

    def command(self, endpoint: str, file: Path) -> list[str | Path]:
        """Fetches the tar into a file."""
        if self.name == "boto3":
            return [*self.words, endpoint, TAR, file]
        return [*self.words, "--endpoint-url", endpoint, "s3", "cp", "--only-show-errors",
                f"s3://{BUCKET}/{TAR}", file]  # fmt: skip


def client(place: Path) -> Client:
    """awscli, installed for this run; else a script with boto3."""
    venv.create(place, with_pip=True)
    python = place / "bin/python"
    command = [python, "-m", "pip", "install", "--quiet", "awscli"]
    if subprocess.run(command, stdout=sys.stderr, check=False).returncode == 0:
        return Client("aws s3 cp", (place / "bin/aws",))
    return Client("boto3", (sys.executable, "-c", PLAIN))


class Bench:
    """Both ways to fill a folder that is new."""

    def __init__(self, folder: Path, plan: Path, endpoint: str, plain: Client) -> None:
        self._out = folder / "out"
        self._tar = folder / "fetched.tar"
        self._ready = folder / "ready"
        self._tree = folder / "tree"
        self._plan = plan
        self._endpoint = endpoint
        self._plain = plain
        kept = ("PATH", "HOME", "LANG", "TMPDIR")
        self._environment = {name: os.environ[name] for name in kept if name in os.environ} | KEYS

    def _pull_words(self) -> list[str | Path]:
        return [
            WARMUP, "pull", self._plan, "--store", f"s3://{BUCKET}", "--root", self._out,
            "--device", "cpu", "--fingerprint", MARK.digest, "--ready", self._ready,
        ]  # fmt: skip

    def pull(self) -> None:
        """The product's way."""
        self._run(self._pull_words())
        assert self._ready.exists()

    def copy(self) -> None:
        """The plain way: what a shell script in an init container does."""
        self._run(self._plain.command(self._endpoint, self._tar))
        self._out.mkdir()
        self._run(["tar", "-xf", self._tar, "-C", self._out])

    def _run(self, words: list[str | Path]) -> None:
        environment = {**self._environment, "AWS_ENDPOINT_URL": self._endpoint}
        done = subprocess.run(words, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def _timed(self, way: str) -> float:
        subprocess.run(["sync", "-f", self._tree], check=True)
        began = time.perf_counter()
        getattr(self, way)()
        took = time.perf_counter() - began
        self._check()
        aside(self._out)
        for file in (self._tar, self._ready):
            file.unlink(missing_ok=True)
        return took

    def _check(self) -> None:
        """Every file is there."""
        for path in self._tree.rglob("*.*"):
            assert (self._out / path.relative_to(self._tree)).stat().st_size == path.stat().st_size

    def pairs(self, count: int) -> Row:
        """Seconds of both, pair by pair; one pair before them is not counted."""
        found = []
        for number in range(count + 1):
            order = ("copy", "pull") if number % 2 else ("pull", "copy")
            took = {way: self._timed(way) for way in order}
            found.append((took["pull"], took["copy"]))
        ratio = round(statistics.median(ours / theirs for ours, theirs in found[1:]), 3)
        ours, theirs = (round(statistics.median(way), 3) for way in zip(*found[1:], strict=True))
        against = f"{self._plain.name} + tar -x"
        return Row(
            "pull_vs_cp_tar",
            ours,
            "s",
            against,
            ratio,
            theirs,
            target="<= 1.2",
            passed=ratio <= 1.2,
        )

    def first_requests(self, count: int) -> Row:
        """Median seconds until something is at the store's port."""
        seconds = round(statistics.median(self._first_request() for _ in range(count)), 3)
        return Row("pull_first_request_s", seconds, "s", target="<= 0.5", passed=seconds <= 0.5)

    def _first_request(self) -> float:
        with socket.create_server(("127.0.0.1", 0)) as door:
            address = f"http://127.0.0.1:{door.getsockname()[1]}"
            environment = {**self._environment, "AWS_ENDPOINT_URL": address}
            began = time.perf_counter()
            process = subprocess.Popen(
                self._pull_words(),
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            with door.accept()[0] as connection:
                connection.recv(1)
                took = time.perf_counter() - began
                process.kill()
            process.wait()
        return took


if __name__ == "__main__":
    main()
