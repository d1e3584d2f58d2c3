"""Hosts of a Ray cluster on this machine: ``python ray_hosts.py N``, in the environment that they get.

Each host has ``$ROOTS/<number>`` for a root, and the last one HANGS. Prints the address and the hosts' ids
as JSON; then for every line with a number kills that host, with SIGKILL; ends with its standard input.
"""

from __future__ import annotations

import json
import os
import sys

from ray.cluster_utils import Cluster

SMALL = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": 80_000_000}
SOON = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 3,
}
"""A dead host is noticed within seconds."""


def main() -> None:
    """Starts them, obeys, ends them."""
    count = int(sys.argv[1])
    cluster = Cluster()
    try:
        hosts = []
        for number in range(count):
            variables = {"COMPILECACHE_ROOT": f"{os.environ['ROOTS']}/{number}"}
            if number == count - 1:
                variables["HANGS"] = "1"
            more = {"_system_config": SOON, "include_dashboard": False} if number == 0 else {}
            hosts.append(cluster.add_node(wait=False, env_vars=variables, **SMALL, **more))
        cluster.wait_for_nodes()
        print(json.dumps([cluster.address, [host.node_id for host in hosts]]), flush=True)
        for line in sys.stdin:
            cluster.remove_node(hosts[int(line)], allow_graceful=False)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
