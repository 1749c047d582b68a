"""Counts of HTTP requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

if TYPE_CHECKING:
    from starlette.types import Scope

_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class HTTPMetrics:
    """One instance for each server; label values come from the routes, so that no client can add any."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        labels = ("method", "path", "status")
        self._requests = Counter("specdec:http_requests", "HTTP requests", labels, registry=self.registry)
        self._seconds = Histogram(
            "specdec:http_request_duration_seconds",
            "From the first byte of a request to the last of its answer",
            ("path",),
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self._active = Gauge("specdec:http_requests_active", "Requests being answered", registry=self.registry)

    def begin(self) -> None:
        """A request has come."""
        self._active.inc()

    def count(self, scope: Scope, status: int, seconds: float) -> None:
        """A request is over; status 0 when the client went before an answer."""
        self._active.dec()
        route = getattr(scope.get("route"), "path", "other")
        method = scope["method"] if scope["method"] in ("GET", "POST", "OPTIONS", "HEAD") else "other"
        self._requests.labels(method, route, str(status or 499)).inc()
        self._seconds.labels(route).observe(seconds)
