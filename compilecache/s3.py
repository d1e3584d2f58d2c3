"""A bucket as Storage, through s3fs: explicit keys, no caches, no clients from before a fork."""

from __future__ import annotations

import errno
import math
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Literal, TypedDict, TypeVar

import s3fs
from botocore.exceptions import (  # type: ignore[import-untyped]
    ClientError,
    NoCredentialsError,
    ParamValidationError,
)

from compilecache.budget import RefusedError
from compilecache.storage import Blob, Option, Stored

CONNECT_SECONDS = 5.0
READ_SECONDS = 10.0
CALL_SECONDS = 30.0
SLOWEST_BYTES_PER_SECOND = 500_000
PART_BYTES = 16 << 20
PARTS_AT_A_TIME = 4

_EXPIRED = ("ExpiredToken", "InvalidToken", "TokenRefreshRequired", "RequestExpired")
_THERE = ("PreconditionFailed", "412")
_NOT_OFFERED = ("NotImplemented", "501")

T = TypeVar("T")


class _Answer(TypedDict, total=False):
    """The fields of S3's answers that are read here."""

    ContentLength: int
    Contents: list[_Item]
    CommonPrefixes: list[_Item]
    IsTruncated: bool
    Name: str
    NextContinuationToken: str
    NextKeyMarker: str
    NextUploadIdMarker: str
    Uploads: list[_Item]


class _Item(TypedDict, total=False):
    Key: str
    Size: int
    Prefix: str
    LastModified: datetime
    Initiated: datetime
    UploadId: str


class S3Storage:
    """A prefix in a bucket. Retries are the caller's: every call here is tried once."""

    block_bytes = 8 << 20
    workers = 8

    def __init__(
        self, bucket: str, prefix: str, *, patience: float, options: Mapping[str, Option] | None
    ) -> None:
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._seconds = min(CALL_SECONDS, patience)
        self._options = _complete(dict(options or {}), patience)
        self._files: s3fs.S3FileSystem | None = None
        self._lock, self._owner = threading.Lock(), os.getpid()
        self._inherited: list[s3fs.S3FileSystem | None] = []
        self._conditional = True
        """Whether "only if absent" may be asked for; some stores answer that they do not know it."""

    def read(self, name: str, limit: int) -> bytes:
        try:
            return self._get(name, 0, limit, self._seconds)
        except _EmptyError:
            return b""

    def size(self, name: str) -> int | None:
        try:
            return self._head(name)
        except FileNotFoundError:
            return None

    def open(self, name: str) -> Blob:
        return _S3Blob(self, name, self._head(name))

    def read_range(self, name: str, start: int, count: int) -> bytes:
        """Exactly these bytes of an object, or OSError."""
        data = self._get(name, start, count, self._seconds + count / SLOWEST_BYTES_PER_SECOND)
        if len(data) != count:
            raise OSError(errno.EIO, f"answered {len(data)} bytes when asked for {count}")
        return data

    def create(self, name: str, data: bytes) -> bool:
        try:
            self._if_absent(lambda condition: self._put(name, data, condition))
        except FileExistsError:
            return False
        return True

    def _put(self, name: str, data: bytes, condition: bool) -> None:
        only = {"IfNoneMatch": "*"} if condition else {}
        self._call("put_object", Key=self._prefix + name, Body=data, **only)

    def _if_absent(self, act: Callable[[bool], None]) -> None:
        """Does it on condition; without, where the store does not offer that: whoever asks reads back."""
        if self._conditional:
            try:
                act(True)
                return
            except _NotOfferedError:
                self._conditional = False
        act(False)

    def upload(self, name: str, source: Path, *, replace: bool) -> None:
        size = source.stat().st_size

        def send(condition: bool) -> None:
            self._run(
                lambda files: files.put_file(
                    str(source),
                    f"{self._bucket}/{self._prefix}{name}",
                    mode="create" if condition else "overwrite",
                    chunksize=PART_BYTES,
                    max_concurrency=PARTS_AT_A_TIME,
                    timeout=self._seconds + size / SLOWEST_BYTES_PER_SECOND,
                )
            )

        with suppress(FileExistsError):
            if replace:
                send(False)
            else:
                self._if_absent(send)

    def walk(self, folder: str) -> dict[str, int]:
        return {name: stored.size for name, stored in self.survey(folder).items()}

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

    def _get(self, name: str, start: int, count: int, seconds: float) -> bytes:
        def act(files: s3fs.S3FileSystem) -> bytes:
            data: bytes = files.cat_file(
                f"{self._bucket}/{self._prefix}{name}",
                start=start,
                end=start + count,
                timeout=seconds,
            )
            return data

        return self._run(act)

    def _head(self, name: str) -> int:
        answer = self._call("head_object", Key=self._prefix + name)
        return answer["ContentLength"]

    def _pages(self, **query: str) -> list[_Answer]:
        pages = [self._call("list_objects_v2", **query)]
        while pages[-1].get("IsTruncated"):
            token = pages[-1]["NextContinuationToken"]
            pages.append(self._call("list_objects_v2", ContinuationToken=token, **query))
        if not all("Name" in page or "IsTruncated" in page for page in pages):
            raise OSError(errno.EIO, "answered something that is no listing")
        return pages

    def _call(self, method: str, **arguments: str | bytes) -> _Answer:
        def act(files: s3fs.S3FileSystem) -> _Answer:
            answer: _Answer = files.call_s3(
                method, Bucket=self._bucket, timeout=self._seconds, **arguments
            )
            return answer

        return self._run(act)

    def _run(self, act: Callable[[s3fs.S3FileSystem], T]) -> T:
        try:
            return _plain_errors(lambda: act(self._live()), self._bucket)
        except _ExpiredError:
            # s3fs#500: temporary credentials run out in a long job; a new session fetches new ones.
            self._files = None
            return _plain_errors(lambda: act(self._live()), self._bucket)

    def _live(self) -> s3fs.S3FileSystem:
        if self._owner != os.getpid():
            # s3fs#914: a client from before a fork hangs; it is kept so that nothing closes it.
            self._inherited.append(self._files)
            self._files = None
            self._lock, self._owner = threading.Lock(), os.getpid()
        with self._lock:
            if self._files is None:
                self._files = s3fs.S3FileSystem(
                    skip_instance_cache=True, use_listings_cache=False, **self._options
                )
                self._files.retries = 1
            return self._files


def _moment(item: _Item, field: Literal["LastModified", "Initiated"]) -> float:
    """Seconds since the epoch; for a server that does not say, never: such things stay young."""
    return item[field].timestamp() if field in item else math.inf


class _S3Blob:
    def __init__(self, storage: S3Storage, name: str, size: int) -> None:
        self._storage = storage
        self._name = name
        self.size = size

    def read_at(self, start: int, count: int) -> bytes:
        return self._storage.read_range(self._name, start, count)

    def close(self) -> None:
        """Nothing is kept open between reads."""


class _ExpiredError(OSError):
    """Temporary credentials have run out."""


class _NotOfferedError(OSError):
    """The store does not know "only if absent"."""


class _EmptyError(OSError):
    """A range was asked of an object that has no bytes."""


def _complete(options: dict[str, Option], patience: float) -> dict[str, Option]:
    """The caller's options of s3fs, with short timeouts and no retries below ours.

    boto3#4392: checksums in trailers break other stores; sizes and digests are read back instead.
    """
    given = options.get("config_kwargs")
    config: dict[str, Option] = {
        "connect_timeout": min(CONNECT_SECONDS, patience),
        "read_timeout": min(READ_SECONDS, patience),
        "retries": {"total_max_attempts": 1},
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
    }
    return {**options, "config_kwargs": config | dict(given if isinstance(given, Mapping) else {})}


def _plain_errors(act: Callable[[], T], bucket: str) -> T:
    """The result of ``act``; whatever it raises becomes the OSError that says it best."""
    try:
        return act()
    except NoCredentialsError as error:
        raise RefusedError(
            "there are no credentials for it",
            "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
        ) from error
    except ParamValidationError as error:
        raise RefusedError(
            " ".join(str(error).split()), "Write the address as s3://BUCKET/PREFIX"
        ) from error
    except OSError as error:
        raise _sorted_out(error, bucket) from error
    except Exception as error:
        # What a broken server makes these libraries raise has no common base.
        text = " ".join(str(error).split())[:300]
        raise OSError(errno.EIO, f"{type(error).__name__}: {text}") from error


def _sorted_out(error: OSError, bucket: str) -> OSError:
    cause = error.__cause__
    code = cause.response["Error"].get("Code", "") if isinstance(cause, ClientError) else ""
    if code in _THERE:
        return FileExistsError(*error.args)
    if code in _NOT_OFFERED:
        return _NotOfferedError(errno.ENOSYS, f"it does not offer that ({code})")
    if code in _EXPIRED:
        return _ExpiredError(errno.EACCES, f"its credentials have expired ({code})")
    if code in ("InvalidRange", "416"):
        return _EmptyError(errno.EINVAL, "the range lies past the end")
    if code == "NoSuchBucket":
        return RefusedError(
            f"bucket '{bucket}' does not exist", "Create the bucket, or mend the address"
        )
    return error
