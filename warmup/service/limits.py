"""What a client may cost: bytes of a body, seconds for head, body and answer, connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import h11
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from warmup.service.answers import SECURITY, problem_response
from warmup.service.doors import Doors
from warmup.service.problems import Problem

BODY_BYTES = 1 << 20
HEAD_SECONDS = 10.0
"""Until the head of a request is there, from the first byte or from the connection on."""
BODY_SECONDS = 20.0
"""Until the whole body is there."""
SEND_SECONDS = 30.0
"""Until a client has taken what it was sent; one that reads no more is let go."""
WAITING_BYTES = 1 << 17
"""What the kernel holds for a client that reads slowly; besides asyncio's own 64 KB."""
CONNECTIONS = 512
LINK = "warmup.link"
"""The transport, in a request's state."""


class Limits:
    """Wraps the application: counts what comes in, and gives up on who is too slow."""

    def __init__(self, app: ASGIApp, doors: Doors) -> None:
        self._app = app
        self._doors = doors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, receive, send)
        problem = exchange.problem_of_head(self._doors)
        if problem is None:
            with contextlib.suppress(_BodyError):
                await self._app(scope, exchange.receive, exchange.send)
        else:
            await exchange.refuse(problem)


class _BodyError(Exception):
    """The body is too large, or too slow; the exchange knows which."""


class _Exchange:
    """One request."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._got = 0
        self._complete = False
        self._deadline = asyncio.get_running_loop().time() + BODY_SECONDS
        self._problem: Problem | None = None
        self._answered = False

    def problem_of_head(self, doors: Doors) -> Problem | None:
        headers = dict(self._scope["headers"])
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and (len(length) > 15 or int(length) > BODY_BYTES):
            return _too_large()
        if not doors.knows_host(headers.get(b"host", b"").decode("latin-1")):
            return Problem.of(
                421,
                "this service is not called by that name",
                "Add it to 'hosts' in the service's settings",
            )
        return None

    async def receive(self) -> Message:
        if self._complete:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            self._problem = _too_slow()
            raise _BodyError from None
        self._got += len(message.get("body", b""))
        self._complete = message["type"] != "http.request" or not message.get("more_body", False)
        if self._got > BODY_BYTES:
            self._problem = _too_large()
            raise _BodyError
        return message

    async def send(self, message: Message) -> None:
        """Whatever the application makes of a body that did not come: the answer is the problem."""
        if self._problem is not None:
            await self.refuse(self._problem)
            return
        self._answered = True
        if message["type"] == "http.response.start":
            message = _careful(message)
        try:
            async with asyncio.timeout(SEND_SECONDS):
                await self._send(message)
        except TimeoutError:
            self._scope["state"][LINK].abort()  # the application hears that the client is gone

    async def refuse(self, problem: Problem) -> None:
        """Answers once, and reads no more of this connection."""
        if not self._answered:
            self._answered = True
            response = problem_response(problem, headers={"connection": "close"})
            await response(self._scope, self._receive, self._send)


def _careful(message: Message) -> Message:
    """With the headers that every answer has."""
    headers = list(message.get("headers", ()))
    named = {name.lower() for name, _ in headers}
    more = [(n.encode(), v.encode()) for n, v in SECURITY.items() if n.encode() not in named]
    return {**message, "headers": [*headers, *more]}


def _too_large() -> Problem:
    return Problem.of(
        413, f"the body has more than {BODY_BYTES} bytes", "Submit a large plan in parts"
    )


def _too_slow() -> Problem:
    return Problem.of(
        408,
        f"the body was not there within {BODY_SECONDS:.0f} s",
        "Send it faster, or look at what lies between you and the service",
    )


class Protocol(H11Protocol):
    """HTTP/1.1 that waits for the head of a request only so long."""

    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = {**self.app_state, LINK: transport}
        link = transport.get_extra_info("socket")
        if link is not None:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, WAITING_BYTES)
        self._arm()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._arm()
        else:
            self._disarm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def _arm(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def _disarm(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
