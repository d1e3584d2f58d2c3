"""The service under load: reads while 1,000 jobs run and 50 clients listen, and what a SIGKILL costs.

Usage: service.py [--jobs 1000] [--listeners 50] [--examples 60] [--json]

Jobs are done by a worker that compiles nothing: the service is what is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import math
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.queues import Queue
from pathlib import Path

from results import Row, report

ROOT = Path(__file__).parent.parent
WORKER = [sys.executable, "-S", "-E", str(ROOT / "tests" / "service" / "fake_worker.py")]
SERVE = "import sys; from warmup.service.server import main; main(sys.argv[1], sys.argv[2:])"
READERS = 4
PAUSE_SECONDS = 0.01
WARM_UP_JOBS = 200
"""Before memory is looked at for the first time."""


class Service:
    """One service in a process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process, self.address = self._start(0)

    def _start(self, port: int) -> tuple[subprocess.Popen[str], tuple[str, int]]:
        settings = {
            "workloads": ["workload:any"],
            "devices": ["cuda:0", "cuda:1"],
            "port": port,
            "store": "none",
            "root": str(self.folder / "root"),
            "state": str(self.folder / "state"),
        }
        process = subprocess.Popen(
            [sys.executable, "-c", SERVE, json.dumps(settings), *WORKER],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "FAKE_LOG": str(self.folder / "log")},
            cwd=ROOT,
        )
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["listening"]
        host, _, bound = url.removeprefix("http://").rpartition(":")
        return process, (host, int(bound))

    def kill_and_start(self) -> None:
        """SIGKILL, and the next start on the same state."""
        self.end(signal.SIGKILL)
        self.process, self.address = self._start(self.address[1])

    def end(self, number: int = signal.SIGTERM) -> None:
        """Sends a signal and waits for the end."""
        self.process.send_signal(number)
        self.process.wait(60)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def megabytes(self) -> float:
        """Resident memory."""
        pages = int(Path("/proc", str(self.process.pid), "statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    def counts(self) -> Counter[str]:
        """How often a fake worker began and ended each target."""
        return Counter((self.folder / "log").read_text().splitlines())


class Link:
    """A connection that is kept."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._connection = http.client.HTTPConnection(*address, timeout=60)

    def ask(self, path: str, body: object = None) -> dict[str, object]:
        """What the service says. Raises for anything but success."""
        data = None if body is None else json.dumps(body).encode()
        method = "GET" if body is None else "POST"
        self._connection.request(method, path, data, {"Content-Type": "application/json"})
        answer = self._connection.getresponse()
        text = answer.read()
        if answer.status >= 400:
            raise RuntimeError(f"{path}: {answer.status} {text[:300]!r}")
        return json.loads(text)  # type: ignore[no-any-return]


def plan(number: int, act: str = "quick") -> dict[str, object]:
    """A plan like no other, of two targets."""
    return {"workload": "workload:any", "specs": [{"dims": {"number": number, "act": act}}]}


def submit(address: tuple[str, int], numbers: range, act: str = "quick") -> list[str]:
    """Ids of new jobs."""
    link = Link(address)
    return [
        str(link.ask("/v1/jobs", {"plan": plan(number, act), "name": f"job {number}"})["id"])
        for number in numbers
    ]


def listen(address: tuple[str, int], count: int, told: Queue[object], last: Queue[int]) -> None:
    """Listens with so many clients until ``last`` gives the newest event; tells how many each missed."""
    sockets = []
    for _ in range(count):
        link = socket.create_connection(address)
        link.sendall(b"GET /v1/events?after=0 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        sockets.append(link)
    heard = [set[int]() for _ in sockets]
    rest = [b"" for _ in sockets]
    stop = threading.Event()

    def hear(index: int) -> None:
        sockets[index].settimeout(1.0)
        while True:
            try:
                data = rest[index] + sockets[index].recv(1 << 20)
            except TimeoutError:
                if stop.is_set():
                    return
                continue
            *lines, rest[index] = data.split(b"\n")
            heard[index].update(int(line[4:]) for line in lines if line.startswith(b"id: "))

    threads = [threading.Thread(target=hear, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    told.put("listening")
    newest = last.get()
    deadline = time.monotonic() + 60
    while min(map(len, heard)) < newest and time.monotonic() < deadline:
        time.sleep(0.1)
    stop.set()
    for thread in threads:
        thread.join()
    told.put([newest - len(numbers & set(range(1, newest + 1))) for numbers in heard])


def until_done(address: tuple[str, int]) -> int:
    """The newest event's id once no job is open any more."""
    link = Link(address)
    while True:
        time.sleep(0.5)
        page = link.ask("/v1/jobs?limit=1")
        counts = [
            link.ask(f"/v1/jobs?limit=1&state={state}")["jobs"] for state in ("queued", "running")
        ]
        if page["jobs"] and not any(counts):
            return int(str(link.ask("/v1/jobs?limit=1")["last_event"]))


@contextlib.contextmanager
def reading(address: tuple[str, int], ids: list[str]) -> Iterator[list[float]]:
    """Reads again and again meanwhile; seconds of each read."""
    seconds: list[float] = []
    stop = threading.Event()

    def read(first: int) -> None:
        link, number = Link(address), first
        while not stop.is_set():
            known = ids[number % len(ids)] if ids else None
            paths = ["/v1/jobs?limit=50", "/v1/jobs?state=queued&limit=50", "/v1/about"]
            path = f"/v1/jobs/{known}" if known and number % 2 else paths[number // 2 % 3]
            began = time.perf_counter()
            link.ask(path)
            seconds.append(time.perf_counter() - began)
            number += 1
            time.sleep(PAUSE_SECONDS)

    threads = [threading.Thread(target=read, args=(7 * index,)) for index in range(READERS)]
    for thread in threads:
        thread.start()
    try:
        yield seconds
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def percentile(seconds: list[float], share: float) -> float:
    """Milliseconds that this share of the reads stayed below."""
    ranked = sorted(seconds)
    return ranked[math.ceil(share * len(ranked)) - 1] * 1e3


def under_load(folder: Path, jobs: int, listeners: int) -> list[Row]:
    """Reads, events and memory."""
    service = Service(folder)
    context = multiprocessing.get_context("spawn")
    told: Queue[object] = context.Queue()
    last: Queue[int] = context.Queue()
    process = context.Process(target=listen, args=(service.address, listeners, told, last))
    process.start()
    assert told.get(timeout=60) == "listening"
    ids = submit(service.address, range(1, WARM_UP_JOBS + 1))
    until_done(service.address)
    before = service.megabytes()
    began = time.perf_counter()
    numbers = range(WARM_UP_JOBS + 1, WARM_UP_JOBS + jobs + 1)
    with reading(service.address, list(ids)) as seconds:
        ids += submit(service.address, numbers)
        newest = until_done(service.address)
    took = time.perf_counter() - began
    after = service.megabytes()
    last.put(newest)
    lost = told.get(timeout=120)
    process.join()
    link = Link(service.address)
    done = sum(link.ask(f"/v1/jobs/{one}")["state"] == "done" for one in ids)
    service.end()
    assert isinstance(lost, list)
    p99 = percentile(seconds, 0.99)
    return [
        Row("read_p99_ms", p99, "ms", "limit", p99 / 100, 100.0, "<= 1", p99 <= 100),
        Row("read_p50_ms", percentile(seconds, 0.5), "ms"),
        Row("reads", len(seconds), "reads"),
        Row("jobs_per_s", jobs / took, "jobs/s"),
        Row("jobs_not_done", len(ids) - done, "jobs", target="0", passed=done == len(ids)),
        Row("listeners", len(lost), "clients"),
        Row("events_lost", sum(lost), "events", target="0", passed=sum(lost) == 0),
        Row("memory_start_mb", before, "MB"),
        Row("memory_growth_mb", after - before, "MB", "start", after / before, before),
    ]


def killed(folder: Path) -> list[Row]:
    """Twenty jobs, and a SIGKILL while the third runs."""
    service = Service(folder)
    ids = submit(service.address, range(1, 21), act="slow")
    link = Link(service.address)
    while link.ask(f"/v1/jobs/{ids[2]}")["ended_targets"] != 1:
        time.sleep(0.01)
    service.kill_and_start()
    until_done(service.address)
    link = Link(service.address)
    done = sum(link.ask(f"/v1/jobs/{one}")["state"] == "done" for one in ids)
    counts = service.counts()
    service.end()
    twice = sum(count > 1 for line, count in counts.items() if line.startswith("ended"))
    begun_again = sum(count > 1 for line, count in counts.items() if line.startswith("began"))
    return [
        Row("jobs_lost_after_kill", len(ids) - done, "jobs", target="0", passed=done == len(ids)),
        Row("made_twice_after_kill", twice, "targets", target="0", passed=twice == 0),
        Row(
            "begun_again_after_kill", begun_again, "targets", target="<= 1", passed=begun_again <= 1
        ),
    ]


def generated(folder: Path, examples: int) -> list[Row]:
    """Schemathesis' requests to every endpoint but the stream without end."""
    import schemathesis
    from hypothesis import HealthCheck, given, settings
    from hypothesis.errors import Unsatisfiable

    service = Service(folder)
    url = "http://{}:{}".format(*service.address)
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    statuses: Counter[int] = Counter()
    limits = settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )

    def ask_much(cases: object) -> None:
        @limits
        @given(case=cases)  # type: ignore[arg-type]
        def ask(case: schemathesis.Case) -> None:
            statuses[case.call(base_url=url, timeout=30).status_code] += 1

        with contextlib.suppress(Unsatisfiable):
            ask()

    for path in schema:
        for method in schema[path] if path != "/v1/events" else ():
            for mode in (
                schemathesis.GenerationMode.POSITIVE,
                schemathesis.GenerationMode.NEGATIVE,
            ):
                ask_much(schema[path][method].as_strategy(generation_mode=mode))
    service.end()
    bad = sum(count for status, count in statuses.items() if status >= 500)
    return [
        Row("schemathesis_5xx", bad, "answers", target="0", passed=bad == 0),
        Row("schemathesis_requests", statuses.total(), "requests"),
    ]


def main() -> None:
    """Three services, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--listeners", type=int, default=50)
    parser.add_argument("--examples", type=int, default=60)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name, part) for part in ("load", "kill", "generated")]
        for folder in folders:
            folder.mkdir()
        rows = [
            *under_load(folders[0], arguments.jobs, arguments.listeners),
            *killed(folders[1]),
            *generated(folders[2], arguments.examples),
        ]
    report("service", rows, as_json=arguments.json)


if __name__ == "__main__":
    main()
