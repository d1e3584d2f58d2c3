"""What the tests of the main job share: fresh processes, an S3 server, one store that is warm."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from moto.server import ThreadedMotoServer
from places import Cold, Place, S3Server
from processes import Template
from training import warm_and_train
from workloads import plan

from compilecache.shapes import ShapePlan

settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")  # no test is about time


@pytest.fixture(scope="session")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Template]:
    """Starts fresh processes."""
    template = Template(tmp_path_factory.mktemp("processes"))
    yield template
    template.close()


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """Nothing yet."""
    return Place(tmp_path)


@pytest.fixture(scope="session")
def cold(fresh: Template, tmp_path_factory: pytest.TempPathFactory) -> Cold:
    """The two-layer model, compiled from nothing: training with 2 and 3 rows, evaluation with 2."""
    place = Place(tmp_path_factory.mktemp("cold"))
    train, evaluate = plan("two_layer", [2, 3]), plan("two_layer", [2], ("eval",))
    place.write(ShapePlan(workload=train.workload, specs=(*train.specs, *evaluate.specs)))
    return Cold(place, fresh.call(warm_and_train, place.plan_file, place.root, place.store))


@pytest.fixture
def seeded(cold: Cold, place: Place) -> Place:
    """Nothing yet, but for what torch compiles in every root to find out what the CPU can."""
    cold.seed(place.root)
    return place


@pytest.fixture
def warmed(cold: Cold, tmp_path: Path) -> Place:
    """A private copy of that root, store and plan."""
    shutil.copytree(cold.place.folder, tmp_path, dirs_exist_ok=True)
    return Place(tmp_path)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """A server that lives as long as the tests."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield S3Server(f"http://{host}:{port}")
    server.stop()
