"""What the tests of the main job share: fresh processes, an S3 server, one store that is warm."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from compilecache.shapes import ShapePlan
from processes import Template


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


@pytest.fixture(scope="session")
def _warm(fresh: Template, tmp_path_factory: pytest.TempPathFactory) -> tuple[Place, object]:
    from main.steps import warm_cold

    place = Place(tmp_path_factory.mktemp("warm"))
    return place, fresh.call(warm_cold, place.root, place.store, place.plan_file)


@pytest.fixture
def warmed(_warm: tuple[Place, object], tmp_path: Path) -> Place:
    """A private copy of a root and a store that are warm for a plan of the two-layer model."""
    shutil.copytree(_warm[0].folder, tmp_path, dirs_exist_ok=True)
    return Place(tmp_path)
