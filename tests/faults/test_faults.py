"""A few faults of each kind, as ``benchmarks/faults.py`` tries hundreds of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ground import Ground, lane
from kinds import KINDS, attempt
from moto.server import ThreadedMotoServer
from processes import Template
from proxy import Proxy

SEED = 21
COUNTS = {"kill_publisher": 2, "kill_restorer": 2, "flipped": 2}
"""Of the other kinds one."""


@pytest.fixture(scope="module")
def ground(fresh: Template, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    """Processes, stores, a server."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield Ground(fresh, f"http://{host}:{port}", tmp_path_factory.mktemp("faults"))
    server.stop()


@pytest.fixture(scope="module")
def between(ground: Ground) -> Iterator[Proxy]:
    """What lies between pods and the server."""
    with lane(ground) as own:
        yield own


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_costs_time_and_nothing_else(kind: str, ground: Ground, between: Proxy) -> None:
    """Nothing damaged is used or published, nothing published is lost, the next run completes."""
    for number in range(1, 1 + COUNTS.get(kind, 1)):
        outcome = attempt(kind, ground, between, SEED, number)
        assert outcome.struck
        assert outcome.well, outcome
