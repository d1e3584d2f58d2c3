"""Figures for Prometheus, read when somebody asks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.types import ASGIApp, Message, Receive, Scope, Send

if TYPE_CHECKING:
    from warmup.service.parts import Parts

STATES = ("queued", "running", "cancelling", "done", "failed", "cancelled")
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 15)


class Metrics:
    """One service's figures."""

    def __init__(self, parts: Parts) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Queue(parts))
        self._requests = Counter(
            "warmup_http_requests",
            "Requests by route, method and status.",
            ("route", "method", "status"),
            registry=self._registry,
        )
        self._seconds = Histogram(
            "warmup_http_seconds",
            "Time until the answer began, by route.",
            ("route",),
            buckets=BUCKETS,
            registry=self._registry,
        )

    def text(self) -> bytes:
        """All of them, in Prometheus' format."""
        return generate_latest(self._registry)

    def count(self, route: str, method: str, status: int, seconds: float) -> None:
        """One request."""
        self._requests.labels(route, method, str(status)).inc()
        self._seconds.labels(route).observe(seconds)


class _Queue:
    """Reads the queue."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def collect(self) -> Iterable[Metric]:
        parts = self._parts
        jobs = GaugeMetricFamily("warmup_jobs", "Jobs by state.", labels=["state"])
        counts = parts.queue.counts()
        for state in STATES:
            jobs.add_metric([state], counts.get(state, 0))
        yield jobs
        targets = CounterMetricFamily(
            "warmup_targets",
            "Targets that have ended since the start, by status.",
            labels=["status"],
        )
        for status, count in sorted(parts.queue.ended.items()):
            targets.add_metric([status], count)
        yield targets
        yield _gauge("warmup_runner_alive", "Whether jobs are worked on.", parts.runner.alive)
        yield _gauge("warmup_listeners", "Clients that listen to events.", parts.feed.listeners)
        yield _gauge("warmup_last_event", "The newest event's id.", parts.feed.last)
        pace = parts.queue.pace
        if pace is not None:
            yield _gauge("warmup_target_seconds", "What a target took of late.", pace)


def _gauge(name: str, words: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, words, value=float(value))


class Counting:
    """Wraps the application: counts requests by route."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        import asyncio

        clock = asyncio.get_running_loop().time
        began = clock()

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", "other")
                method = scope["method"] if scope["method"] in _METHODS else "other"
                self._metrics.count(route, method, message["status"], clock() - began)
            await send(message)

        await self._app(scope, receive, counted)


_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
