"""Services for these tests: real ones, each a process with a port, a queue and a worker of its own."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from processes import ROOT, Running, Template

from compilecache.shapes import ShapePlan
from warmup.client import Client
from warmup.service.jobs import JobDetail

TOKEN = "a-token-of-24-characters"
FAKE = (sys.executable, "-S", "-E", str(Path(__file__).with_name("fake_worker.py")))
WORKLOAD = "workloads:two_layer"
PATIENCE = 30.0
_salts = itertools.count(1)


@dataclass(frozen=True)
class Answer:
    """What the service said."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, object]:
        """The body."""
        return json.loads(self.body)  # type: ignore[no-any-return]


@dataclass
class Service:
    """One service in a process."""

    fresh: Template
    """Starts it: forked from a process that has imported everything."""
    folder: Path
    settings: dict[str, object] = field(default_factory=dict)
    worker: tuple[str, ...] = FAKE
    patience: float | None = None
    """Seconds for heads, bodies and answers, where the usual ones take too long for a test."""
    process: Running | None = None
    url: str = ""

    def start(self) -> Service:
        """Starts it, and waits until it listens."""
        settings = {
            "workloads": [WORKLOAD, "workloads:product"],
            "devices": ["cpu"],
            "port": 0,
            "root": str(self.folder / "root"),
            "store": str(self.folder / "store"),
            "state": str(self.folder / "state"),
            **self.settings,
        }
        env = {"FAKE_LOG": str(self.folder / "fake.log")}
        started = self.fresh.start(
            serve, json.dumps(settings), self.worker, self.patience, env=env, cwd=ROOT
        )
        self.process = started
        until(lambda: "\n" in started.out or not started.running)
        assert "\n" in started.out, started.err
        self.url = str(json.loads(started.out)["listening"])
        return self

    @property
    def log(self) -> str:
        """What it wrote to standard error since its last start."""
        assert self.process is not None
        return self.process.err

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)

    @property
    def client(self) -> Client:
        """The client that ships with it."""
        return Client(self.url, TOKEN if "token_file" in self.settings else None)

    def ask(
        self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
    ) -> Answer:
        """One request over a connection of its own."""
        token = {"Authorization": f"Bearer {TOKEN}"} if "token_file" in self.settings else {}
        content = {"Content-Type": "application/json"} if body is not None else {}
        data = None if body is None else json.dumps(body).encode()
        with closing(http.client.HTTPConnection(*self.address, timeout=PATIENCE)) as connection:
            connection.request(method, path, data, {**token, **content, **(headers or {})})
            answer = connection.getresponse()
            told = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(answer.status, told, answer.read())

    def submit(self, *acts: str, **more: object) -> str:
        """The id of a new job with a target for each act of the fake worker."""
        answer = self.ask(
            "POST", "/v1/jobs", {"plan": plan_of_acts(*acts), "devices": ["cpu"], **more}
        )
        assert answer.status == 201, answer.body
        return str(answer.json["id"])

    def wait(self, job_id: str) -> JobDetail:
        """The job once it has ended."""
        return self.client.wait(job_id)

    def until(self, job_id: str, state: str, count: int = 1) -> JobDetail:
        """The job once so many of its targets are in a state."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            job = self.client.job(job_id)
            if sum(row.state == state for row in job.rows) >= count:
                return job
            time.sleep(0.02)
        raise AssertionError(f"no {state} target: {job}\n{self.log}")

    def noted(self, word: str) -> list[str]:
        """Keys of the targets that fake workers began, or ended."""
        path = self.folder / "fake.log"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line.partition(" ")[2] for line in lines if line.startswith(word)]

    def end(self, number: int = signal.SIGTERM) -> int:
        """Sends a signal and gives the exit code."""
        assert self.process is not None
        self.process.kill(number)
        return self.process.wait(PATIENCE).code

    def close(self) -> None:
        """Ends it if it still runs."""
        if self.process is not None and self.process.running:
            self.end()


def serve(settings: str, worker: tuple[str, ...], patience: float | None) -> None:
    """The inside of the process."""
    from warmup.service import limits, server

    if patience is not None:
        limits.HEAD_SECONDS = limits.BODY_SECONDS = limits.SEND_SECONDS = patience
    server.main(settings, worker)


def until(condition: Callable[[], bool]) -> None:
    """Waits; fails the test when it does not come true."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def plan_of_acts(*acts: str, workload: str = WORKLOAD) -> dict[str, object]:
    """A plan with a target for each act, unlike every other."""
    salt = next(_salts)
    specs = [
        {"dims": {"number": number + 1, "salt": salt, "act": act}}
        for number, act in enumerate(acts)
    ]
    return {"workload": workload, "specs": specs}


def plan_json(plan: ShapePlan) -> dict[str, object]:
    """As a request holds it."""
    return plan.model_dump(mode="json")


def token_file(folder: Path) -> str:
    """A file with the token, for its owner alone."""
    path = folder / "token"
    path.write_text(TOKEN + "\n")
    os.chmod(path, 0o600)  # noqa: PTH101
    return str(path)
