"""What the tests of the main job share: fresh processes, an S3 server, one store that is warm."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer
from processes import Template
from training import Trained, warm_and_train
from workloads import plan

from compilecache.shapes import ShapePlan


@pytest.fixture(scope="session")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Template]:
    """Starts fresh processes."""
    template = Template(tmp_path_factory.mktemp("processes"))
    yield template
    template.close()


@dataclass(frozen=True)
class Place:
    """A cache root, a store, and the plan they belong to, in folders of their own."""

    folder: Path

    @property
    def root(self) -> Path:
        """The cache root; may not exist yet."""
        return self.folder / "root"

    @property
    def store(self) -> Path:
        """The store; may not exist yet."""
        return self.folder / "store"

    @property
    def plan_file(self) -> Path:
        """Where the plan is written."""
        return self.folder / "plan.yaml"

    @property
    def plan(self) -> ShapePlan:
        """The plan."""
        return ShapePlan.load(self.plan_file)

    def write(self, plan: ShapePlan) -> Path:
        """Makes this the plan."""
        self.plan_file.write_text(plan.dump())
        return self.plan_file

    @property
    def words(self) -> tuple[object, ...]:
        """Plan, device, root and store as a command takes them."""
        return (self.plan_file, "--device", "cpu", "--root", self.root, "--store", self.store)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """Nothing yet."""
    return Place(tmp_path)


@dataclass(frozen=True)
class Cold:
    """A warm-up that had to compile, and where it left its root and store."""

    place: Place
    trained: Trained


@pytest.fixture(scope="session")
def cold(fresh: Template, tmp_path_factory: pytest.TempPathFactory) -> Cold:
    """The two-layer model, compiled from nothing: training with 2 and 3 rows, evaluation with 2."""
    place = Place(tmp_path_factory.mktemp("cold"))
    train, evaluate = plan("two_layer", [2, 3]), plan("two_layer", [2], ("eval",))
    place.write(ShapePlan(workload=train.workload, specs=(*train.specs, *evaluate.specs)))
    return Cold(place, fresh.call(warm_and_train, place.plan_file, place.root, place.store))


@pytest.fixture
def warmed(cold: Cold, tmp_path: Path) -> Place:
    """A private copy of that root, store and plan."""
    shutil.copytree(cold.place.folder, tmp_path, dirs_exist_ok=True)
    return Place(tmp_path)


@dataclass(frozen=True)
class S3Server:
    """A moto server over HTTP."""

    url: str

    def bucket(self) -> str:
        """The address of a store in a bucket of its own."""
        name = f"bucket-{uuid.uuid4().hex[:12]}"
        client = boto3.client(
            "s3",
            endpoint_url=self.url,
            aws_access_key_id="testing",
            aws_secret_access_key="testing",
            region_name="us-east-1",
        )
        client.create_bucket(Bucket=name)
        client.close()
        return f"s3://{name}/cache"

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to find it, as a user would set it."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
        }


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """A server that lives as long as the tests."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield S3Server(f"http://{host}:{port}")
    server.stop()
