"""Stores to test against: a directory, memory, and a real S3 server over HTTP."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer

from compilecache.store import ArtifactStore


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


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[dict[str, str]]:
    """Options for a moto server that lives as long as the tests."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield {"endpoint_url": f"http://{host}:{port}", "key": "testing", "secret": "testing"}
    server.stop()


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
