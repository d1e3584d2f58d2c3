"""A bucket as Storage: explicit keys, no caches, packs as streams that go on where they broke."""

from __future__ import annotations

import errno
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Literal, Protocol, TypedDict

from compilecache.s3client import Clients, NotOfferedError
from compilecache.storage import Blob, Option, Sent, Stored

SLOWEST_BYTES_PER_SECOND = 500_000
PATIENT_SECONDS = 30.0
"""So long a stream may bring less than that."""
PART_BYTES = 8 << 20
PARTS_AT_A_TIME = 4
MOST_PARTS = 10_000
PAGE = 1_000
"""Names in one answer."""


class _Body(Protocol):
    """What an answer brings, as a stream."""

    def read(self, count: int, /) -> bytes:
        """At most so many bytes."""

    def close(self) -> None:
        """Gives the connection back, or ends it."""


class _Answer(TypedDict, total=False):
    """The fields of S3's answers that are read here."""

    Body: _Body
    CommonPrefixes: list[_Item]
    ContentLength: int
    Contents: list[_Item]
    ETag: str
    IsTruncated: bool
    Name: str
    NextContinuationToken: str
    NextKeyMarker: str
    NextUploadIdMarker: str
    UploadId: str
    Uploads: list[_Item]


class _Item(TypedDict, total=False):
    Key: str
    Size: int
    Prefix: str
    LastModified: datetime
    Initiated: datetime
    UploadId: str


@dataclass(slots=True)
class _Upload:
    """A file that goes up in parts, as far as it has come."""

    number: str
    """S3's name for it."""
    source: Path
    """The file; it must be the same one when it is tried again."""
    size: int
    """Of the file."""
    changed: int
    """When it was written, in nanoseconds."""
    parts: dict[int, str] = field(default_factory=dict)
    """Numbers and tags of the parts that are there."""


class S3Storage:
    """A prefix in a bucket. Retries are the caller's: every call here is tried once."""

    block_bytes = 512 << 10
    # Calls of one server overlap; beyond twice the cores they only wait for each other.
    workers = min(8, 2 * (os.cpu_count() or 1))
    # One stream from a server nearby fills a core; from one far away it waits most of the time.
    streams = (min(8, os.cpu_count() or 1), 8)

    def __init__(
        self, bucket: str, prefix: str, *, patience: float, options: Mapping[str, Option] | None
    ) -> None:
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._seconds = min(PATIENT_SECONDS, patience)
        self._clients = Clients(self.url, patience, dict(options or {}))
        self._conditional = True
        """Whether "only if absent" may be asked for; some stores answer that they do not know it."""
        self._pages_of_any_size = True
        """Whether a page may be asked for that is smaller than usual."""
        self._uploads: dict[str, _Upload] = {}
        self._uploading = threading.Lock()

    def read(self, name: str, limit: int) -> bytes:
        blob = _S3Blob(self, name)
        try:
            pieces, left = [], min(limit, blob.size)
            while left:
                pieces.append(blob.read_at(blob.at, left))
                left -= len(pieces[-1])
            return b"".join(pieces)
        finally:
            blob.close()

    def size(self, name: str) -> int | None:
        try:
            return self._call("head_object", Key=self._prefix + name)["ContentLength"]
        except FileNotFoundError:
            return None

    def open(self, name: str) -> Blob:
        return _S3Blob(self, name)

    def create(self, name: str, data: bytes) -> bool:
        try:
            self._if_absent(lambda condition: self._put(name, data, condition))
        except FileExistsError:
            return False
        return True

    def upload(
        self, name: str, source: Path, *, replace: bool, sent: Sent = lambda count: None
    ) -> None:
        size = source.stat().st_size

        def send(condition: bool) -> None:
            if size <= PART_BYTES:
                self._put(name, source.read_bytes(), condition)
                sent(size)
            else:
                self._put_in_parts(name, source, condition, sent)

        with suppress(FileExistsError):
            if replace:
                send(False)
            else:
                self._if_absent(send)

    def walk(self, folder: str) -> dict[str, int]:
        return {name: stored.size for name, stored in self.survey(folder).items()}

    def glance(self, folder: str, most: int) -> list[str] | None:
        prefix = f"{self._prefix}{folder}/"
        if not self._pages_of_any_size:
            return None
        try:
            page = self._call("list_objects_v2", Prefix=prefix, MaxKeys=min(most, PAGE))
        except OSError:
            # s3rver answers 500 where a page ends early. If it is something else, the next call says so.
            self._pages_of_any_size = False
            return None
        if page.get("IsTruncated", True):
            return None
        return [item["Key"].removeprefix(prefix) for item in page.get("Contents", ())]

    def survey(self, folder: str) -> dict[str, Stored]:
        prefix = f"{self._prefix}{folder}/"
        pages = self._pages(Prefix=prefix)
        return {
            item["Key"].removeprefix(prefix): Stored(item["Size"], _moment(item, "LastModified"))
            for page in pages
            for item in page.get("Contents", ())
        }

    def folders(self, folder: str) -> list[str]:
        prefix = f"{self._prefix}{folder}/"
        pages = self._pages(Prefix=prefix, Delimiter="/")
        return [
            item["Prefix"].removeprefix(prefix).rstrip("/")
            for page in pages
            for item in page.get("CommonPrefixes", ())
        ]

    def delete(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._call("delete_object", Key=self._prefix + name)

    def half_uploads(self, folder: str) -> dict[str, Stored]:
        query = {"Prefix": f"{self._prefix}{folder}/"}
        pages = [self._call("list_multipart_uploads", **query)]
        while pages[-1].get("IsTruncated"):
            query["KeyMarker"] = pages[-1]["NextKeyMarker"]
            query["UploadIdMarker"] = pages[-1]["NextUploadIdMarker"]
            pages.append(self._call("list_multipart_uploads", **query))
        # What its parts weigh would cost a call for each; it is not needed to drop them.
        return {
            f"{item['Key'].removeprefix(self._prefix)}?{item['UploadId']}": Stored(
                0, _moment(item, "Initiated")
            )
            for page in pages
            for item in page.get("Uploads", ())
            if item["Key"].startswith(query["Prefix"])
        }

    def drop_half_upload(self, name: str) -> None:
        key, _, number = name.rpartition("?")
        with suppress(FileNotFoundError):
            self._call("abort_multipart_upload", Key=self._prefix + key, UploadId=number)

    # -- sending ------------------------------------------------------------------------------

    def _put(self, name: str, data: bytes, condition: bool) -> None:
        self._call("put_object", Key=self._prefix + name, Body=data, **_only(condition))

    def _if_absent(self, act: Callable[[bool], None]) -> None:
        """Does it on condition; without, where the store does not offer that: whoever asks reads back."""
        if self._conditional:
            try:
                act(True)
                return
            except NotOfferedError:
                self._conditional = False
        act(False)

    def _put_in_parts(self, name: str, source: Path, condition: bool, sent: Sent) -> None:
        """Sends the parts that are not there yet: what failed before goes on where it stopped."""
        upload = self._begun(name, source)
        try:
            self._send_parts(name, upload, sent)
            self._complete(name, upload, condition)
        except FileNotFoundError as error:
            # Collected meanwhile; or all was done before, and only the answer was lost.
            self._uploads.pop(name, None)
            if self.size(name) != upload.size:
                raise OSError(errno.EIO, "the store has dropped the upload") from error
        except FileExistsError:
            self._uploads.pop(name, None)
            self.drop_half_upload(f"{name}?{upload.number}")
            raise
        self._uploads.pop(name, None)

    def _begun(self, name: str, source: Path) -> _Upload:
        status = source.stat()
        with self._uploading:
            known = self._uploads.get(name)
            same = (str(source), status.st_size, status.st_mtime_ns)
            if known is None or (str(known.source), known.size, known.changed) != same:
                answer = self._call("create_multipart_upload", Key=self._prefix + name)
                known = _Upload(answer["UploadId"], source, status.st_size, status.st_mtime_ns)
                self._uploads[name] = known
            return known

    def _send_parts(self, name: str, upload: _Upload, sent: Sent) -> None:
        step = max(PART_BYTES, -(-upload.size // MOST_PARTS))

        def send(number: int) -> None:
            with upload.source.open("rb") as file:
                file.seek((number - 1) * step)
                data = file.read(step)
            arguments = {"Key": self._prefix + name, "UploadId": upload.number}
            answer = self._call("upload_part", **arguments, PartNumber=number, Body=data)
            upload.parts[number] = answer["ETag"]
            sent(len(data))

        numbers = range(1, -(-upload.size // step) + 1)
        sent(sum(min(step, upload.size - (number - 1) * step) for number in upload.parts))
        with ThreadPoolExecutor(PARTS_AT_A_TIME) as pool:
            list(pool.map(send, [number for number in numbers if number not in upload.parts]))

    def _complete(self, name: str, upload: _Upload, condition: bool) -> None:
        parts: list[dict[str, int | str]] = [
            {"PartNumber": number, "ETag": tag} for number, tag in sorted(upload.parts.items())
        ]
        self._call(
            "complete_multipart_upload",
            Key=self._prefix + name,
            UploadId=upload.number,
            MultipartUpload={"Parts": parts},
            **_only(condition),
        )

    # -- calls --------------------------------------------------------------------------------

    def stream(self, name: str, start: int) -> tuple[_Body, int]:
        """An object from a place on, and how many bytes are left from there."""
        wanted = {"Range": f"bytes={start}-"} if start else {}
        answer = self._call("get_object", Key=self._prefix + name, **wanted)
        return answer["Body"], answer["ContentLength"]

    def piece(self, body: _Body, count: int) -> bytes:
        """What has arrived of a stream, up to so many bytes; waits for the first of them."""
        # One read of the socket, where the library lets us: nothing waits for a block to be full.
        raw = getattr(body, "_raw_stream", None)
        read = getattr(raw, "read1", None) or body.read
        data: bytes = self._clients.plainly(lambda: read(count))
        return data

    @property
    def seconds(self) -> float:
        """So long a stream may bring less than ``SLOWEST_BYTES_PER_SECOND``."""
        return self._seconds

    def _pages(self, **query: str) -> list[_Answer]:
        pages = [self._call("list_objects_v2", **query)]
        while pages[-1].get("IsTruncated"):
            token = pages[-1]["NextContinuationToken"]
            pages.append(self._call("list_objects_v2", ContinuationToken=token, **query))
        if not all("Name" in page or "IsTruncated" in page for page in pages):
            raise OSError(errno.EIO, "answered something that is no listing")
        return pages

    def _call(
        self, method: str, **arguments: str | bytes | int | dict[str, list[dict[str, int | str]]]
    ) -> _Answer:
        def act(client: object) -> _Answer:
            more = self._clients.extra(client, method)
            answer: _Answer = getattr(client, method)(Bucket=self._bucket, **more, **arguments)
            return answer

        return self._clients.call(act)


def _only(condition: bool) -> dict[str, str]:
    return {"IfNoneMatch": "*"} if condition else {}


def _moment(item: _Item, field: Literal["LastModified", "Initiated"]) -> float:
    """Seconds since the epoch; for a server that does not say, never: such things stay young."""
    return item[field].timestamp() if field in item else math.inf


class _S3Blob:
    """One answer, read as it arrives; after a failure another one begins where that one broke."""

    def __init__(self, storage: S3Storage, name: str) -> None:
        self._storage = storage
        self._name = name
        self._body: _Body | None = None
        self.at = 0
        self.size = self._begin()

    def read_at(self, start: int, count: int) -> bytes:
        if self._body is None or start != self.at:
            self.close()
            self.at = start
            if self._begin() != self.size - start:
                self.close()
                raise OSError(errno.EIO, f"answered something else than what follows byte {start}")
        try:
            data = self._next(count)
        except OSError:
            self.close()
            raise
        self.at += len(data)
        return data

    def close(self) -> None:
        if self._body is not None:
            self._body.close()
            self._body = None

    def _begin(self) -> int:
        self._body, left = self._storage.stream(self._name, self.at)
        self._waited, self._came = 0.0, 0
        return left

    def _next(self, count: int) -> bytes:
        assert self._body is not None
        began = time.monotonic()
        data = self._storage.piece(self._body, count)
        self._waited += time.monotonic() - began
        self._came += len(data)
        if not data:
            raise OSError(errno.EIO, f"the answer ended after {self.at} bytes")
        if self._waited > self._storage.seconds + self._came / SLOWEST_BYTES_PER_SECOND:
            raise TimeoutError(
                errno.ETIMEDOUT, f"only {self._came} bytes came in {self._waited:.0f} s"
            )
        return data
