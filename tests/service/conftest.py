"""Services that tests share, and one for a test alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import Template
from services import Service, token_file


@pytest.fixture
def service(fresh: Template, tmp_path: Path) -> Iterator[Service]:
    """One for this test alone; not started."""
    made = Service(fresh, tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="session")
def shared(fresh: Template, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One without a token for all tests that only ask."""
    made = Service(
        fresh, tmp_path_factory.mktemp("service"), {"devices": ["cpu", "cuda:0"]}
    ).start()
    yield made
    made.close()


@pytest.fixture(scope="session")
def locked(fresh: Template, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One with a token."""
    folder = tmp_path_factory.mktemp("locked")
    made = Service(fresh, folder, {"token_file": token_file(folder)}).start()
    yield made
    made.close()
