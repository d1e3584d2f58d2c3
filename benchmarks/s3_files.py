"""A directory as an S3 bucket, read only and as fast as the kernel sends files: ``python s3_files.py DIR``.

Prints its port, then serves until it is killed. It knows what clients need to read: HEAD, GET with a
range, and listings (version 2, in pages, of what was there at the start). Bodies go out by sendfile, so
that of what a benchmark measures the server takes least; and a page costs what is on it, as it does
at S3, whatever else the bucket holds. Signatures are not looked at.
"""

from __future__ import annotations

import os
import sys
from bisect import bisect_left, bisect_right
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "bench"
LISTING = (
    '<?xml version="1.0"?><ListBucketResult><Name>{bucket}</Name><IsTruncated>{more}</IsTruncated>'
    "{token}{items}</ListBucketResult>"
)
TOKEN = "<NextContinuationToken>{key}</NextContinuationToken>"
PAGE = 1000
ITEM = "<Contents><Key>{key}</Key><Size>{size}</Size><LastModified>{time}</LastModified></Contents>"
NO_KEY = b'<?xml version="1.0"?><Error><Code>NoSuchKey</Code><Message>absent</Message></Error>'


class Bucket(ThreadingHTTPServer):
    """One bucket of the files below a directory."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.root = root
        files = (path for path in root.rglob("*") if path.is_file())
        self.keys = sorted(path.relative_to(root).as_posix() for path in files)


class _Handler(BaseHTTPRequestHandler):
    server: Bucket
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 1 << 16

    def _serve(self) -> None:
        address = urlsplit(self.path)
        bucket, _, key = unquote(address.path).lstrip("/").partition("/")
        assert bucket == BUCKET
        if not key:
            query = {name: values[0] for name, values in parse_qs(address.query).items()}
            most = min(PAGE, int(query.get("max-keys", PAGE)))
            self._list(query.get("prefix", ""), query.get("continuation-token", ""), most)
            return
        try:
            descriptor = os.open(self.server.root / key, os.O_RDONLY)
        except FileNotFoundError:
            self._head(404, len(NO_KEY))
            self.wfile.write(b"" if self.command == "HEAD" else NO_KEY)
            return
        try:
            self._send(descriptor)
        finally:
            os.close(descriptor)

    do_GET = do_HEAD = _serve  # noqa: N815

    def _send(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        start, end = self._range(status.st_size)
        self.send_response(206 if "Range" in self.headers else 200)
        self.send_header("ETag", f'"{status.st_mtime_ns:x}-{status.st_size:x}"')
        self.send_header("Last-Modified", formatdate(status.st_mtime, usegmt=True))
        self.send_header("Content-Range", f"bytes {start}-{end - 1}/{status.st_size}")
        self.send_header("Content-Length", str(end - start))
        self.end_headers()
        self.wfile.flush()
        while self.command == "GET" and start < end:
            start += os.sendfile(self.connection.fileno(), descriptor, start, end - start)

    def _range(self, size: int) -> tuple[int, int]:
        wanted = self.headers.get("Range")
        if wanted is None:
            return 0, size
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        return int(first), min(int(last or size) + 1, size)

    def _list(self, prefix: str, after: str, most: int) -> None:
        keys = self.server.keys
        first = bisect_right(keys, after) if after else bisect_left(keys, prefix)
        last = min(bisect_left(keys, prefix + chr(0x10FFFF)), first + most)
        found = keys[first:last]
        items = [
            ITEM.format(key=escape(key), size=path.stat().st_size, time="2026-01-01T00:00:00.000Z")
            for key in found
            if (path := self.server.root / key)
        ]
        more = bool(found) and last < len(keys) and keys[last].startswith(prefix)
        body = LISTING.format(
            bucket=BUCKET,
            items="".join(items),
            more=str(more).lower(),
            token=TOKEN.format(key=escape(found[-1])) if more else "",
        ).encode()
        self._head(200, len(body))
        self.wfile.write(body)

    def _head(self, status: int, length: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        """Silent."""


def main() -> None:
    """Serves a directory."""
    with Bucket(Path(sys.argv[1])) as server:
        print(server.server_port, flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
