"""Series under the names that vLLM's dashboards and routers know: the same figures, for each engine.

An engine is a data-parallel rank. There are no series of a prefix cache, since there is none.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from engine.messages import ABORTED, FAILED, GOES_ON, LENGTH, STOP_EOS, STOP_STRING, STOP_TOKEN
from engine.metrics_buckets import key_of
from engine.metrics_tables import BLOCK, LATENCY_S, TOKEN_S, TOKENS
from engine.metrics_timeline import Timeline
from engine.rank_metrics import RankMetrics, buckets_of

LABELS = ("model_name", "engine")
REASONS = {
    STOP_EOS: "stop",
    STOP_TOKEN: "stop",
    STOP_STRING: "stop",
    LENGTH: "length",
    ABORTED: "abort",
    FAILED: "error",
    GOES_ON: "abort",
}
"""Finish code -> finished_reason; a request that goes on has lost its client."""

GAUGES = {
    "vllm:num_requests_running": ("num_running_reqs", "requests that hold a slot"),
    "vllm:num_requests_waiting": ("num_queue_reqs", "requests that wait for a slot"),
    "vllm:kv_cache_usage_perc": ("token_usage", "share of the fuller cache pool that is in use, 0 to 1"),
}
COUNTERS = {
    "vllm:num_preemptions": ("num_retracted_requests_total", "requests that gave their pages back"),
    "vllm:spec_decode_num_drafts": ("spec_drafts_total", "drafts of single requests"),
    "vllm:spec_decode_num_draft_tokens": ("spec_draft_tokens_total", "drafted tokens"),
    "vllm:spec_decode_num_accepted_tokens": ("spec_accepted_tokens_total", "drafted tokens accepted"),
}
HISTOGRAMS = {
    "vllm:request_queue_time_seconds": ("queue_time_seconds", {}, "from the rank's mailbox to a slot"),
    "vllm:request_prefill_time_seconds": (
        "per_stage_req_latency_seconds",
        {"stage": "prefill"},
        "from the slot to the first token",
    ),
    "vllm:request_decode_time_seconds": (
        "per_stage_req_latency_seconds",
        {"stage": "decode"},
        "from the first token to the end",
    ),
    "vllm:request_inference_time_seconds": (
        "per_stage_req_latency_seconds",
        {"stage": "inference"},
        "from the slot to the end",
    ),
    "vllm:iteration_tokens_total": ("iteration_tokens", {}, "planned tokens of a step, idle ones left out"),
}
"""Name -> (the figure of a rank that it repeats, its labels, help)."""


class VllmSeries(Collector):
    """Aliases of rank figures, collected, and request series, fed by `Metrics`."""

    def __init__(self, registry: CollectorRegistry, ranks: RankMetrics, model_name: str) -> None:
        self._ranks = ranks
        self._labels = [(model_name, str(rank)) for rank in range(ranks.ranks)]

        def counter(name: str, say: str, *more: str) -> Counter:
            return Counter(f"vllm:{name}", say, (*LABELS, *more), registry=registry)

        def histogram(name: str, say: str, bounds: tuple[float, ...]) -> Histogram:
            return Histogram(f"vllm:{name}", say, LABELS, registry=registry, buckets=bounds)

        self._prompt = counter("prompt_tokens_total", "prompt tokens accepted")
        self._generated = counter("generation_tokens_total", "tokens given out")
        self._ends = counter("request_success_total", "ended requests by reason", "finished_reason")
        self._first = histogram("time_to_first_token_seconds", "from receipt to first token", LATENCY_S)
        self._between = histogram("inter_token_latency_seconds", "between tokens of one request", TOKEN_S)
        self._whole = histogram("e2e_request_latency_seconds", "from receipt to the last token", LATENCY_S)
        self._prompt_size = histogram("request_prompt_tokens", "prompt lengths", TOKENS)
        self._size = histogram("request_generation_tokens", "output lengths", TOKENS)
        for labels in self._labels:
            for series in (self._prompt, self._generated):
                series.labels(*labels)
            for one in (self._first, self._between, self._whole, self._prompt_size, self._size):
                one.labels(*labels)
            for reason in dict.fromkeys(REASONS.values()):
                self._ends.labels(*labels, reason)
        registry.register(self)

    def accepted(self, line: Timeline) -> None:
        """A prompt was accepted."""
        labels = self._labels[line.rank]
        self._prompt.labels(*labels).inc(line.prompt_tokens)
        self._prompt_size.labels(*labels).observe(line.prompt_tokens)

    def first_token(self, line: Timeline) -> None:
        """A completion's client got its first token."""
        assert line.first_s is not None
        self._first.labels(*self._labels[line.rank]).observe(line.first_s - line.began_s)

    def between(self, line: Timeline, seconds: float) -> None:
        """So long between two tokens of a completion."""
        self._between.labels(*self._labels[line.rank]).observe(seconds)

    def gained(self, line: Timeline, tokens: int) -> None:
        """A completion's client got tokens."""
        self._generated.labels(*self._labels[line.rank]).inc(tokens)

    def ended(self, line: Timeline, finish: int, now_s: float) -> None:
        """A completion ended with this finish code."""
        labels = self._labels[line.rank]
        reason = REASONS[finish]
        self._ends.labels(*labels, reason).inc()
        if reason in ("stop", "length"):
            self._whole.labels(*labels).observe(now_s - line.began_s)
            self._size.labels(*labels).observe(line.tokens)

    def collect(self) -> Iterator[Metric]:
        """What repeats a rank's figures, as the last snapshots have them."""
        for name, (source, say) in GAUGES.items():
            yield self._plain(GaugeMetricFamily(name, say, labels=LABELS), source)
        for name, (source, say) in COUNTERS.items():
            yield self._plain(CounterMetricFamily(name, say, labels=LABELS), source)
        yield self._places()
        for name, (source, own, say) in HISTOGRAMS.items():
            family = HistogramMetricFamily(name, say, labels=LABELS)
            series = self._ranks.histograms[source]
            for rank, labels in enumerate(self._labels):
                pairs, total = buckets_of(self._ranks, rank, source, series, own)
                family.add_metric(labels, pairs, total)
            yield family

    def _plain(self, family: GaugeMetricFamily | CounterMetricFamily, source: str) -> Metric:
        for rank, labels in enumerate(self._labels):
            family.add_metric(labels, self._ranks.value(rank, source))
        return family

    def _places(self) -> Metric:
        """vLLM counts places in a draft from 0."""
        name = "vllm:spec_decode_num_accepted_tokens_per_pos"
        family = CounterMetricFamily(name, "accepted drafts by their place", labels=[*LABELS, "position"])
        for rank, labels in enumerate(self._labels):
            for place in range(BLOCK):
                key = key_of("spec_accepted_tokens_per_pos_total", {"position": str(place + 1)})
                family.add_metric([*labels, str(place)], self._ranks.value(rank, key))
        return family
