"""Prometheus collectors: rank series from snapshots, request series from HTTP; one registry a server.

Names and labels are those that dashboards of this kind of server scrape; the prefix is a setting.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from engine.config import PAGE_TOKENS
from engine.messages import Snapshot

# Series of creation times double the exposition, and no dashboard of these names reads them.
disable_created_metrics()  # type: ignore[no-untyped-call]

RANK_LABELS = ("model_name", "engine_type", "dp_rank", "tp_rank", "pp_rank", "moe_ep_rank")
RANK_GAUGES = {
    "num_running_reqs": "requests that hold a slot",
    "num_queue_reqs": "requests that wait for a slot",
    "token_usage": "share of the fuller cache pool that is in use",
    "full_token_usage": "share of the full pool that is in use",
    "swa_token_usage": "share of the window pool that is in use",
    "num_used_tokens": "tokens' worth of full pages in use",
    "kv_available_tokens": "tokens' worth of full pages that are free",
    "kv_used_tokens": "tokens' worth of full pages in use",
    "max_total_num_tokens": "tokens' worth of all full pages",
    "page_size": "tokens of a page",
    "num_pages": "full pages",
    "context_len": "longest prompt plus output in tokens",
}
RANK_COUNTERS = {
    "realtime_tokens_total": ("tokens computed", "mode", ("prefill_compute", "prefill_cache", "decode")),
    "forward_execution_seconds_total": (
        "seconds of steps on the device",
        "category",
        ("extend", "decode", "mixed"),
    ),
    "num_retracted_requests_total": ("requests that gave their pages back and waited again", "", ("",)),
    "num_retracted_input_tokens_total": ("prompt tokens of retracted requests", "", ("",)),
    "num_retracted_output_tokens_total": ("generated tokens of retracted requests", "", ("",)),
}
"""Counter -> (help, label name or "", its values). A snapshot's key is `name` or `name{value}`."""

LATENCY_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576)
STREAMING = ("false", "true")


@dataclass(slots=True)
class Timeline:
    """Seconds of one completion on the loop's clock. Kept by the HTTP side, read by `Metrics`."""

    streaming: bool
    prompt_tokens: int
    began_s: float
    first_s: float | None = None
    last_s: float = 0.0
    tokens: int = 0


@dataclass(slots=True)
class _RankSeries:
    """One counter's last published values of one rank."""

    seen: dict[str, float] = field(default_factory=dict)


class Metrics:
    """All collectors of one server; every label combination that is known exists from the start.

    ranks      data-parallel ranks
    endpoints  paths of the HTTP side
    """

    def __init__(
        self, prefix: str, model_name: str, ranks: int, context_length: int, endpoints: Iterable[str]
    ) -> None:
        self.registry = CollectorRegistry()
        self._prefix = prefix
        self._model = model_name
        self._ranks = [(model_name, "unified", str(rank), "0", "0", "0") for rank in range(ranks)]
        self._gauges = {name: self._gauge(name, say, RANK_LABELS) for name, say in RANK_GAUGES.items()}
        self._counters = {
            name: self._counter(name, say, (*RANK_LABELS, label) if label else RANK_LABELS)
            for name, (say, label, _) in RANK_COUNTERS.items()
        }
        self._seen = [_RankSeries() for _ in range(ranks)]
        self._request_series()
        self._http_series()
        self._seed(context_length, endpoints)

    # ---- what feeds it ------------------------------------------------------------------------

    def snapshot(self, msg: Snapshot) -> None:
        """A rank's load and counters."""
        labels = self._ranks[msg.rank]
        full_used = msg.full_pages_total - msg.full_pages_free
        window_used = msg.window_pages_total - msg.window_pages_free
        full_share = full_used / max(msg.full_pages_total, 1)
        window_share = window_used / max(msg.window_pages_total, 1)
        values: dict[str, float] = {
            "num_running_reqs": msg.running,
            "num_queue_reqs": msg.waiting,
            "token_usage": max(full_share, window_share),
            "full_token_usage": full_share,
            "swa_token_usage": window_share,
            "num_used_tokens": full_used * PAGE_TOKENS,
            "kv_used_tokens": full_used * PAGE_TOKENS,
            "kv_available_tokens": msg.full_pages_free * PAGE_TOKENS,
            "max_total_num_tokens": msg.full_pages_total * PAGE_TOKENS,
            "num_pages": msg.full_pages_total,
        }
        for name, value in values.items():
            self._gauges[name].labels(*labels).set(value)
        self._count(msg)

    def accepted(self, line: Timeline) -> None:
        """A completion was accepted."""
        labels = (self._model, STREAMING[line.streaming])
        self.num_requests.labels(*labels).inc()
        self.prompt_tokens.labels(*labels).inc(line.prompt_tokens)
        self.prompt_sizes.labels(self._model).observe(line.prompt_tokens)

    def gained(self, line: Timeline, tokens: int, now_s: float) -> None:
        """A completion's client got tokens."""
        if not tokens:
            return
        labels = (self._model, STREAMING[line.streaming])
        if line.first_s is None:
            line.first_s = now_s
            self.first_token.labels(*labels).observe(now_s - line.began_s)
        else:
            self.between_tokens.labels(self._model).observe((now_s - line.last_s) / tokens)
        line.last_s = now_s
        line.tokens += tokens
        self.generation_tokens.labels(*labels).inc(tokens)

    def ended(self, line: Timeline, aborted: bool, now_s: float) -> None:
        """A completion got its terminal event, or its client left."""
        if aborted:
            self.num_aborted.labels(self._model).inc()
            return
        self.end_to_end.labels(self._model, STREAMING[line.streaming]).observe(now_s - line.began_s)
        self.generation_sizes.labels(self._model).observe(line.tokens)
        if line.first_s is not None and line.tokens > 1:
            self.per_token.labels(self._model).observe((line.last_s - line.first_s) / (line.tokens - 1))

    def request(self, endpoint: str) -> None:
        """An HTTP request began."""
        self.http_requests.labels(endpoint).inc()
        self.http_active.labels(endpoint).inc()

    def response(self, endpoint: str, status: int) -> None:
        """An HTTP request ended; 499 where the client left."""
        self.http_active.labels(endpoint).dec()
        self.http_responses.labels(endpoint, str(status)).inc()

    def exposition(self) -> bytes:
        """The text format of everything."""
        return generate_latest(self.registry)

    # ---- series -------------------------------------------------------------------------------

    def _request_series(self) -> None:
        by_stream = ("model_name", "is_streaming")
        model = ("model_name",)
        self.num_requests = self._counter("num_requests_total", "completions accepted", by_stream)
        self.num_aborted = self._counter("num_aborted_requests_total", "completions cut off", model)
        self.prompt_tokens = self._counter("prompt_tokens_total", "prompt tokens accepted", by_stream)
        self.generation_tokens = self._counter("generation_tokens_total", "tokens given out", by_stream)
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "from receipt to first token", by_stream, LATENCY_S
        )
        self.end_to_end = self._histogram(
            "e2e_request_latency_seconds", "from receipt to the last token", by_stream, LATENCY_S
        )
        self.between_tokens = self._histogram(
            "inter_token_latency_seconds", "between tokens of one completion", model, LATENCY_S
        )
        self.per_token = self._histogram(
            "request_time_per_output_token_seconds", "mean between tokens of one completion", model, LATENCY_S
        )
        self.prompt_sizes = self._histogram("prompt_tokens_histogram", "prompt lengths", model, TOKENS)
        self.generation_sizes = self._histogram(
            "generation_tokens_histogram", "output lengths", model, TOKENS
        )

    def _http_series(self) -> None:
        self.http_requests = self._counter("http_requests_total", "HTTP requests received", ("endpoint",))
        self.http_responses = self._counter(
            "http_responses_total",
            "HTTP answers by status; 499: the client left",
            ("endpoint", "status_code"),
        )
        self.http_active = self._gauge("http_requests_active", "HTTP requests being answered", ("endpoint",))

    def _seed(self, context_length: int, endpoints: Iterable[str]) -> None:
        for labels in self._ranks:
            for gauge in self._gauges.values():
                gauge.labels(*labels)
            self._gauges["page_size"].labels(*labels).set(PAGE_TOKENS)
            self._gauges["context_len"].labels(*labels).set(context_length)
            for name, (_, label, values) in RANK_COUNTERS.items():
                for value in values:
                    self._counters[name].labels(*labels, *((value,) if label else ()))
        for streaming in STREAMING:
            for series in (self.num_requests, self.prompt_tokens, self.generation_tokens):
                series.labels(self._model, streaming)
            for histogram in (self.first_token, self.end_to_end):
                histogram.labels(self._model, streaming)
        self.num_aborted.labels(self._model)
        for sizes in (self.between_tokens, self.per_token, self.prompt_sizes, self.generation_sizes):
            sizes.labels(self._model)
        for endpoint in endpoints:
            self.http_requests.labels(endpoint)
            self.http_responses.labels(endpoint, "200")
            self.http_active.labels(endpoint)

    def _count(self, msg: Snapshot) -> None:
        """Published counters are totals since the rank's start; ours grow by what was added."""
        seen = self._seen[msg.rank].seen
        for key, total in msg.counters.items():
            name, _, value = key.removesuffix("}").partition("{")
            if name not in self._counters:
                continue
            before = seen.get(key, 0.0)
            # A rank that began anew counts from 0.
            added = total - before if total >= before else total
            seen[key] = total
            labels = (*self._ranks[msg.rank], value) if value else self._ranks[msg.rank]
            self._counters[name].labels(*labels).inc(added)

    def _counter(self, name: str, say: str, labels: tuple[str, ...]) -> Counter:
        return Counter(self._prefix + name, say, labels, registry=self.registry)

    def _gauge(self, name: str, say: str, labels: tuple[str, ...]) -> Gauge:
        return Gauge(self._prefix + name, say, labels, registry=self.registry)

    def _histogram(
        self, name: str, say: str, labels: tuple[str, ...], buckets: tuple[float, ...]
    ) -> Histogram:
        return Histogram(self._prefix + name, say, labels, registry=self.registry, buckets=buckets)
