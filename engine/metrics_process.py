"""Series of the api process itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.metrics_buckets import le_of
from engine.metrics_pauses import GcPauses
from engine.metrics_tables import PAUSE_S

PAUSES = GcPauses("api_gc_pause_seconds")
"""Of this process, which has one collector of garbage; `serve` watches it."""


class PauseSeries(Collector):
    """How long garbage collection stopped the process that serves HTTP."""

    def __init__(self, prefix: str, model_name: str) -> None:
        self._name = prefix + "api_gc_pause_seconds"
        self._model = model_name

    def collect(self) -> Iterator[Metric]:
        """The histogram as it is now."""
        seconds = PAUSES.seconds
        say = "garbage collections of the process that serves HTTP"
        family = HistogramMetricFamily(self._name, say, labels=["model_name"])
        bounds = [le_of(bound) for bound in (*PAUSE_S, float("inf"))]
        counts = map(float, accumulate(seconds.counts))
        family.add_metric([self._model], list(zip(bounds, counts, strict=True)), seconds.total)
        yield family


class HttpSeries:
    """Requests and answers by path of the HTTP side; paths that it doesn't know share one label."""

    def __init__(self, registry: CollectorRegistry, prefix: str, endpoints: Iterable[str]) -> None:
        by_path = ("endpoint",)
        self._requests = Counter(
            prefix + "http_requests_total", "HTTP requests received", by_path, registry=registry
        )
        self._responses = Counter(
            prefix + "http_responses_total",
            "HTTP answers by status; 499: the client left",
            ("endpoint", "status_code"),
            registry=registry,
        )
        self._active = Gauge(
            prefix + "http_requests_active", "HTTP requests being answered", by_path, registry=registry
        )
        for endpoint in endpoints:
            self._requests.labels(endpoint)
            self._responses.labels(endpoint, "200")
            self._active.labels(endpoint)

    def request(self, endpoint: str) -> None:
        """As Metrics.request."""
        self._requests.labels(endpoint).inc()
        self._active.labels(endpoint).inc()

    def response(self, endpoint: str, status: int) -> None:
        """As Metrics.response."""
        self._active.labels(endpoint).dec()
        self._responses.labels(endpoint, str(status)).inc()
