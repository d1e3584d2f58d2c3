"""Clients of S3 as botocore makes them, from options that people know; its errors as OSErrors.

One client serves all threads of a process; after a fork, and for credentials that have run out, a
new one is made. Retries are the caller's: every call is tried once.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, TypedDict, TypeVar

import botocore.loaders
import botocore.session
from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import (
    ClientError,
    NoCredentialsError,
    ParamValidationError,
    PartialCredentialsError,
    ProfileNotFound,
)
from botocore.utils import parse_timestamp

from compilecache.budget import RefusedError
from compilecache.errors import StoreUnavailable

if TYPE_CHECKING:
    from compilecache.storage import Option

CONNECT_SECONDS = 5.0
READ_SECONDS = 10.0
CONNECTIONS = 32

CHECKSUMS = {
    "request_checksum_calculation": "AWS_REQUEST_CHECKSUM_CALCULATION",
    "response_checksum_validation": "AWS_RESPONSE_CHECKSUM_VALIDATION",
}
"""Settings of botocore → the variable by which people ask for them."""

_CREDENTIALS = {
    "key": "aws_access_key_id",
    "secret": "aws_secret_access_key",
    "token": "aws_session_token",
}
_KNOWN = (
    *_CREDENTIALS,
    *("anon", "client_kwargs", "config_kwargs", "endpoint_url", "profile", "requester_pays"),
    *("s3_additional_kwargs", "use_ssl"),
)
_EXPIRED = ("ExpiredToken", "InvalidToken", "TokenRefreshRequired", "RequestExpired")
_PASSING = ("BadDigest", "IncompleteBody", "RequestTimeout", "SlowDown", "Throttling")
_PASSING_STATUS = (408, 409, 425, 429)

_LOADER = botocore.loaders.create_loader()
"""Reads botocore's descriptions of services, once a process: they are most of what a client costs."""

T = TypeVar("T")


class ExpiredError(OSError):
    """Temporary credentials have run out."""


class NotOfferedError(OSError):
    """The store does not know "only if absent"."""


class Clients:
    """The client in use. ``options``: named as s3fs names them."""

    def __init__(self, url: str, patience: float, options: Mapping[str, Option]) -> None:
        if unknown := sorted(options.keys() - set(_KNOWN)):
            raise StoreUnavailable(
                f"store '{url}' has no option '{unknown[0]}'",
                next_step=f"Use some of {', '.join(sorted(_KNOWN))}",
            )
        self._bucket = url.removeprefix("s3://").partition("/")[0]
        self._options = options
        self._patience = patience
        self._client: object | None = None
        self._lock, self._owner = threading.Lock(), os.getpid()
        self._inherited: list[object] = []
        more = _group(options, "s3_additional_kwargs")
        self._more = more | ({"RequestPayer": "requester"} if options.get("requester_pays") else {})

    def call(self, act: Callable[[object], T]) -> T:
        """The result of ``act`` on the client; on a new one if its credentials had run out.

        Whatever is raised is the OSError that says it best.
        """
        client = self._live()
        try:
            return self.plainly(lambda: act(client))
        except ExpiredError:
            # s3fs#500: temporary credentials run out in a long job; a new session fetches new ones.
            with self._lock:
                if self._client is client:
                    self._client = None
            renewed = self._live()
            return self.plainly(lambda: act(renewed))

    def plainly(self, act: Callable[[], T]) -> T:
        """The result of ``act``, or an OSError."""
        try:
            return act()
        except ClientError as error:
            raise _sorted_out(error, self._bucket) from error
        except (NoCredentialsError, PartialCredentialsError) as error:
            raise RefusedError(
                "there are no credentials for it",
                "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
            ) from error
        except ParamValidationError as error:
            raise RefusedError(_line(error), "Write the address as s3://BUCKET/PREFIX") from error
        except OSError:
            raise
        except Exception as error:
            # What a broken server makes these libraries raise has no common base.
            text = f"{type(error).__name__}: {_line(error)[:300]}"
            raise OSError(errno.EIO, text) from error

    def extra(self, client: object, method: str) -> dict[str, str]:
        """What the options add to the arguments of a method that takes it."""
        if not self._more:
            return {}
        meta = getattr(client, "meta")  # noqa: B009 - botocore has no types
        operation = meta.service_model.operation_model(meta.method_to_api_mapping[method])
        return {k: str(v) for k, v in self._more.items() if k in operation.input_shape.members}

    def _live(self) -> object:
        if self._owner != os.getpid():
            # A connection from before a fork is the parent's; it is kept so that nothing closes it.
            self._inherited.append(self._client)
            self._client = None
            self._lock, self._owner = threading.Lock(), os.getpid()
        with self._lock:
            if self._client is None:
                self._client = self._made()
            return self._client

    def _made(self) -> object:
        options, arguments = self._options, dict(_group(self._options, "client_kwargs"))
        arguments |= {k: options[k] for k in ("endpoint_url", "use_ssl") if k in options}
        config = _timeouts(self._patience) | _checksums() | _group(options, "config_kwargs")
        if options.get("anon"):
            config["signature_version"] = UNSIGNED
        else:
            arguments |= {_CREDENTIALS[k]: options[k] for k in _CREDENTIALS if k in options}
        try:
            session = botocore.session.Session(profile=options.get("profile"))
            session.register_component("data_loader", _LOADER)
            parsers = session.get_component("response_parser_factory")
            parsers.set_parser_defaults(timestamp_parser=moment)
            made: object = session.create_client("s3", config=Config(**config), **arguments)
        except (ProfileNotFound, TypeError, ValueError) as error:
            raise RefusedError(
                _line(error), "Mend the option, the variable or the profile"
            ) from error
        return made


def moment(value: object) -> datetime:
    """A time as S3 writes it; botocore's own parser, which takes all kinds, takes twenty times as long."""
    if isinstance(value, str):
        for parse in (datetime.fromisoformat, parsedate_to_datetime):
            with suppress(ValueError):
                found = parse(value)
                if found.tzinfo is not None:
                    return found
    other: datetime = parse_timestamp(value)
    return other


class _Fault(TypedDict, total=False):
    Code: str
    Message: str


def _timeouts(patience: float) -> dict[str, Option]:
    return {
        "connect_timeout": min(CONNECT_SECONDS, patience),
        "read_timeout": min(READ_SECONDS, patience),
        "retries": {"total_max_attempts": 1},
        "max_pool_connections": CONNECTIONS,
    }


def _checksums() -> dict[str, Option]:
    """None that a request does not need, unless the user's variables ask for them.

    boto3#4392: checksums in trailers break other stores; sizes and digests are read back instead.
    """
    return {
        name: "when_required"
        for name, variable in CHECKSUMS.items()
        if not os.environ.get(variable)
    }


def _group(options: Mapping[str, Option], name: str) -> dict[str, Option]:
    given = options.get(name)
    return dict(given) if isinstance(given, Mapping) else {}


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def _sorted_out(error: ClientError, bucket: str) -> OSError:
    fault: _Fault = error.response.get("Error", {})
    status: int = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    code, text = fault.get("Code", ""), fault.get("Message") or _line(error)
    if code in _EXPIRED:
        return ExpiredError(errno.EACCES, f"its credentials have expired ({code})")
    if code == "NoSuchBucket":
        return RefusedError(
            f"bucket '{bucket}' does not exist", "Create the bucket, or mend the address"
        )
    if status == 412:
        return FileExistsError(errno.EEXIST, text)
    if status == 404:
        return FileNotFoundError(errno.ENOENT, text)
    if status == 501:
        return NotOfferedError(errno.ENOSYS, f"it does not offer that ({code})")
    if status in (401, 403):
        return PermissionError(errno.EACCES, text)
    if code in _PASSING or status in _PASSING_STATUS or not 300 <= status < 500:
        return OSError(errno.EIO, f"{code}: {text}")
    return OSError(errno.EINVAL, f"{code}: {text}")
