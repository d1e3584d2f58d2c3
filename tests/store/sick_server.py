"""An S3 server of a few lines that misbehaves on request."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

LISTING = (
    '<?xml version="1.0"?><ListBucketResult><Name>b</Name><IsTruncated>false</IsTruncated>'
    "{items}</ListBucketResult>"
)
STARTED = (
    '<?xml version="1.0"?><InitiateMultipartUploadResult><Bucket>b</Bucket><Key>{key}</Key>'
    "<UploadId>u</UploadId></InitiateMultipartUploadResult>"
)
ENDED = '<?xml version="1.0"?><CompleteMultipartUploadResult><Key>{key}</Key></CompleteMultipartUploadResult>'
ERROR = '<?xml version="1.0"?><Error><Code>{code}</Code><Message>{code}</Message></Error>'
STATUS = {"SlowDown": 503, "InternalError": 500, "AccessDenied": 403, "ExpiredToken": 400}


class SickServer(ThreadingHTTPServer):
    """Bucket ``b``. ``moods`` are used up one a request, then ``mood`` holds.

    Moods: ok, an S3 error code, "stall", "html", "cut" (half of a body), "hang up".
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, bytes] = {}
        self.mood = "ok"
        self.moods: list[str] = []
        self.requests: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.parts: dict[str, dict[int, bytes]] = {}
        """Of each upload in parts: what has come."""
        self.allowed: int | None = None
        """So many requests for whole packs are answered; the next ones hang until they are ended."""
        self.honours_create = True
        self.knows_create = True
        self.alters_bodies = False
        self.stopped = threading.Event()

    @property
    def options(self) -> dict[str, str]:
        """What a client needs to find it."""
        url = f"http://127.0.0.1:{self.server_port}"
        return {"endpoint_url": url, "key": "k", "secret": "s"}

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that give up are expected."""


@contextmanager
def sick_server() -> Iterator[SickServer]:
    """A running server."""
    server = SickServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        server.stopped.set()
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: SickServer
    protocol_version = "HTTP/1.1"

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.requests.append(f"{self.command} {self.path}")
        self.server.headers.append({name.lower(): text for name, text in self.headers.items()})
        mood = self.server.moods.pop(0) if self.server.moods else self.server.mood
        if self.command == "GET" and "/packs/" in self.path and self._exhausted():
            mood = "stall"
        if mood == "stall":
            self.server.stopped.wait(30)
            self.close_connection = True
        elif mood == "hang up":
            self.close_connection = True
        elif mood == "html":
            self._answer(200, b"<html><body>Sign in to the network</body></html>")
        elif mood in ("ok", "cut"):
            self._store(body, cut=mood == "cut")
        else:
            self._answer(STATUS[mood], ERROR.format(code=mood).encode())

    do_GET = do_HEAD = do_PUT = do_POST = _serve  # noqa: N815

    def _exhausted(self) -> bool:
        if self.server.allowed is None:
            return False
        self.server.allowed -= 1
        return self.server.allowed < 0

    def _in_parts(self, key: str, query: dict[str, list[str]], body: bytes) -> None:
        """Begins an upload in parts, takes one, or ends it."""
        parts = self.server.parts
        if "uploads" in query:
            parts[key] = {}
            self._answer(200, STARTED.format(key=key).encode())
        elif self.command == "PUT":
            number = int(query["partNumber"][0])
            parts[key][number] = body
            self._answer(200, b"", tag=f"tag-{number}")
        else:
            self.server.objects[key] = b"".join(parts[key][n] for n in sorted(parts[key]))
            del parts[key]
            self._answer(200, ENDED.format(key=key).encode())

    def _store(self, body: bytes, *, cut: bool) -> None:
        address = urlsplit(self.path)
        key = unquote(address.path).removeprefix("/b").lstrip("/")
        objects, query = self.server.objects, parse_qs(address.query, keep_blank_values=True)
        if {"uploads", "uploadId"} & query.keys():
            self._in_parts(key, query, body)
        elif self.command == "PUT":
            if self.headers.get("If-None-Match") and not self.server.knows_create:
                self._answer(501, ERROR.format(code="NotImplemented").encode())
                return
            if self.headers.get("If-None-Match") and key in objects and self.server.honours_create:
                self._answer(412, ERROR.format(code="PreconditionFailed").encode())
                return
            objects[key] = body[::-1] if self.server.alters_bodies else body
            self._answer(200, b"")
        elif not key:
            prefix = query.get("prefix", [""])[0]
            items = "".join(
                f"<Contents><Key>{name}</Key><Size>{len(data)}</Size></Contents>"
                for name, data in sorted(objects.items())
                if name.startswith(prefix)
            )
            self._answer(200, LISTING.format(items=items).encode())
        elif key not in objects:
            self._answer(404, ERROR.format(code="NoSuchKey").encode())
        else:
            self._object(objects[key], cut=cut)

    def _object(self, data: bytes, *, cut: bool) -> None:
        wanted = self.headers.get("Range")
        if wanted:
            first, last = wanted.removeprefix("bytes=").split("-")
            data = data[int(first) : int(last) + 1 if last else None]
        self._answer(206 if wanted else 200, data, cut=cut)

    def _answer(self, status: int, body: bytes, *, cut: bool = False, tag: str = "") -> None:
        self.send_response(status)
        if tag:
            self.send_header("ETag", tag)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if cut else body)
            self.wfile.flush()
        if cut:
            time.sleep(0.01)
            self.close_connection = True

    def log_message(self, format: str, *arguments: object) -> None:
        """Silent."""
