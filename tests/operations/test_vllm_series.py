"""vLLM's names: the figures of each rank, and those of requests by the rank that they ran on."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from engine.messages import FAILED, GOES_ON, LENGTH, STOP_EOS, Snapshot
from engine.metrics import Metrics, Timeline

NAMES = [
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prompt_tokens_total",
    "generation_tokens_total",
    "request_success_total",
    "num_preemptions_total",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "iteration_tokens_total",
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_accepted_tokens_per_pos_total",
]


def read(metrics: Metrics) -> dict[tuple[str, str, str], float]:
    """(name, engine, the one further label's value) of vLLM's samples."""
    found = {}
    for family in text_string_to_metric_families(metrics.exposition().decode()):
        for sample in family.samples:
            if sample.name.startswith("vllm:"):
                more = [v for k, v in sample.labels.items() if k not in ("model_name", "engine")]
                assert sample.labels["model_name"] == "m"
                found[sample.name.removeprefix("vllm:"), sample.labels["engine"], "".join(more)] = (
                    sample.value
                )
    return found


def test_they_are_there_from_the_start_and_only_where_they_are_asked_for() -> None:
    found = read(Metrics("x:", "m", 2, 64, (), vllm=True))
    names = {name for name, _, _ in found}
    for name in NAMES:
        assert name in names or {name + end for end in ("_bucket", "_sum", "_count")} <= names, name
    assert {engine for _, engine, _ in found} == {"0", "1"}
    assert {one for name, _, one in found if name == "request_success_total"} == {
        "stop", "length", "abort", "error",
    }  # fmt: skip
    assert not any(found.values())
    assert not read(Metrics("x:", "m", 2, 64, ()))


def test_they_repeat_the_figures_of_a_rank() -> None:
    metrics = Metrics("x:", "m", 2, 64, (), vllm=True)
    stage = "per_stage_req_latency_seconds"
    figures = {
        "num_retracted_requests_total": 3.0,
        "spec_drafts_total": 4.0,
        'spec_accepted_tokens_per_pos_total{position="1"}': 2.0,
        'iteration_tokens_bucket{le="+Inf"}': 7.0,
        "iteration_tokens_sum": 70.0,
        f'{stage}_sum{{stage="prefill"}}': 0.5,
        f'{stage}_sum{{stage="inference"}}': 1.5,
    }
    metrics.snapshot(Snapshot(1, 1.0, "running", 5, 6, 6, 8, 1, 4, figures))
    found = read(metrics)
    assert found["num_requests_running", "1", ""] == 5
    assert found["num_requests_waiting", "1", ""] == 6
    assert found["kv_cache_usage_perc", "1", ""] == 0.75
    assert found["num_preemptions_total", "1", ""] == 3
    assert found["spec_decode_num_drafts_total", "1", ""] == 4
    assert found["spec_decode_num_accepted_tokens_per_pos_total", "1", "0"] == 2
    assert found["iteration_tokens_total_count", "1", ""] == 7
    assert found["iteration_tokens_total_sum", "1", ""] == 70
    assert found["request_prefill_time_seconds_sum", "1", ""] == 0.5
    assert found["request_inference_time_seconds_sum", "1", ""] == 1.5
    assert found["num_requests_running", "0", ""] == 0


def test_requests_are_counted_for_the_rank_that_they_ran_on() -> None:
    metrics = Metrics("x:", "m", 2, 64, (), vllm=True)
    for finish in (STOP_EOS, LENGTH, FAILED, GOES_ON):
        line = Timeline(False, 5, began_s=10.0, rank=1)
        metrics.accepted(line)
        metrics.gained(line, 1, 10.25)
        metrics.gained(line, 2, 10.75)
        metrics.ended(line, finish in (FAILED, GOES_ON), 11.0, finish)
    found = read(metrics)
    assert found["prompt_tokens_total", "1", ""] == 20
    assert found["generation_tokens_total", "1", ""] == 12
    assert found["time_to_first_token_seconds_sum", "1", ""] == 1.0
    assert found["inter_token_latency_seconds_sum", "1", ""] == 1.0
    assert (
        found["e2e_request_latency_seconds_count", "1", ""],
        found["request_generation_tokens_sum", "1", ""],
    ) == (2, 6)
    ends = {
        reason: found["request_success_total", "1", reason] for reason in ("stop", "length", "abort", "error")
    }
    assert ends == dict.fromkeys(ends, 1)
    assert not any(value for (_, engine, _), value in found.items() if engine == "0")
