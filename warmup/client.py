"""A client of the service, in a few lines and without an extra.

>>> client = Client("http://gpu-host:8480", token="…")  # doctest: +SKIP
>>> job = client.submit("plan.yaml")  # doctest: +SKIP
>>> client.wait(job.id).state  # doctest: +SKIP
'done'
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path

from pydantic import JsonValue

from compilecache.errors import CompileCacheError
from compilecache.shapes import ShapePlan
from warmup.service.jobs import ENDED, Job, JobDetail, JobKind, JobPage, Target

QUIET_SECONDS = 60.0
"""A stream that says nothing for so long, not even a heartbeat, is opened again."""
PAUSE_SECONDS = 1.0


class ServiceError(CompileCacheError):
    """The service refused, or did not answer; ``status`` is HTTP's, None without an answer."""

    def __init__(self, problem: str, *, next_step: str, status: int | None) -> None:
        self.status = status
        super().__init__(problem, next_step=next_step)


@dataclass(frozen=True, slots=True)
class Heard:
    """One event."""

    id: int
    """Ask for events after this one to go on."""
    job_id: str
    job: Job | None
    """The job as it is now, when that is what changed."""
    target: Target | None
    """The target, when that is."""


class Client:
    """Speaks to one service. Every method raises ServiceError with what it said."""

    def __init__(self, url: str, token: str | None = None, *, timeout: float = 30.0) -> None:
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._timeout = timeout
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def submit(
        self,
        plan: ShapePlan | str | Path,
        *,
        devices: Sequence[str] = (),
        kind: JobKind = "warm",
        name: str = "",
        priority: int = 0,
        fingerprint: str | None = None,
    ) -> Job:
        """Queues a plan, or a plan file; the job that is open when an equal one is."""
        loaded = plan if isinstance(plan, ShapePlan) else ShapePlan.load(plan)
        body: dict[str, JsonValue] = {
            "plan": loaded.model_dump(mode="json"),
            "devices": list(devices),
            "kind": kind,
            "name": name,
            "priority": priority,
            "fingerprint": fingerprint,
        }
        return Job.model_validate_json(self._ask("/v1/jobs", body))

    def job(self, job_id: str) -> JobDetail:
        """A job with its targets."""
        return JobDetail.model_validate_json(self._ask(f"/v1/jobs/{job_id}"))

    def jobs(self, *, before: int | None = None, limit: int = 50) -> JobPage:
        """One page of jobs, the newest first."""
        older = f"&before={before}" if before is not None else ""
        return JobPage.model_validate_json(self._ask(f"/v1/jobs?limit={limit}{older}"))

    def cancel(self, job_id: str) -> Job:
        """Ends a job; what is finished stays published."""
        return Job.model_validate_json(self._ask(f"/v1/jobs/{job_id}/cancel", {}))

    def retry(self, job_id: str) -> Job:
        """Queues again what did not get warm."""
        return Job.model_validate_json(self._ask(f"/v1/jobs/{job_id}/retry", {}))

    def events(self, job_id: str | None = None, *, after: int = 0) -> Iterator[Heard]:
        """Events as they come: of one job until it has ended, of all without end.

        Goes on where it was when the connection breaks. Stops, too, when events were forgotten.
        """
        path = f"/v1/jobs/{job_id}/events" if job_id else "/v1/events"
        while True:
            try:
                with closing(self._open(f"{path}?after={after}", None, QUIET_SECONDS)) as stream:
                    for kind, data in _messages(stream):
                        if kind == "reset":
                            return
                        heard = _heard(data)
                        after = heard.id
                        yield heard
                    if job_id is not None and self.job(job_id).state in ENDED:
                        return
            except (OSError, HTTPException):
                pass
            time.sleep(PAUSE_SECONDS)

    def wait(self, job_id: str) -> JobDetail:
        """The job once it has ended."""
        while True:
            job = self.job(job_id)
            if job.state in ENDED:
                return job
            for _ in self.events(job_id, after=job.last_event):
                pass

    def _ask(self, path: str, body: dict[str, JsonValue] | None = None) -> bytes:
        try:
            with closing(self._open(path, body, self._timeout)) as answer:
                return answer.read()
        except (OSError, HTTPException) as error:
            raise _silent(self._url, error) from error

    def _open(self, path: str, body: dict[str, JsonValue] | None, timeout: float) -> HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        headers = {**self._headers, "Content-Type": "application/json"}
        request = urllib.request.Request(self._url + path, data=data, headers=headers)
        try:
            opened: HTTPResponse = self._opener.open(request, timeout=timeout)
        except urllib.error.HTTPError as error:
            with error:
                raise _refused(error) from error
        return opened


def _messages(stream: HTTPResponse) -> Iterator[tuple[str, str]]:
    """Kind and data of each message of a stream."""
    kind = data = ""
    for line in stream:
        name, _, value = line.decode().rstrip("\n").partition(": ")
        if name == "event":
            kind = value
        elif name == "data":
            data = value
        elif not name and data:
            yield kind, data
            kind = data = ""


def _heard(data: str) -> Heard:
    told = json.loads(data)
    job, target = told.get("job"), told.get("target")
    return Heard(
        id=told["id"],
        job_id=told["job_id"],
        job=None if job is None else Job.model_validate(job),
        target=None if target is None else Target.model_validate(target),
    )


def _refused(error: urllib.error.HTTPError) -> ServiceError:
    try:
        told = json.loads(error.read())
        problem, step = str(told["detail"]), str(told["next_step"])
    except (ValueError, KeyError, TypeError, OSError):
        problem, step = f"the service answered {error.code}", "See its log"
    return ServiceError(problem, next_step=step, status=error.code)


def _silent(url: str, error: Exception) -> ServiceError:
    return ServiceError(
        f"the service at {url} does not answer: {error}",
        next_step="See whether it runs: curl URL/healthz",
        status=None,
    )
