"""``warmup fleet`` on local Ray clusters of 2 and 4 hosts, 12 targets, and a host killed on the way.

Every host is a Ray node of its own with a root of its own; the store is a folder. The last host is killed with
SIGKILL once it has compiled something and is at its next target. Compiles are counted where they happen, by
the hosts themselves (``fleet_ray_workload.py``), not by what ``warmup fleet`` says. The wall times hold the
imports of torch, which share the cores of one machine, compiles that are mostly asleep, and the 45 seconds
after which the claim of the dead host lapses.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from ray.cluster_utils import Cluster
from results import Row, path_of, table, write

from compilecache.examples import specs_of_examples
from compilecache.shapes import ShapePlan, plan_of

HERE = Path(__file__).parent
WARMUP = Path(sys.executable).with_name("warmup")
FLEETS = (2, 4)
TARGETS = 12
WIDTH = 8
SMALL = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": 80_000_000}
HOSTS = {
    "PYTHONPATH": os.pathsep.join(map(str, (HERE.parent, HERE))),
    "OMP_NUM_THREADS": "1",
    # One process a host, and no libraries just to ask the CPU what it can.
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "TORCHINDUCTOR_VEC_ISA_OK": "1",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """One fleet."""

    told: dict[str, object]
    """The line of ``warmup fleet``."""
    compiles: Counter[str]
    """By target, as the hosts counted them."""
    seconds: float


def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--wait", type=float, default=3.0, help="seconds a compile (default 3)")
    options = parser.parse_args()
    found = {}
    for number in FLEETS:
        with tempfile.TemporaryDirectory(prefix="fleet-ray-") as folder:
            found[number] = fleet(Path(folder), number, options.wait)
    how = {
        "killed": "the last host, at its second target",
        "compiles": f"each is {options.wait:g} s asleep and a moment of its own",
        "lease_seconds": 45,
        "store": "a folder",
    }
    rows = [row for number, outcome in found.items() for row in rows_of(number, outcome)]
    worst = max(outcome.compiles.total() for outcome in found.values())
    rows.insert(0, counted("ray_compiles", worst))
    path = write("fleet_ray", rows, how=how)
    assert path == path_of("fleet_ray")
    print(path.read_text(encoding="utf-8") if options.json else table(rows), end="")


def fleet(folder: Path, number: int, wait: float) -> Outcome:
    """A cluster of so many hosts, a cold plan on it, and its last host killed."""
    counts = folder / "compiles"
    os.environ |= HOSTS | {"FLEET_WAIT": str(wait), "FLEET_COMPILES": str(counts)}
    cluster = Cluster()
    try:
        hosts = [
            cluster.add_node(wait=False, env_vars={"COMPILECACHE_ROOT": f"{folder}/{n}"}, **SMALL)
            for n in range(number)
        ]
        cluster.wait_for_nodes()
        began = time.perf_counter()
        command = [WARMUP, "fleet", laid(folder), "--ray", cluster.address, "--device", "cpu"]
        process = subprocess.Popen(
            [*command, "--store", folder / "store"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        until_second(process, f"/{hosts[-1].node_id[:6]}: ")
        cluster.remove_node(hosts[-1], allow_graceful=False)
        out, err = process.communicate()
        seconds = time.perf_counter() - began
    finally:
        cluster.shutdown()
    assert process.returncode == 0, err
    told: dict[str, object] = json.loads(out)
    assert len(told["lost"]) == 1, told  # type: ignore[arg-type]
    return Outcome(told, Counter(counts.read_text().split()), seconds)


def laid(folder: Path) -> Path:
    """The plan."""
    shapes = [{"x": torch.empty(rows, WIDTH, device="meta")} for rows in range(2, 2 + TARGETS)]
    from fleet_worker import Product

    specs = specs_of_examples(shapes, Product(), ("train",))
    plan: ShapePlan = plan_of(specs, workload="fleet_ray_workload:product")
    path = folder / "plan.yaml"
    path.write_text(plan.dump(), encoding="utf-8")
    return path


def until_second(process: subprocess.Popen[str], host: str) -> None:
    """Returns when a host has compiled a target and begins another."""
    assert process.stderr is not None
    done = False
    for line in process.stderr:
        done = done or (host in line and "] compiled " in line)
        if done and f"{host}compiling " in line:
            return
    raise AssertionError(f"{host} never got to a second target")


def counted(figure: str, compiles: int) -> Row:
    """Compiles against targets."""
    return Row(
        figure, compiles, "compiles", "targets", round(compiles / TARGETS, 3), TARGETS, "<= 1",
        compiles == TARGETS,
    )  # fmt: skip


def rows_of(number: int, outcome: Outcome) -> list[Row]:
    """Of one fleet."""
    published = outcome.told["published"]
    assert isinstance(published, int)
    return [
        counted(f"ray_compiles_{number}", outcome.compiles.total()),
        Row(
            f"ray_published_{number}", published, "targets", "targets", published / TARGETS, TARGETS,
            ">= 1", published == TARGETS == len(outcome.compiles),
        ),
        Row(f"ray_wall_{number}", round(outcome.seconds, 2), "s"),
    ]  # fmt: skip


if __name__ == "__main__":
    main()
