"""A Ray cluster as hosts to put jobs on: one job a host, with all of its GPUs in sight.

The only module that imports Ray. Jobs take no CPUs or GPUs of Ray's: a GPU that Ray handed out alone
would be index 0 to the job, and what is compiled for a device carries its index.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import TypedDict, TypeVar

from compilecache import CompileCacheError, PlanError
from warmup.hosts import HostJob

K = TypeVar("K")

UNTOUCHED_DEVICES = {
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
    "RAY_EXPERIMENTAL_NOSET_ROCR_VISIBLE_DEVICES": "1",
    "RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""Has Ray leave the list of visible GPUs alone: older ones empty it for who asks for none (ray#54868)."""
ID_LETTERS = 6
KNOCK_SECONDS = 10.0
_ADDRESS = "Name HOST:6379, or auto, on a host of the cluster; Python and Ray have to be the cluster's versions"


@dataclass(frozen=True, slots=True)
class Node:
    """A host of the cluster."""

    id: str
    name: str
    """Its host name, with the first letters of its id where several have one name."""
    gpus: float
    """As Ray counts them."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a host answered."""

    value: object = None
    """What the method returned."""
    fault: str = ""
    """Why it did not return."""
    lost: bool = False
    """Whether the host, or its process, is gone."""


class Cluster:
    """Jobs on the hosts of a cluster that this process is connected to."""

    def __init__(self, ray: ModuleType, nodes: Sequence[Node]) -> None:
        self._ray = ray
        self._actors: dict[Node, object] = {}
        self.nodes = nodes
        """Hosts that are alive, those with most GPUs first."""

    def start(self, node: Node) -> None:
        """A job on a host: a process of its own, which ends when the host does, and is not begun again."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        placed = self._ray.remote(HostJob).options(
            num_cpus=0,
            num_gpus=0,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
        )
        self._actors[node] = placed.remote()

    def ask(
        self, node: Node, method: Callable[..., object], *words: object, **more: object
    ) -> object:
        """Begins a method of a host's job; a reference for ``next_answer``."""
        return getattr(self._actors[node], method.__name__).remote(*words, **more)

    def next_answer(
        self, asked: dict[object, K], seconds: float | None = None
    ) -> tuple[K, Answer] | None:
        """Takes the next that has been answered out of ``asked``; None when the time was over."""
        done, _ = self._ray.wait(list(asked), num_returns=1, timeout=seconds)
        return (asked.pop(done[0]), self._answer(done[0])) if done else None

    def _answer(self, reference: object) -> Answer:
        from ray.exceptions import RayError, RayTaskError

        try:
            return Answer(self._ray.get(reference))
        except RayTaskError as error:
            return Answer(fault=_last_line(error))
        except RayError as error:
            return Answer(fault=_reason(error), lost=not getattr(error, "actor_init_failed", False))


@contextmanager
def connected(address: str, working_dir: Path | None) -> Iterator[Cluster]:
    """The cluster. What runs there for this process ends with the block.

    What Ray prints is dropped, but for ``COMPILECACHE_DEBUG``: it is long, and of hosts that die the
    answers tell. Raises PlanError without Ray, or for a folder that Ray does not
    take, CompileCacheError when nothing answers.
    """
    debug = bool(os.environ.get("COMPILECACHE_DEBUG"))
    with redirect_stdout(sys.stderr if debug else StringIO()):
        ray = _connect(address, working_dir)
        try:
            yield Cluster(ray, _alive(ray.nodes()))
        finally:
            ray.shutdown()


def _connect(address: str, working_dir: Path | None) -> ModuleType:
    try:
        import ray
    except ImportError as error:
        raise PlanError(
            f"a fleet on Ray needs Ray, which cannot be imported ({error})",
            next_step="Install it: pip install 'compilecache[fleet]'",
            field="ray",
        ) from error
    _knock(address)
    environment: dict[str, object] = {"env_vars": UNTOUCHED_DEVICES}
    if working_dir is not None:
        environment["working_dir"] = str(working_dir.absolute())
    try:
        ray.init(
            address=address,
            runtime_env=environment,
            log_to_driver=False,
            logging_level=logging.CRITICAL,
        )
    except (ConnectionError, RuntimeError, TimeoutError) as error:
        raise CompileCacheError(
            f"no Ray cluster answers at '{address}': {_last_line(error)}",
            next_step=_ADDRESS,
        ) from error
    except ValueError as error:
        raise PlanError(
            f"Ray refuses address '{address}' or folder '{working_dir}': {_last_line(error)}",
            next_step="Name a folder that holds the workload's code and little else with --working-dir",
            field="working-dir",
        ) from error
    module: ModuleType = ray
    return module


def _knock(address: str) -> None:
    """Refuses at once an address where nothing listens; Ray itself would try for many minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), KNOCK_SECONDS).close()
    except OSError as error:
        raise CompileCacheError(
            f"no Ray cluster answers at '{address}': {error}", next_step=_ADDRESS
        ) from error


class _Found(TypedDict):
    """What of Ray's own list is read."""

    Alive: bool
    NodeID: str
    NodeManagerHostname: str
    Resources: Mapping[str, float]


def _alive(found: Sequence[_Found]) -> list[Node]:
    alive = [node for node in found if node["Alive"]]
    named = Counter(node["NodeManagerHostname"] for node in alive)
    nodes = []
    for node in alive:
        host, id = node["NodeManagerHostname"], node["NodeID"]
        name = host if named[host] == 1 else f"{host}/{id[:ID_LETTERS]}"
        nodes.append(Node(id, name, node["Resources"].get("GPU", 0)))
    return sorted(nodes, key=lambda node: (-node.gpus, node.name))


def _reason(error: BaseException) -> str:
    """Ray's first sentence, and the error that a traceback in it ends with; no tables, no logs."""
    first = str(error).strip().partition("\n")[0].rstrip(".:")
    last = _last_line(error)
    name, mark, _ = last.partition(": ")
    return f"{first}: {last}" if mark and name.endswith("Error") and last != first else first


def _last_line(error: BaseException) -> str:
    """Of an error that carries a traceback as its text."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__
