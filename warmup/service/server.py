"""The service as a server: the application, its doors and limits, and an end that returns what is in hand."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import sqlite3
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException

from warmup.service.answers import problem_response
from warmup.service.api import api
from warmup.service.limits import CONNECTIONS, Limits, Protocol
from warmup.service.metrics import Counting, Metrics
from warmup.service.outside import outside
from warmup.service.parts import Parts
from warmup.service.problems import Problem, Refusal

log = logging.getLogger("warmup")

STOPS = (signal.SIGTERM, signal.SIGINT)
SWITCH_SECONDS = 0.001
"""A thread that reads a worker's lines leaves Python to those that answer after so long."""
CLOSING_SECONDS = 5
"""How long open answers may go on once the service stops."""

NEXT_STEPS = {
    400: "Look at the request; /openapi.json says what each endpoint takes",
    404: "See the list of endpoints: GET /openapi.json",
    405: "See which methods the endpoint takes: GET /openapi.json",
}


class Application(FastAPI):
    """The API, the page, and what Kubernetes and Prometheus ask for."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(
            title="compilecache warm-up service",
            description="Queues plans and makes their targets warm, one at a time.",
            version=parts.about().version,
            docs_url=None,
            redoc_url=None,
            lifespan=_lifespan,
        )
        self.state.parts = parts
        self.state.metrics = Metrics(parts)
        self.include_router(api)
        self.include_router(outside)
        self.add_exception_handler(Refusal, _refused)
        self.add_exception_handler(RequestValidationError, _invalid)
        self.add_exception_handler(HTTPException, _http)
        self.add_exception_handler(sqlite3.Error, _no_queue)
        self.add_exception_handler(Exception, _unexpected)
        self.add_middleware(Counting, metrics=self.state.metrics)

    def openapi(self) -> dict[str, Any]:
        """The document, with the schema of problems, which no endpoint returns by itself."""
        if self.openapi_schema is None:
            made = get_openapi(
                title=self.title,
                version=self.version,
                description=self.description,
                routes=self.routes,
            )
            schemas = made.setdefault("components", {}).setdefault("schemas", {})
            schemas["Problem"] = Problem.model_json_schema(
                ref_template="#/components/schemas/{model}"
            )
            self.openapi_schema = made
        return self.openapi_schema


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    parts: Parts = app.state.parts
    parts.feed.open(asyncio.get_running_loop(), parts.queue.last_event())
    parts.runner.start()
    yield
    await asyncio.to_thread(parts.runner.stop)
    parts.database.close()


def _refused(_request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return problem_response(error.as_problem())


def _invalid(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    faults = [f"{'.'.join(map(str, f['loc']))}: {f['msg']}" for f in error.errors()[:5]]
    return problem_response(
        Problem.of(
            422, "; ".join(faults), "Mend the fields named; /openapi.json says what they take"
        )
    )


def _http(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status = error.status_code
    words = str(error.detail) or HTTPStatus(status).phrase
    step = NEXT_STEPS.get(status, "See GET /openapi.json")
    return problem_response(Problem.of(status, words, step), headers=error.headers)


def _no_queue(_request: Request, error: Exception) -> Response:
    log.error("the queue: %s", error)
    return problem_response(
        Problem.of(
            503, f"the queue does not answer: {error}", "Look at the disk of its state folder"
        )
    )


def _unexpected(_request: Request, error: Exception) -> Response:
    log.error("unexpected %s: %s", type(error).__name__, error)
    return problem_response(
        Problem.of(
            500, f"unexpected {type(error).__name__}", "See the service's log, and report it"
        )
    )


class Server(uvicorn.Server):
    """A server that, told to stop, ends the streams and lets the worker come to its end first."""

    def __init__(self, parts: Parts, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._parts = parts

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Says where it listens, as one line of JSON, once it does."""
        await super().startup(sockets)
        if self.started:
            address = self.servers[0].sockets[0].getsockname()
            host = f"[{address[0]}]" if ":" in address[0] else address[0]
            line = {
                "listening": f"http://{host}:{address[1]}",
                "devices": self._parts.policy.devices,
            }
            print(json.dumps(line), flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """The worker first: until it has ended, readers are still answered."""
        await asyncio.to_thread(self._parts.runner.stop)
        self._parts.feed.close()
        await super().shutdown(sockets)


def serve(parts: Parts, *, log_level: str = "warning") -> None:
    """Serves until SIGTERM or SIGINT; returns once the worker has ended."""
    sys.setswitchinterval(SWITCH_SECONDS)
    app = Limits(Application(parts), parts.doors)
    config = uvicorn.Config(
        app,
        host=parts.settings.host,
        port=parts.settings.port,
        http=Protocol,
        ws="none",
        loop="asyncio",
        lifespan="on",
        limit_concurrency=CONNECTIONS,
        timeout_keep_alive=15,
        timeout_graceful_shutdown=CLOSING_SECONDS,
        access_log=False,
        server_header=False,
        date_header=True,
        log_level=log_level,
    )
    # uvicorn raises the signal that ended it once more; a stop that went well is no failure.
    before = {number: signal.signal(number, signal.SIG_IGN) for number in STOPS}
    try:
        Server(parts, config).run()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main(settings_json: str, worker: Sequence[str]) -> None:
    """Serves with settings in JSON and another worker: for tests and benchmarks."""
    from warmup.service.settings import Settings

    serve(Parts.assemble(Settings.model_validate_json(settings_json), worker=worker))
