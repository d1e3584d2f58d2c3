"""The API: jobs, events, what the store holds. Every endpoint, answer and problem is in its OpenAPI document."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Annotated, TypeVar

import anyio
from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from fastapi.responses import StreamingResponse
from fastapi.security import HTTPAuthorizationCredentials

from warmup.service.answers import SECURITY
from warmup.service.bodies import About, Submission
from warmup.service.catalog import FingerprintContents, StoreContents
from warmup.service.doors import bearer, cookie
from warmup.service.jobs import Job, JobDetail, JobPage, JobState
from warmup.service.parts import Parts
from warmup.service.problems import MEDIA_TYPE, Refusal

MOST_LISTENERS = 256
T = TypeVar("T")

JobId = Annotated[str, Path(pattern=r"^[0-9a-f]{16}$", description="A job's id.")]
EventId = Annotated[
    int, Query(ge=0, le=2**62, description="Events after this one; 0 for all that are kept.")
]
LastEventId = Annotated[
    str | None,
    Header(
        alias="Last-Event-ID",
        pattern=r"^[0-9]{1,18}$",
        description="Likewise, as browsers send it when they connect again; stands above `after`.",
    ),
]


async def parts_of(request: Request) -> Parts:
    """What the service is made of."""
    parts: Parts = request.app.state.parts
    return parts


Its = Annotated[Parts, Depends(parts_of)]


async def must_know(
    request: Request,
    its: Its,
    given: Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)],
    session: Annotated[str | None, Depends(cookie)],
) -> None:
    """Lets in who has the token, or a session."""
    its.doors.check(request, given, session)


def problems(*statuses: int) -> dict[int | str, dict[str, object]]:
    """Documentation of problems."""
    words = {
        400: "Not a request that can be read.",
        401: "No token, a wrong one, or a session that has run out.",
        403: "Not on an allow-list.",
        404: "There is no such thing.",
        408: "The body took too long.",
        409: "Not in the state that the thing is in.",
        413: "The body is too large.",
        421: "Called by a name that is not the service's.",
        422: "Not valid; the detail names the field.",
        503: "Cannot be done now.",
    }
    schema = {"$ref": "#/components/schemas/Problem"}
    return {
        status: {"description": words[status], "content": {MEDIA_TYPE: {"schema": schema}}}
        for status in statuses
    }


USUAL = (400, 401, 403, 408, 413, 421, 422, 503)

api = APIRouter(
    prefix="/v1", dependencies=[Depends(must_know)], responses=problems(*USUAL), tags=["v1"]
)


@api.get("/about", summary="What this service is and may do")
def about(its: Its) -> About:
    """Version, devices, allow-list, store."""
    return its.about()


# -- jobs -----------------------------------------------------------------------------------------


@api.post(
    "/jobs",
    status_code=201,
    summary="Submit a plan",
    response_description="A new job.",
    responses={
        200: {"model": Job, "description": "An equal job is queued or running: that one."},
        **problems(503),
    },
)
def submit(submission: Submission, its: Its, response: Response) -> Job:
    """Queues a plan. An equal request gets the job that is open instead of one of its own."""
    if not its.runner.alive:
        raise Refusal(503, "the service is stopping", next_step="Submit again when it is back")
    job, new = its.queue.submit(submission.request(its.policy))
    its.runner.wake()
    response.status_code = 201 if new else 200
    response.headers["location"] = f"/v1/jobs/{job.id}"
    return job


@api.get("/jobs", summary="List jobs, the newest first")
def list_jobs(
    its: Its,
    state: Annotated[JobState | None, Query(description="Only those in this state.")] = None,
    before: Annotated[
        int | None, Query(ge=1, le=2**62, description="`next_before` of the page before.")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> JobPage:
    """One page."""
    return its.queue.page(state=state, before=before, limit=limit)


@api.get("/jobs/{job_id}", summary="Read a job", responses=problems(404))
def read_job(job_id: JobId, its: Its) -> JobDetail:
    """With every target, and the id of the newest event."""
    return its.queue.detail(job_id)


@api.post("/jobs/{job_id}/cancel", summary="Cancel a job", responses=problems(404, 409))
def cancel(job_id: JobId, its: Its) -> Job:
    """At once when it is queued; else its worker is ended. What is finished stays published."""
    job = its.queue.cancel(job_id)
    its.runner.wake()
    return job


@api.post("/jobs/{job_id}/retry", summary="Retry a job", responses=problems(404, 409, 503))
def retry(job_id: JobId, its: Its) -> Job:
    """Queues again what did not get warm of a job that has ended."""
    job = its.queue.retry(job_id)
    its.runner.wake()
    return job


# -- events ---------------------------------------------------------------------------------------

STREAM: dict[int | str, dict[str, object]] = {
    200: {
        "description": "Server-sent events. `job` and `target` carry the id, the job's id, the time, and "
        "the whole Job or Target as it is now. `reset`: some of the events asked for are forgotten; "
        "read the jobs anew. Lines that start with a colon only keep the connection open.",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    },
    **problems(503),
}


@api.get("/events", summary="Follow all jobs", response_class=StreamingResponse, responses=STREAM)
async def all_events(
    its: Its, after: EventId = 0, last_event_id: LastEventId = None
) -> StreamingResponse:
    """Every event after the given one, as it comes, without end."""
    return _stream(its, its.feed.listen(_start(after, last_event_id), its.queue.events))


@api.get(
    "/jobs/{job_id}/events",
    summary="Follow a job",
    response_class=StreamingResponse,
    responses={**STREAM, **problems(404)},
)
async def job_events(
    job_id: JobId, its: Its, after: EventId = 0, last_event_id: LastEventId = None
) -> StreamingResponse:
    """Its events after the given one, as they come, until the job has ended."""
    start = _start(after, last_event_id)
    await anyio.to_thread.run_sync(its.queue.job, job_id)
    parts = its.feed.listen(start, its.queue.events, job_id=job_id, until_end=True)
    return _stream(its, parts)


def _start(after: int, last_event_id: str | None) -> int:
    return after if last_event_id is None else int(last_event_id)


def _stream(its: Parts, parts: AsyncIterator[bytes]) -> StreamingResponse:
    if its.feed.listeners >= MOST_LISTENERS:
        raise Refusal(
            503, f"{MOST_LISTENERS} clients listen already", next_step="Ask for jobs now and then"
        )
    headers = {**SECURITY, "x-accel-buffering": "no"}
    return StreamingResponse(parts, media_type="text/event-stream", headers=headers)


# -- the store --------------------------------------------------------------------------------------

_asking = anyio.CapacityLimiter(4)
"""Threads that may wait for the store; the others go on answering."""


async def _ask(look: Callable[[], T]) -> T:
    return await anyio.to_thread.run_sync(look, limiter=_asking)


@api.get("/fingerprints", summary="What the store holds", responses=problems(503))
async def list_fingerprints(its: Its) -> StoreContents:
    """By fingerprint, with age and size; up to ten seconds old."""
    return await _ask(its.catalog.contents)


@api.get(
    "/fingerprints/{digest}",
    summary="The artifacts of a fingerprint",
    responses=problems(404, 503),
)
async def read_fingerprint(
    digest: Annotated[str, Path(pattern=r"^[0-9a-f]{32}$", description="All of its digits.")],
    its: Its,
) -> FingerprintContents:
    """Its components, and every target that is published for it."""
    return await _ask(partial(its.catalog.fingerprint, digest))
