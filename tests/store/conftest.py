"""Stores to test against: a directory, memory, and two real S3 servers over HTTP."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer
from stores import HERE, Place

from compilecache.store import ArtifactStore

S3RVER = HERE.parent / "s3rver"


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
