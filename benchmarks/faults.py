"""What is lost or damaged when processes are killed, stores fail, disks fill up and clocks are wrong.

Each trial is one fault in a warm-up or a restore by the real code on a real root and store; a compile is a
few lines that write files whose bytes are known. Kills are real SIGKILLs of real processes, the S3 server is
moto over HTTP, the disk a tmpfs (that needs root: else ``disk_full`` is left out). After every fault
nothing damaged may lie in the root or the store, everything that was published must come back byte by byte,
the next run must complete, and a fresh root must restore all. A fault that came too late is tried again.
"""

from __future__ import annotations

import argparse
import logging
import queue
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

# The tests try the same faults.
sys.path.extend(str(Path(__file__).parents[1] / name) for name in ("", "tests", "tests/faults"))

from ground import IMPATIENT, IMPATIENT_BUDGET, Ground, lane
from kinds import KINDS, attempt
from moto.server import ThreadedMotoServer
from mounts import can_mount
from processes import Template
from proxy import STALL_SECONDS, Proxy
from results import Row, table, write
from trials import Outcome

COUNTS = {kind: 105 if kind.startswith("kill") else 52 for kind in KINDS}
LANES = 3
"""Trials at a time: they wait for each other's stalls, and for compiles that sleep."""
FAULTS = ("lost", "damaged", "unfinished", "crashed", "twice")
NAMES = {"damaged": "damaged_used", "twice": "compiled_twice"}
UNITS = {
    "lost": "targets",
    "damaged": "files",
    "unfinished": "runs",
    "crashed": "runs",
    "twice": "targets",
}


def main() -> None:
    """Tries and reports; leaves with 1 when anything was lost, damaged or not completed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--seed", type=int, default=1, help="of everything random (default 1)")
    parser.add_argument(
        "--counts", default="", metavar="KIND=N,…", help=f"other numbers of trials than {COUNTS}"
    )
    parser.add_argument("--lanes", type=int, default=LANES, help=f"at a time (default {LANES})")
    options = parser.parse_args()
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    counts, left_out = wanted(options.counts)
    began = time.monotonic()
    outcomes = trials(counts, options.seed, options.lanes)
    rows = [*summed(outcomes, counts), *by_kind(outcomes)]
    for outcome in outcomes:
        if not outcome.well:
            print(outcome, file=sys.stderr)
    path = write("faults", rows, how=how(options.seed, began), left_out=left_out)
    print(path.read_text(encoding="utf-8") if options.json else table(rows), end="")
    sys.exit(not all(outcome.well for outcome in outcomes))


def wanted(text: str) -> tuple[dict[str, int], dict[str, str]]:
    """How many of each kind, and which cannot be had here."""
    given = dict(pair.split("=") for pair in text.split(",")) if text else {}
    counts = COUNTS | {kind: int(count) for kind, count in given.items()}
    if counts["disk_full"] and not can_mount():
        return counts | {"disk_full": 0}, {
            "faults_tried_disk_full": "mounts are not permitted here"
        }
    return counts, {}


def trials(counts: Mapping[str, int], seed: int, lanes: int) -> list[Outcome]:
    """What came of each, kind by kind."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="faults-")))
        ground = stack.enter_context(_ground(folder))
        free: queue.SimpleQueue[Proxy] = queue.SimpleQueue()
        for _ in range(lanes):
            free.put(stack.enter_context(lane(ground)))

        def one(kind: str, number: int) -> Outcome:
            proxy = free.get()
            try:
                return attempt(kind, ground, proxy, seed, number)
            finally:
                free.put(proxy)

        pool = stack.enter_context(ThreadPoolExecutor(lanes))
        jobs = [pool.submit(one, kind, number) for kind, n in counts.items() for number in range(n)]
        return [job.result() for job in _telling(jobs)]


def _telling(jobs: list) -> Iterator:  # type: ignore[type-arg]
    for number, job in enumerate(jobs, 1):
        yield job
        if number % 50 == 0:
            print(f"{number} of {len(jobs)} trials", file=sys.stderr)


@contextmanager
def _ground(folder: Path) -> Iterator[Ground]:
    (folder / "processes").mkdir()
    fresh = Template(folder / "processes")
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield Ground(fresh, f"http://{host}:{port}", folder)
    finally:
        server.stop()
        fresh.close()


def summed(outcomes: list[Outcome], counts: Mapping[str, int]) -> list[Row]:
    """All kinds together."""
    struck, asked = sum(outcome.struck for outcome in outcomes), sum(counts.values())
    tried = Row(
        "faults_tried", struck, "faults", "asked for", struck / max(1, asked), asked, ">= 1",
        struck >= asked,
    )  # fmt: skip
    return [tried, *(_count(fault, outcomes) for fault in FAULTS)]


def _count(fault: str, outcomes: list[Outcome], suffix: str = "") -> Row:
    value = sum(len(getattr(outcome, fault)) for outcome in outcomes)
    name = f"faults_{NAMES.get(fault, fault)}{suffix}"
    return Row(name, value, UNITS[fault], target="<= 0", passed=value == 0)


def by_kind(outcomes: list[Outcome]) -> list[Row]:
    """The same for each kind."""
    rows = []
    for kind in Counter(outcome.kind for outcome in outcomes):
        own = [outcome for outcome in outcomes if outcome.kind == kind]
        struck = sum(outcome.struck for outcome in own)
        rows.append(Row(f"faults_tried_{kind}", struck, "faults"))
        rows += [_count(fault, own, f"_{kind}") for fault in ("lost", "damaged")]
    return rows


def how(seed: int, began: float) -> dict[str, str | int]:
    """What the figures are of."""
    return {
        "seed": seed,
        "seconds": round(time.monotonic() - began),
        "faults_unfinished": "later runs that did not complete",
        "faults_crashed": "runs that ended otherwise than well or with an error of ours",
        "faults_tried_cut": f"in cut, errors and stall the product's own time-outs are shorter: "
        f"storage_options={{'config_kwargs': {IMPATIENT}}}, budget_seconds={IMPATIENT_BUDGET:g}",
        "faults_tried_stall": f"silence of {STALL_SECONDS:g} s; with those time-outs it costs less",
        "store": "a directory, or moto over HTTP in the benchmark's own process",
    }


if __name__ == "__main__":
    main()
