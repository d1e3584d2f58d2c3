"""Who may come in: the token, the page's cookie, and the names that the service is called by."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Collection

from fastapi import Request
from fastapi.security import APIKeyCookie, HTTPAuthorizationCredentials, HTTPBearer

from warmup.service.problems import Refusal
from warmup.service.settings import LOOPBACK

COOKIE = "warmup_session"
SESSION_SECONDS = 12 * 3600

bearer = HTTPBearer(
    auto_error=False, scheme_name="token", description="The token of the service's token file."
)
cookie = APIKeyCookie(
    name=COOKIE,
    auto_error=False,
    scheme_name="session",
    description="Set by POST /login for the page; good for reading, and for the page's own buttons.",
)


class Doors:
    """Knows the token; nothing else does."""

    def __init__(self, token: str | None, hosts: Collection[str]) -> None:
        self._token = token.encode() if token else None
        self._hosts = {name.lower() for name in hosts}

    @property
    def open(self) -> bool:
        """Whether everybody on this host may come in."""
        return self._token is None

    def is_token(self, given: str) -> bool:
        """Compared in constant time."""
        digests = [hashlib.sha256(text).digest() for text in (given.encode(), self._token or b"")]
        return self._token is not None and hmac.compare_digest(*digests)

    def new_session(self) -> str:
        """For the cookie of somebody who has shown the token. A new token ends all sessions."""
        until = str(int(time.time()) + SESSION_SECONDS)
        return f"{until}.{self._seal(until)}"

    def is_session(self, given: str) -> bool:
        """Whether it is one of ours and has not run out."""
        until, _, seal = given.partition(".")
        if self._token is None or not until.isdecimal() or not until.isascii() or len(until) > 12:
            return False
        good = hmac.compare_digest(seal.encode(), self._seal(until).encode())
        return good and int(until) > time.time()

    def _seal(self, until: str) -> str:
        return hmac.new(self._token or b"", f"session {until}".encode(), "sha256").hexdigest()

    def knows_host(self, header: str) -> bool:
        """Whether a Host header names this service; a page that rebinds its own name does not."""
        if self._token is not None and not self._hosts:
            return True
        name = header.rpartition(":")[0] if _has_port(header) else header
        return name.strip("[]").lower() in self._hosts | LOOPBACK

    def check(
        self, request: Request, given: HTTPAuthorizationCredentials | None, session: str | None
    ) -> None:
        """Raises Refusal for who has neither token nor session, and for another site's page."""
        if given is not None and self.is_token(given.credentials):
            return
        if not self.open and not (session and given is None and self.is_session(session)):
            wrong = "the token is wrong" if given is not None else "there is no token"
            raise Refusal(
                401,
                f"{wrong}, or the session has run out",
                next_step="Send 'Authorization: Bearer TOKEN' with the token of the token file",
            )
        refuse_other_sites(request)


def refuse_other_sites(request: Request) -> None:
    """Raises Refusal when a browser says that another site's page sent a request that changes things."""
    if request.method in ("GET", "HEAD", "OPTIONS"):
        return
    site = request.headers.get("sec-fetch-site", "none")
    origin = request.headers.get("origin")
    foreign = origin is not None and origin.partition("://")[2] != request.headers.get("host", "")
    if foreign or site not in ("none", "same-origin"):
        raise Refusal(
            403,
            "another site's page sent this",
            next_step="Use this service's own page, or the token",
        )


def _has_port(header: str) -> bool:
    return ":" in header and not header.endswith("]")
