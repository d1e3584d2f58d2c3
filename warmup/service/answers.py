"""Answers that are not data: problems, and what every answer says to browsers."""

from __future__ import annotations

import re
from collections.abc import Mapping

from starlette.responses import Response

from warmup.service.problems import MEDIA_TYPE, Problem

SECURITY = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
"""For every answer that is not the page's."""

PAGE_SECURITY = {
    **SECURITY,
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}

_SHOWN = 600
_UNFIT = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def problem_response(problem: Problem, headers: Mapping[str, str] | None = None) -> Response:
    """A problem as JSON; text that came from outside is cut, and loses what is no text."""
    clean = problem.model_copy(
        update={"detail": plain(problem.detail), "next_step": plain(problem.next_step)}
    )
    more = {"www-authenticate": "Bearer"} if problem.status == 401 else {}
    return Response(
        clean.model_dump_json(),
        status_code=problem.status,
        media_type=MEDIA_TYPE,
        headers={**SECURITY, **more, **(headers or {})},
    )


def plain(text: str) -> str:
    """Without control characters, and not longer than anybody would read."""
    return _UNFIT.sub("\N{REPLACEMENT CHARACTER}", text[:_SHOWN])
