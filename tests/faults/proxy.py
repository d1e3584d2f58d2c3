"""Between a client and a real S3 server over HTTP: answers get lost, cut, late, or are errors."""

from __future__ import annotations

import http.client
import socket
import struct
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import urlsplit

STALL_SECONDS = 30.0
ERROR = '<?xml version="1.0"?><Error><Code>{code}</Code><Message>{code}</Message></Error>'
STATUS = {"InternalError": 500, "SlowDown": 503, "ServiceUnavailable": 503}

What = Literal[
    "cut request",
    "cut answer",
    "lose answer",
    "stall",
    "stall in answer",
    "InternalError",
    "SlowDown",
    "ServiceUnavailable",
]
"""cut: so much of a body, then the connection ends. lose: it is done and nobody hears of it. stall: 30 s
of silence, before or in the answer. The others are answers of S3."""


@dataclass(frozen=True)
class Act:
    """What happens to one request."""

    what: What
    share: float = 0.5
    """How much of a body goes through first."""
    rudely: bool = False
    """Whether a connection ends with a reset."""


class Proxy(ThreadingHTTPServer):
    """Passes requests on, but for those that the plan says otherwise of."""

    daemon_threads = True

    def __init__(self, upstream: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = urlsplit(upstream)
        self._lock = threading.Lock()
        self.released = threading.Event()
        self.plan: dict[int, Act] = {}
        self.ever_after: tuple[int, Act] | None = None
        self.requests = 0
        self.struck = 0

    @property
    def url(self) -> str:
        """What clients are told."""
        return f"http://127.0.0.1:{self.server_port}"

    def begin(
        self, plan: Mapping[int, Act] | None = None, ever_after: tuple[int, Act] | None = None
    ) -> None:
        """From now on: request number → what happens to it; and to all from a number on."""
        self.released.set()
        with self._lock:
            self.released = threading.Event()
            self.plan, self.ever_after = dict(plan or {}), ever_after
            self.requests = self.struck = 0

    def next_act(self) -> tuple[Act | None, threading.Event]:
        """For the next request; and what ends its stalling."""
        with self._lock:
            number, self.requests = self.requests, self.requests + 1
            act = self.plan.get(number)
            if self.ever_after is not None and number >= self.ever_after[0]:
                act = self.ever_after[1]
            self.struck += act is not None
            return act, self.released

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that give up are expected."""


@contextmanager
def proxy(upstream: str) -> Iterator[Proxy]:
    """A running one."""
    server = Proxy(upstream)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        server.released.set()
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: Proxy
    protocol_version = "HTTP/1.1"

    def _serve(self) -> None:
        act, released = self.server.next_act()
        length = int(self.headers.get("Content-Length") or 0)
        if act is not None and act.what == "cut request" and length:
            self.rfile.read(int(length * act.share))
            self._hang_up(act)
            return
        body = self.rfile.read(length)
        if act is None:
            self._answer(*self._ask(body))
        elif act.what in STATUS:
            text = ERROR.format(code=act.what).encode()
            self._answer(STATUS[act.what], {"Content-Type": "application/xml"}, text)
        elif act.what == "stall":
            released.wait(STALL_SECONDS)
            self.close_connection = True
        else:
            status, headers, data = self._ask(body)
            if act.what != "lose answer" and self.command == "GET":
                part = data[: int(len(data) * act.share)]
                self._answer(status, headers, data, part)
            if act.what == "stall in answer":
                released.wait(STALL_SECONDS)
            self._hang_up(act)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve  # noqa: N815

    def _ask(self, body: bytes) -> tuple[int, Mapping[str, str], bytes]:
        upstream = self.server.upstream
        client = http.client.HTTPConnection(
            upstream.hostname or "", upstream.port or 80, timeout=60
        )
        headers = {
            k: v for k, v in self.headers.items() if k.lower() not in ("expect", "connection")
        }
        try:
            client.request(self.command, self.path, body, headers)
            answer = client.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            client.close()

    def _answer(
        self, status: int, headers: Mapping[str, str], data: bytes, part: bytes | None = None
    ) -> None:
        length = str(len(data))
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() == "content-length" and self.command == "HEAD":
                length = value
            elif name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data if part is None else part)
        self.wfile.flush()

    def _hang_up(self, act: Act) -> None:
        self.close_connection = True
        if act.rudely:
            with suppress(OSError):
                linger = struct.pack("ii", 1, 0)
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)

    def log_message(self, format: str, *arguments: object) -> None:
        """Silent."""
