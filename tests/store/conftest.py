"""Stores to test against: a directory, memory, and two real S3 servers over HTTP."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer

from compilecache.store import ArtifactStore

HERE = Path(__file__).parent
S3RVER = HERE.parent / "s3rver"


@dataclass(frozen=True)
class Place:
    """Where a store is, for this process and others."""

    url: str
    options: Mapping[str, str] = field(default_factory=dict)

    def open(self, budget_seconds: float = 20) -> ArtifactStore:
        """A new client of the store."""
        return ArtifactStore.open(
            self.url, budget_seconds=budget_seconds, storage_options=self.options
        )

    def task(self, seeds: list[int], *, size: int = 20_000, **more: object) -> dict[str, object]:
        """What a publisher in another process is to do here."""
        return {"url": self.url, "options": dict(self.options), "seeds": seeds, "size": size} | more


class Publishers:
    """Processes that are ready to publish, one a task; the end of the block waits for them."""

    def __init__(self, tasks: list[dict[str, object]], folder: Path) -> None:
        self._folder = folder
        self._process = subprocess.Popen(
            [sys.executable, HERE / "publish_process.py", json.dumps(tasks), folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(HERE.parents[1])},
        )

    def __enter__(self) -> Publishers:
        self.pids = [int(pid) for pid in self._process.stdout.readline().split()]
        assert self.pids
        return self

    def start(self, number: int) -> None:
        """Lets one of them publish."""
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()

    def said(self, number: int) -> list[str]:
        """What the store held according to one of them: a line for each record, or error."""
        return (self._folder / f"{number}.out").read_text().splitlines()

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=60)


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[dict[str, str]]:
    """Options for a moto server that lives as long as the tests."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield {"endpoint_url": f"http://{host}:{port}", "key": "testing", "secret": "testing"}
    server.stop()


@pytest.fixture(scope="session")
def s3rver_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Options for an s3rver that lives as long as the tests; skipped without it, unless it must run."""
    node = shutil.which("node")
    if node is None or not (S3RVER / "node_modules").is_dir():
        words = "needs node and npm: install them, then 'make test' fetches s3rver"
        (pytest.fail if os.environ.get("NEED_S3RVER") else pytest.skip)(words)
    folder = tmp_path_factory.mktemp("s3rver")
    server = subprocess.Popen(
        [node, S3RVER / "serve.js", folder, "bucket"], stdout=subprocess.PIPE, text=True
    )
    try:
        port = int(server.stdout.readline())
        yield {"endpoint_url": f"http://127.0.0.1:{port}", "key": "S3RVER", "secret": "S3RVER"}
    finally:
        server.kill()
        server.communicate()


@pytest.fixture
def s3rver_place(s3rver_endpoint: dict[str, str]) -> Place:
    """A prefix of its own in a bucket that overwrites what it is asked to create only."""
    return Place(f"s3://bucket/{uuid.uuid4().hex}", s3rver_endpoint)


@pytest.fixture
def s3_place(s3_endpoint: dict[str, str]) -> Place:
    """A prefix in a fresh bucket."""
    bucket = f"bucket-{uuid.uuid4().hex[:12]}"
    client = boto3.client(
        "s3",
        endpoint_url=s3_endpoint["endpoint_url"],
        aws_access_key_id="testing",
        aws_secret_access_key="testing",
        region_name="us-east-1",
    )
    client.create_bucket(Bucket=bucket)
    client.close()
    return Place(f"s3://{bucket}/some/prefix", s3_endpoint)


@pytest.fixture(params=["local", "memory", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Each kind of store in turn."""
    makers: dict[str, Callable[[], Place]] = {
        "local": lambda: Place(str(tmp_path / "store")),
        "memory": lambda: Place(f"memory://{uuid.uuid4().hex}"),
        "s3": lambda: request.getfixturevalue("s3_place"),
    }
    return makers[request.param]()


@pytest.fixture
def store(place: Place) -> ArtifactStore:
    """A client of each kind of store in turn."""
    return place.open()
