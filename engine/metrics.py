"""Prometheus collectors: rank series from snapshots, request series from HTTP; one registry a server.

Names and labels are those that dashboards of this kind of server scrape; the prefix is a setting.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from engine.actors.routing import EXPLICIT
from engine.grammar_metrics import GrammarSeries
from engine.grammar_rank_metrics import RankGrammarSeries
from engine.messages import GOES_ON, Snapshot
from engine.metrics_process import HttpSeries, PauseSeries
from engine.metrics_tables import LATENCY_S, TOKEN_S, TOKENS
from engine.metrics_timeline import Timeline
from engine.metrics_vllm import VllmSeries
from engine.rank_metrics import RankMetrics

__all__ = ["REFRESHES", "STREAMING", "Metrics", "Timeline"]

# Series of creation times double the exposition, and no dashboard of these names reads them.
disable_created_metrics()  # type: ignore[no-untyped-call]

STREAMING = ("false", "true")
REFRESHES = ("refreshed", "throttled", "stale")
"""What became of the ranks' published loads when a group was spread."""


class Metrics:
    """All collectors of one server; every label combination that is known exists from the start.

    ranks      data-parallel ranks
    endpoints  paths of the HTTP side
    method     how requests are spread that demand no rank
    native     the ranks' exchange is the native one
    vllm       the names of vLLM are exposed, too
    """

    def __init__(
        self,
        prefix: str,
        model_name: str,
        ranks: int,
        context_length: int,
        endpoints: Iterable[str],
        method: str = "total_requests",
        native: bool = False,
        vllm: bool = False,
    ) -> None:
        self._method = method
        self.registry = CollectorRegistry()
        self._prefix = prefix
        self._model = model_name
        self._rank_series = RankMetrics(self.registry, prefix, model_name, ranks, context_length, native)
        self._vllm = VllmSeries(self.registry, self._rank_series, model_name) if vllm else None
        self.registry.register(PauseSeries(prefix, model_name))
        self.grammars = GrammarSeries(prefix, model_name)
        self.registry.register(self.grammars)
        self._mask_series = RankGrammarSeries(prefix, model_name, ranks)
        self.registry.register(self._mask_series)
        self._request_series()
        self._routing_series()
        self.http = HttpSeries(self.registry, prefix, endpoints)
        self._seed(ranks)
        # Looked up once: these two count every token.
        self._between = self.between_tokens.labels(model_name)
        self._generated = [self.generation_tokens.labels(model_name, streaming) for streaming in STREAMING]

    # ---- what feeds it ------------------------------------------------------------------------

    def snapshot(self, msg: Snapshot) -> None:
        """A rank's load and counters."""
        self._rank_series.note(msg)
        self._mask_series.note(msg)

    def routed(self, ranks: Sequence[int], demanded: Sequence[int], route: int) -> None:
        """Completions went to these ranks; their client demanded those (-1: none), or `route` for all."""
        for rank, wanted in zip(ranks, demanded, strict=True):
            policy = self._method if wanted == -1 else EXPLICIT
            self.routed_requests.labels(self._model, str(rank), policy).inc()
        if route != -1 and len(ranks) > 1:
            self.atomic_batches.labels(self._model, str(route), EXPLICIT).inc()
            self.atomic_items.labels(self._model, str(route), EXPLICIT).inc(len(ranks))

    def refreshed(self, result: str) -> None:
        """What became of the ranks' loads; empty where there are none."""
        if result:
            self.budget_refreshes.labels(self._model, result).inc()

    def accepted(self, line: Timeline) -> None:
        """A completion was accepted."""
        labels = (self._model, STREAMING[line.streaming])
        self.num_requests.labels(*labels).inc()
        if line.prompt_tokens:
            self.prompt_tokens.labels(*labels).inc(line.prompt_tokens)
            self.prompt_sizes.labels(self._model).observe(line.prompt_tokens)
            if self._vllm:
                self._vllm.accepted(line)

    def gained(self, line: Timeline, tokens: int, now_s: float) -> None:
        """A completion's client got tokens."""
        if not tokens:
            return
        if line.first_s is None:
            line.first_s = now_s
            self.first_token.labels(self._model, STREAMING[line.streaming]).observe(now_s - line.began_s)
            if self._vllm:
                self._vllm.first_token(line)
        else:
            self._between.observe((now_s - line.last_s) / tokens)
            if self._vllm:
                self._vllm.between(line, (now_s - line.last_s) / tokens)
        line.last_s = now_s
        line.tokens += tokens
        self._generated[line.streaming].inc(tokens)
        if self._vllm:
            self._vllm.gained(line, tokens)

    def ended(self, line: Timeline, aborted: bool, now_s: float, finish: int = GOES_ON) -> None:
        """A completion got its terminal event with this finish code, or its client left."""
        if self._vllm:
            self._vllm.ended(line, finish, now_s)
        if aborted:
            self.num_aborted.labels(self._model).inc()
            return
        self.end_to_end.labels(self._model, STREAMING[line.streaming]).observe(now_s - line.began_s)
        self.generation_sizes.labels(self._model).observe(line.tokens)
        if line.first_s is not None and line.tokens > 1:
            self.per_token.labels(self._model).observe((line.last_s - line.first_s) / (line.tokens - 1))

    def constrained(self, completions: int) -> None:
        """So many completions have their grammar."""
        self.num_constrained.labels(self._model).inc(completions)

    def grammar_waited(self, seconds: float) -> None:
        """An HTTP request has its grammars, or won't get them."""
        self.grammar_wait.labels(self._model).observe(seconds)

    def grammar_left(self, completions: int) -> None:
        """The client of so many completions left while they waited for a grammar."""
        self.num_aborted.labels(self._model).inc(completions)

    def request(self, endpoint: str) -> None:
        """An HTTP request began."""
        self.http.request(endpoint)

    def response(self, endpoint: str, status: int) -> None:
        """An HTTP request ended; 499 where the client left."""
        self.http.response(endpoint, status)

    def exposition(self) -> bytes:
        """The text format of everything."""
        return generate_latest(self.registry)

    # ---- series -------------------------------------------------------------------------------

    def _request_series(self) -> None:
        by_stream = ("model_name", "is_streaming")
        model = ("model_name",)
        self.num_requests = self._counter("num_requests_total", "completions accepted", by_stream)
        self.num_aborted = self._counter("num_aborted_requests_total", "completions cut off", model)
        self.num_constrained = self._counter(
            "num_so_requests_total", "completions whose output a grammar constrains", model
        )
        self.grammar_wait = self._histogram(
            "grammar_wait_seconds", "of an HTTP request for its grammars", model, LATENCY_S
        )
        self.prompt_tokens = self._counter("prompt_tokens_total", "prompt tokens accepted", by_stream)
        self.generation_tokens = self._counter("generation_tokens_total", "tokens given out", by_stream)
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "from receipt to first token", by_stream, LATENCY_S
        )
        self.end_to_end = self._histogram(
            "e2e_request_latency_seconds", "from receipt to the last token", by_stream, LATENCY_S
        )
        self.between_tokens = self._histogram(
            "inter_token_latency_seconds", "between tokens of one completion", model, TOKEN_S
        )
        self.per_token = self._histogram(
            "request_time_per_output_token_seconds", "mean between tokens of one completion", model, TOKEN_S
        )
        self.prompt_sizes = self._histogram("prompt_tokens_histogram", "prompt lengths", model, TOKENS)
        self.generation_sizes = self._histogram(
            "generation_tokens_histogram", "output lengths", model, TOKENS
        )

    def _routing_series(self) -> None:
        by_rank = ("model_name", "rank", "policy")
        self.routed_requests = self._counter(
            "dp_routed_requests_total", "completions sent to a rank", by_rank
        )
        self.atomic_batches = self._counter(
            "dp_atomic_batches_total", "groups that a client sent to one rank", by_rank
        )
        self.atomic_items = self._counter(
            "dp_atomic_batch_items_total", "completions in such groups", by_rank
        )
        self.budget_refreshes = self._counter(
            "dp_budget_refresh_total", "looks at the loads that ranks publish", ("model_name", "result")
        )

    def _seed(self, ranks: int) -> None:
        for streaming in STREAMING:
            for series in (self.num_requests, self.prompt_tokens, self.generation_tokens):
                series.labels(self._model, streaming)
            for histogram in (self.first_token, self.end_to_end):
                histogram.labels(self._model, streaming)
        self.num_aborted.labels(self._model)
        self.num_constrained.labels(self._model)
        self.grammar_wait.labels(self._model)
        for sizes in (self.between_tokens, self.per_token, self.prompt_sizes, self.generation_sizes):
            sizes.labels(self._model)
        for rank in range(ranks):
            for policy in (self._method, EXPLICIT):
                self.routed_requests.labels(self._model, str(rank), policy)
            for series in (self.atomic_batches, self.atomic_items):
                series.labels(self._model, str(rank), EXPLICIT)
        for result in REFRESHES:
            self.budget_refreshes.labels(self._model, result)

    def _counter(self, name: str, say: str, labels: tuple[str, ...]) -> Counter:
        return Counter(self._prefix + name, say, labels, registry=self.registry)

    def _histogram(
        self, name: str, say: str, labels: tuple[str, ...], buckets: tuple[float, ...]
    ) -> Histogram:
        return Histogram(self._prefix + name, say, labels, registry=self.registry, buckets=buckets)
