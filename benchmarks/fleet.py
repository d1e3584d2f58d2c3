"""How pods that start cold at once share the compiling: real processes, roots of their own, one S3 store.

The counts are of real compiles (one matrix product a target). The wall times are of compiles that take a
fixed time asleep on top of that, since the pods of this benchmark share the cores of one machine; the
result says so. The store is a moto server over HTTP in the benchmark's own process.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import boto3
from fleet_worker import TARGETS
from moto.server import ThreadedMotoServer
from results import Row, path_of, table, write

WORKER = Path(__file__).with_name("fleet_worker.py")
FLEETS = (1, 2, 4, 8)
KEYS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
}


def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--pods", type=int, default=4, help="pods that are counted (default 4)")
    parser.add_argument("--wait", type=float, default=10.0, help="seconds a compile (default 10)")
    options = parser.parse_args()
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        bench = Bench(f"http://{host}:{port}")
        counted = bench.fleet(options.pods)
        walls = {number: bench.fleet(number, wait=options.wait) for number in FLEETS}
    finally:
        server.stop()
    how = {
        "fleet_compiles": f"real compiles, {options.pods} pods",
        "fleet_wall_vs_one_pod": f"each compile is {options.wait:g} s asleep and a moment of its own; "
        "the pods share the cores of one machine",
        "store": "moto over HTTP",
    }
    rows = [*counts(counted), *times(walls)]
    path = write("fleet", rows, how=how)
    assert path == path_of("fleet")
    print(path.read_text(encoding="utf-8") if options.json else table(rows), end="")


class Bench:
    """Fleets, each on a bucket of its own."""

    def __init__(self, endpoint: str) -> None:
        self._environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("TORCHINDUCTOR_", "COMPILECACHE_", "AWS_"))
        }
        self._environment |= {**KEYS, "AWS_ENDPOINT_URL": endpoint, "OMP_NUM_THREADS": "1"}
        # One process a pod, and no libraries just to ask the CPU what it can.
        self._environment |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_VEC_ISA_OK": "1"}
        self._environment["PYTHONPATH"] = str(WORKER.parents[1])
        self._client = boto3.client(
            "s3",
            endpoint_url=endpoint,
            aws_access_key_id="testing",
            aws_secret_access_key="testing",
            region_name="us-east-1",
        )
        self._buckets = 0

    def fleet(self, number: int, *, wait: float = 0.0) -> list[dict[str, float]]:
        """What each of so many pods says of its cold start; all start at the same moment."""
        self._buckets += 1
        bucket = f"fleet-{self._buckets}"
        self._client.create_bucket(Bucket=bucket)
        with tempfile.TemporaryDirectory(prefix="fleet-") as folder:
            words = [sys.executable, WORKER, "--store", f"s3://{bucket}/cache", "--wait", str(wait)]
            pods = [self._pod([*words, "--root", f"{folder}/{n}"]) for n in range(number)]
            for pod in pods:
                assert pod.stdout is not None
                while pod.stdout.readline().strip() != "ready":
                    pass
            for pod in pods:
                assert pod.stdin is not None
                pod.stdin.write("\n")
                pod.stdin.flush()
            said = [pod.communicate()[0] for pod in pods]
        return [json.loads(text.splitlines()[-1]) for text in said]

    def _pod(self, words: list[str | Path]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self._environment,
        )


def counts(pods: list[dict[str, float]]) -> list[Row]:
    """Of real compiles."""
    compiles = sum(pod["compiles"] for pod in pods)
    ready = sum(pod["warm"] and pod["targets"] == TARGETS and not pod["gave_up"] for pod in pods)
    return [
        Row(
            "fleet_compiles",
            compiles,
            "compiles",
            "targets",
            compiles / TARGETS,
            TARGETS,
            "<= 1",
            compiles == TARGETS,
        ),
        Row(
            "fleet_pods_warm",
            ready,
            "pods",
            "pods",
            ready / len(pods),
            len(pods),
            ">= 1",
            ready == len(pods),
        ),
    ]


def times(fleets: dict[int, list[dict[str, float]]]) -> list[Row]:
    """From the start until the last pod is warm, against one pod."""
    walls = {number: max(pod["seconds"] for pod in pods) for number, pods in fleets.items()}
    rows = []
    for number, wall in walls.items():
        share = (
            -(-TARGETS // number) / TARGETS
        )  # a pod that takes one more than the others sets the pace
        ratio, most = wall / walls[1], round(share * 1.35, 3)
        rows.append(
            Row(
                f"fleet_wall_vs_one_pod_{number}",
                round(wall, 2),
                "s",
                "one pod",
                round(ratio, 3),
                round(walls[1], 2),
                f"<= {most:g}",
                ratio <= most,
            )
        )
        compiles = sum(pod["compiles"] for pod in fleets[number])
        rows.append(
            Row(
                f"fleet_compiles_{number}",
                compiles,
                "compiles",
                "targets",
                round(compiles / TARGETS, 3),
                TARGETS,
                "<= 1",
                compiles == TARGETS,
            )
        )
    return rows


if __name__ == "__main__":
    main()
