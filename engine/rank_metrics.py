"""Series of ranks, from snapshots: gauges are set, counters grow by what was counted since the last one."""

from __future__ import annotations

import re

from prometheus_client import CollectorRegistry, Counter, Gauge

from engine.config import PAGE_TOKENS
from engine.messages import Snapshot

BLOCK = 5
"""Drafted tokens of a round for whose places there is a series from the start: the block of DSpark."""

LABELS = ("model_name", "engine_type", "dp_rank", "tp_rank", "pp_rank", "moe_ep_rank")
GAUGES = {
    "num_running_reqs": "requests that hold a slot",
    "num_queue_reqs": "requests that wait for a slot",
    "num_retracted_reqs": "waiting requests that gave their pages back",
    "gen_throughput": "output tokens a second between the last two snapshots",
    "token_usage": "share of the fuller cache pool that is in use",
    "full_token_usage": "share of the full pool that is in use",
    "swa_token_usage": "share of the window pool that is in use",
    "new_token_ratio": "share of the output limit that admission reserves for each running request",
    "num_used_tokens": "tokens' worth of full pages in use",
    "kv_available_tokens": "tokens' worth of full pages that are free",
    "kv_used_tokens": "tokens' worth of full pages in use",
    "max_total_num_tokens": "tokens' worth of all full pages",
    "page_size": "tokens of a page",
    "num_pages": "full pages",
    "context_len": "longest prompt plus output in tokens",
    "spec_accept_length": "tokens that a request gains in a round with drafts, running mean",
    "spec_accept_rate": "share of verified drafts that are accepted, running mean",
    "spec_cap_length": "rows of a request that a round verifies, running mean",
    "spec_num_draft_tokens": "drafted tokens of a round; 0 where nothing is drafted",
    "spec_budget": "drafted rows that the last step might verify; -1: all",
    "spec_steps_without_draft": "decode steps since one drafted last",
    "spec_expected_tokens_per_second": "tokens a second that the scheduler expected of its steps",
    "spec_plain_tokens_per_second": "tokens a second that it expected of the same steps without drafts",
    "spec_gained_tokens_per_second": "tokens a second that the same steps brought",
}
COUNTERS = {
    "realtime_tokens_total": ("tokens computed", "mode", ("prefill_compute", "prefill_cache", "decode")),
    "cuda_graph_passes_total": (
        "steps by what ran them",
        "mode",
        ("decode_graph", "decode_none", "prefill_graph", "prefill_none"),
    ),
    "forward_execution_seconds_total": (
        "seconds of steps on the device",
        "category",
        ("idle", "extend", "decode", "mixed"),
    ),
    "num_retracted_requests_total": ("requests that gave their pages back and waited again", "", ("",)),
    "num_retracted_input_tokens_total": ("prompt tokens of retracted requests", "", ("",)),
    "num_retracted_output_tokens_total": ("generated tokens of retracted requests", "", ("",)),
    "spec_verify_calls_total": ("rounds of single requests that verified drafts", "", ("",)),
    "spec_drafts_total": ("drafts of single requests", "", ("",)),
    "spec_draft_tokens_total": ("drafted tokens", "", ("",)),
    "spec_verified_tokens_total": ("drafted tokens that were verified", "", ("",)),
    "spec_accepted_tokens_total": ("drafted tokens that were accepted", "", ("",)),
    "spec_emitted_tokens_total": (
        "tokens that rounds brought, those after a request's end included",
        "",
        ("",),
    ),
    "spec_cap_trimmed_total": ("drafted tokens for which a request had no page or no length left", "", ("",)),
    "spec_steps_total": ("steps by what they drafted", "kind", ("none", "plain", "draft", "probe")),
    "spec_rows_truncated_total": (
        "rounds whose last tokens came after their request's end",
        "reason",
        ("stop", "max_tokens"),
    ),
    "spec_phase_seconds_total": ("seconds of rounds on the device", "phase", ("draft", "verify", "commit")),
    "spec_accepted_tokens_per_pos_total": (
        "accepted drafts by their place in the block",
        "position",
        tuple(str(place) for place in range(1, BLOCK + 1)),
    ),
    "spec_verify_length_total": (
        "rounds by the rows that they verified",
        "rows",
        tuple(str(rows) for rows in range(1, BLOCK + 2)),
    ),
}
"""Counter -> (help, label name or "", its values)."""

FIGURE = re.compile(r'(?P<name>\w+)(?:\{\w+="(?P<value>\w+)"\})?')
"""A key of Snapshot.counters: a name, perhaps with one label."""


class RankMetrics:
    """Series of every rank in this registry; all label combinations exist from the start.

    context_length  tokens; the same on every rank
    """

    def __init__(
        self, registry: CollectorRegistry, prefix: str, model_name: str, ranks: int, context_length: int
    ) -> None:
        self._labels = [(model_name, "unified", str(rank), "0", "0", "0") for rank in range(ranks)]
        self._gauges = {
            name: Gauge(prefix + name, say, LABELS, registry=registry) for name, say in GAUGES.items()
        }
        self._counters = {
            name: Counter(prefix + name, say, (*LABELS, label) if label else LABELS, registry=registry)
            for name, (say, label, _) in COUNTERS.items()
        }
        self._counted: list[dict[str, float]] = [{} for _ in range(ranks)]
        for labels in self._labels:
            for gauge in self._gauges.values():
                gauge.labels(*labels)
            self._gauges["page_size"].labels(*labels).set(PAGE_TOKENS)
            self._gauges["context_len"].labels(*labels).set(context_length)
            for name, (_, label, values) in COUNTERS.items():
                for value in values:
                    self._counters[name].labels(*labels, *((value,) if label else ()))

    def note(self, msg: Snapshot) -> None:
        """A rank's load, and its figures by name."""
        labels = self._labels[msg.rank]
        for name, value in _load_of(msg).items():
            self._gauges[name].labels(*labels).set(value)
        for key, figure in msg.counters.items():
            parts = FIGURE.fullmatch(key)
            if parts is None:
                continue
            name = parts["name"]
            if name in self._gauges:
                self._gauges[name].labels(*labels).set(figure)
            elif name in self._counters:
                self._count(msg.rank, key, name, parts["value"], figure)

    def _count(self, rank: int, key: str, name: str, value: str | None, total: float) -> None:
        """Published totals begin with the rank's process; ours go on over its end."""
        before = self._counted[rank].get(key, 0.0)
        self._counted[rank][key] = total
        labels = self._labels[rank] if value is None else (*self._labels[rank], value)
        self._counters[name].labels(*labels).inc(total - before if total >= before else total)


def _load_of(msg: Snapshot) -> dict[str, float]:
    """Gauges that follow from a snapshot's own fields."""
    full_used = msg.full_pages_total - msg.full_pages_free
    window_used = msg.window_pages_total - msg.window_pages_free
    full_share = full_used / max(msg.full_pages_total, 1)
    window_share = window_used / max(msg.window_pages_total, 1)
    return {
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
