"""Series of a rank: name, meaning, labels beside those of the rank, and the values that these may have.

What a rank publishes under other names is not exported, and every combination here exists from the start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product

BLOCK = 5
"""Drafted tokens of a round for whose places there is a series from the start: the block of DSpark."""

RANK_LABELS = ("model_name", "engine_type", "dp_rank", "tp_rank", "pp_rank", "moe_ep_rank")

CHANNELS = ("mlp_info", "verify_tier")
"""Labels of the channels of engine/exchange, by number."""

EXCHANGE_TIMES = (
    "dp2_sync_exchange_seconds",
    "dp2_sync_peer_wait_seconds",
    "dp2_sync_arrival_skew_seconds",
    "dp2_sync_post_latest_arrival_seconds",
)
"""Histograms of the native exchange, in the order of a channel's `times()`."""

EXCHANGE_S = (1e-7, 2e-7, 5e-7, 1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 0.01, 0.1)
LATENCY_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
TOKEN_S = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, *LATENCY_S)
"""Between tokens: those of one accepted draft come within microseconds of each other."""
PAUSE_S = (1e-5, 1e-4, 1e-3, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
WAIT_S = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 10)
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576)
"""Of a request."""
STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
RATIOS = (1, 1.1, 1.25, 1.5, 1.75, 2, 3, 4, 6, 8)

STAGES = ("queue", "prefill", "decode", "inference")
PHASES = ("submit", "abort", "peer", "results", "tick", "other")
"""What a scheduler works on, by the kind of the message."""

STARTS = ("load", "total")
ERRORS = (
    "ExchangeAbi",
    "ExchangeGeometry",
    "ExchangeSession",
    "ExchangeOwned",
    "ExchangeForked",
    "ExchangeTimeout",
    "PeerDead",
    "PeerReplaced",
    "SequenceDiverged",
    "ExchangeClosed",
    "ExchangeSyscall",
)


@dataclass(frozen=True)
class Series:
    """One name: its meaning, its own labels with their values, and of a histogram the buckets' bounds."""

    say: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    bounds: tuple[float, ...] = ()

    def combinations(self) -> list[dict[str, str]]:
        """Every set of values of its labels."""
        return [dict(zip(self.labels, values, strict=True)) for values in product(*self.labels.values())]


GAUGES = {
    "num_running_reqs": Series("requests that hold a slot"),
    "num_queue_reqs": Series("requests that wait for a slot"),
    "num_matcher_queue_reqs": Series("requests whose rank loads their grammar"),
    "num_retracted_reqs": Series("waiting requests that gave their pages back"),
    "gen_throughput": Series("output tokens a second between the last two snapshots"),
    "token_usage": Series("share of the fuller cache pool that is in use"),
    "full_token_usage": Series("share of the full pool that is in use"),
    "swa_token_usage": Series("share of the window pool that is in use"),
    "new_token_ratio": Series("share of the output limit that admission reserves for each running request"),
    "num_used_tokens": Series("tokens' worth of full pages in use"),
    "kv_available_tokens": Series("tokens' worth of full pages that are free"),
    "kv_used_tokens": Series("tokens' worth of full pages in use"),
    "max_total_num_tokens": Series("tokens' worth of all full pages"),
    "page_size": Series("tokens of a page"),
    "num_pages": Series("full pages"),
    "context_len": Series("longest prompt plus output in tokens"),
    "spec_accept_length": Series("tokens that a request gains in a round with drafts, running mean"),
    "spec_accept_rate": Series("share of verified drafts that are accepted, running mean"),
    "spec_cap_length": Series("rows of a request that a round verifies, running mean"),
    "spec_num_draft_tokens": Series("drafted tokens of a round; 0 where nothing is drafted"),
    "spec_budget": Series("drafted rows that the last step might verify; -1: all"),
    "spec_steps_without_draft": Series("decode steps since one drafted last"),
    "spec_expected_tokens_per_second": Series("tokens a second that the scheduler expected of its steps"),
    "spec_plain_tokens_per_second": Series(
        "tokens a second that it expected of the same steps without drafts"
    ),
    "spec_gained_tokens_per_second": Series("tokens a second that the same steps brought"),
    "utilization": Series("share of what limits the rank: its slots in use, or its cache where that is more"),
    "decode_sum_seq_lens": Series("known tokens of the requests that hold a slot"),
    "kernel_set": Series("1 for the kernel set that runs", {"set": ("native", "tiles", "torch", "triton")}),
    "kv_cache_format": Series(
        "1 for what caches hold: values of the model's type, or FP8 rows", {"format": ("fp8", "model")}
    ),
    "sampling_set": Series(
        "1 for what samples and verifies: kernels, or plain torch", {"set": ("torch", "triton")}
    ),
    "weight_memory_usage_gb": Series("of the loaded weights, in GB of 2^30 bytes"),
    "kv_cache_memory_usage_gb": Series("of all cache pools, in GB of 2^30 bytes"),
    "graph_memory_usage_gb": Series("of captured steps and their buffers, in GB of 2^30 bytes"),
    "startup_cuda_graph_time_seconds": Series(
        "that capturing steps took, of the time until the model is loaded"
    ),
    "startup_time_seconds": Series(
        "from the start of a rank: until its model is loaded; until it takes requests", {"phase": STARTS}
    ),
    "scheduler_phase_max_seconds": Series(
        "longest piece of the scheduler's work in the last minute", {"phase": PHASES}
    ),
}

COUNTERS = {
    "realtime_tokens_total": Series(
        "tokens computed", {"mode": ("prefill_compute", "prefill_cache", "decode")}
    ),
    "cuda_graph_passes_total": Series(
        "steps by what ran them", {"mode": ("decode_graph", "decode_none", "prefill_graph", "prefill_none")}
    ),
    "forward_execution_seconds_total": Series(
        "seconds of steps on the device", {"category": ("idle", "extend", "decode", "mixed")}
    ),
    "num_retracted_requests_total": Series("requests that gave their pages back and waited again"),
    "num_retracted_input_tokens_total": Series("prompt tokens of retracted requests"),
    "num_retracted_output_tokens_total": Series("generated tokens of retracted requests"),
    "spec_verify_calls_total": Series("rounds of single requests that verified drafts"),
    "spec_drafts_total": Series("drafts of single requests"),
    "spec_draft_tokens_total": Series("drafted tokens"),
    "spec_verified_tokens_total": Series("drafted tokens that were verified"),
    "spec_accepted_tokens_total": Series("drafted tokens that were accepted"),
    "spec_emitted_tokens_total": Series("tokens that rounds brought, those after a request's end included"),
    "spec_cap_trimmed_total": Series("drafted tokens for which a request had no page or no length left"),
    "spec_steps_total": Series("steps by what they drafted", {"kind": ("none", "plain", "draft", "probe")}),
    "spec_verify_tier_total": Series(
        "steps that verified drafts, by the captured size in tokens that they ran at; eager: at none",
        {"tier": ("eager",)},
    ),
    "spec_rows_truncated_total": Series(
        "rounds whose last tokens, or verified rows, came after their request's end",
        {"reason": ("grammar_end", "stop", "max_tokens")},
    ),
    "spec_phase_seconds_total": Series(
        "seconds of rounds on the device", {"phase": ("draft", "verify", "commit")}
    ),
    "spec_accepted_tokens_per_pos_total": Series(
        "accepted drafts by their place in the block",
        {"position": tuple(str(place) for place in range(1, BLOCK + 1))},
    ),
    "spec_verify_length_total": Series(
        "rounds by the rows that they verified", {"rows": tuple(str(rows) for rows in range(1, BLOCK + 2))}
    ),
    "scheduler_idle_seconds_total": Series("seconds without a step on the device"),
    "scheduler_process_cpu_seconds_total": Series("seconds of processor time of the rank's process"),
    "scheduler_phase_seconds_total": Series(
        "seconds of the scheduler's work, by what it worked on", {"phase": PHASES}
    ),
    "scheduler_phase_calls_total": Series("pieces of the scheduler's work", {"phase": PHASES}),
    "dp_attention_tokens_total": Series(
        "planned tokens of steps: scheduled, this rank's; group, those of all ranks",
        {"kind": ("scheduled", "group")},
    ),
    "dp_attention_steps_total": Series(
        "steps, by whether this rank had tokens in them", {"rank_state": ("idle", "busy")}
    ),
}

HISTOGRAMS = {
    "queue_time_seconds": Series("of a request, from the rank's mailbox to its slot", bounds=LATENCY_S),
    "per_stage_req_latency_seconds": Series(
        "of a request: until it has its slot, then its first token, then its end; the last two together",
        {"stage": STAGES},
        TOKEN_S,
    ),
    "iteration_tokens": Series(
        "planned tokens of a step of this rank, idle ones left out", bounds=STEP_TOKENS
    ),
    "dp_attention_token_imbalance_ratio": Series(
        "most tokens of a rank in a step, over the mean of the ranks", bounds=RATIOS
    ),
    "dp_attention_sync_wait_seconds": Series(
        "from this rank's wish to the step that all agreed on", bounds=WAIT_S
    ),
    "scheduler_gc_pause_seconds": Series("garbage collections of the rank's process", bounds=PAUSE_S),
}

NATIVE_COUNTERS = {
    "dp2_sync_exchanges_total": Series("completed exchanges", {"channel": CHANNELS}),
    "dp2_sync_errors_total": Series("faults that ended the exchange", {"channel": CHANNELS, "code": ERRORS}),
}
NATIVE_HISTOGRAMS = {
    "dp2_sync_exchange_seconds": Series(
        "from this rank's publication to the taken answer", {"channel": CHANNELS}, EXCHANGE_S
    ),
    "dp2_sync_peer_wait_seconds": Series(
        "of that, until the peer had published", {"channel": CHANNELS}, EXCHANGE_S
    ),
    "dp2_sync_arrival_skew_seconds": Series(
        "between the two publications", {"channel": CHANNELS}, EXCHANGE_S
    ),
    "dp2_sync_post_latest_arrival_seconds": Series(
        "from the later publication to the taken answer", {"channel": CHANNELS}, EXCHANGE_S
    ),
}
"""Where the exchange is the native one."""
