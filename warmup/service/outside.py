"""What is asked without the API's prefix: the page, health, figures, the cookie."""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import PlainTextResponse

from compilecache.picture.page import style as picture_style
from warmup.service.answers import PAGE_SECURITY, SECURITY
from warmup.service.api import Its, must_know, problems
from warmup.service.bodies import Health, Login
from warmup.service.doors import COOKIE, SESSION_SECONDS, refuse_other_sites
from warmup.service.metrics import Metrics
from warmup.service.problems import Refusal

outside = APIRouter()

FILES = {
    "": ("page.html", "text/html"),
    "page.js": ("page.js", "text/javascript"),
    "page.css": ("page.css", "text/css"),
}


def _file(name: str) -> Response:
    file, kind = FILES[name]
    data = files("warmup.service").joinpath("page", file).read_bytes()
    if name == "page.css":
        data = picture_style().encode() + data
    return Response(data, media_type=f"{kind}; charset=utf-8", headers=PAGE_SECURITY)


@outside.get("/", include_in_schema=False)
def page() -> Response:
    """The page; it holds no data, and asks for a token where one is needed."""
    return _file("")


@outside.get("/page.js", include_in_schema=False)
def script() -> Response:
    """Its script."""
    return _file("page.js")


@outside.get("/page.css", include_in_schema=False)
def style() -> Response:
    """Its style."""
    return _file("page.css")


NOT_NOW: dict[int | str, dict[str, object]] = {
    503: {"model": Health, "description": "Not now; says why."}
}


@outside.get("/healthz", tags=["health"], summary="Alive", responses={**NOT_NOW, **problems(421)})
def healthz(its: Its, response: Response) -> Health:
    """Whether a restart would not help; needs no token."""
    broken = its.runner.broken
    response.status_code = 503 if broken else 200
    return Health(ok=not broken, why=broken or "")


@outside.get(
    "/readyz",
    tags=["health"],
    summary="Ready",
    responses={**NOT_NOW, **problems(421)},
)
def readyz(its: Its, response: Response) -> Health:
    """Whether jobs are taken and worked on; needs no token."""
    health = its.readiness()
    response.status_code = 200 if health.ok else 503
    return health


@outside.get(
    "/metrics",
    tags=["health"],
    summary="Figures for Prometheus",
    dependencies=[Depends(must_know)],
    response_class=PlainTextResponse,
    responses=problems(401, 421),
)
def metrics(request: Request) -> Response:
    """Text in Prometheus' format."""
    figures: Metrics = request.app.state.metrics
    return Response(figures.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


@outside.post(
    "/login",
    tags=["page"],
    summary="Trade the token for a cookie",
    status_code=204,
    response_class=Response,
    responses=problems(400, 401, 403, 408, 413, 421, 422),
)
def login(given: Login, request: Request, its: Its) -> Response:
    """For the page: the cookie cannot be read by scripts, and no other site can send it."""
    refuse_other_sites(request)
    if not its.doors.is_token(given.token):
        raise Refusal(401, "the token is wrong", next_step="Look into the service's token file")
    response = Response(status_code=204, headers=SECURITY)
    response.set_cookie(
        COOKIE,
        its.doors.new_session(),
        max_age=SESSION_SECONDS,
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
        path="/",
    )
    return response


@outside.post(
    "/logout",
    tags=["page"],
    summary="Drop the cookie",
    status_code=204,
    response_class=Response,
    responses=problems(403, 421),
)
def logout(request: Request) -> Response:
    """The browser forgets it."""
    refuse_other_sites(request)
    response = Response(status_code=204, headers=SECURITY)
    response.delete_cookie(COOKIE, path="/", httponly=True, samesite="strict")
    return response
