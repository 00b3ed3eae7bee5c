"""Probes, models, the OpenAPI document and metrics."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.messages import Snapshot
from engine.metrics import Metrics, Timeline
from tests.api.stage import CONTEXT, RANK, says, stage

pytestmark = pytest.mark.anyio


def samples_of(text: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """(name, sorted labels) -> value of everything exposed."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def value(found: dict[Any, float], name: str, **labels: str) -> float:
    """One sample; KeyError where the name or a label is wrong."""
    return found["sglang:" + name, tuple(sorted(labels.items()))]


def counted(tokens: float) -> dict[str, float]:
    """Figures as a rank publishes them."""
    return {'realtime_tokens_total{mode="decode"}': tokens, "gen_throughput": 7.5, "other_figure": 1.0}


async def test_models_are_listed_and_found_by_name() -> None:
    async with stage(says("Hi")) as made, made.client() as client:
        (card,) = (await client.get("/v1/models")).json()["data"]
        assert (card["id"], card["object"], card["max_model_len"]) == ("nano", "model", CONTEXT)
        assert (await client.get("/v1/models/nano")).json() == card
        assert (await client.get("/v1/models/other")).status_code == 404


async def test_probes_say_why_not() -> None:
    async with stage(says("Hi")) as made, made.client() as client:
        for path in ("/health", "/ready", "/health_scheduler"):
            assert (await client.get(path)).status_code == 200
        made.health.why = "draining"
        made.health.fresh = False
        refused = await client.get("/ready")
        assert (refused.status_code, refused.json()["error"]["message"]) == (503, "draining")
        assert (await client.get("/health_scheduler")).json()["status"] == "stale"


async def test_a_fault_of_ours_is_a_500_that_names_its_class_but_not_its_text() -> None:
    class Broken:
        async def refusal(self) -> str:
            raise ZeroDivisionError("a private detail")

        async def report(self) -> tuple[bool, dict[str, Any]]:
            raise ZeroDivisionError("a private detail")

    async with stage(says("Hi"), health=Broken()) as made, made.client() as client:
        answer = await client.get("/ready")
        assert (answer.status_code, answer.json()["error"]["type"]) == (500, "internal_error")
        assert "ZeroDivisionError" in answer.text
        assert "private" not in answer.text
        assert (await made.post("/generate", {"text": "x"})).status_code == 200


async def test_every_label_combination_exists_from_the_start() -> None:
    found = samples_of(Metrics("sglang:", "nano", 2, CONTEXT, ("/health",)).exposition())
    for rank in ("0", "1"):
        labels = {**RANK, "dp_rank": rank}
        assert value(found, "num_running_reqs", **labels) == 0
        assert value(found, "context_len", **labels) == CONTEXT
        assert value(found, "realtime_tokens_total", mode="decode", **labels) == 0
    for streaming in ("true", "false"):
        assert value(found, "num_requests_total", model_name="nano", is_streaming=streaming) == 0
        name = "time_to_first_token_seconds_count"
        assert value(found, name, model_name="nano", is_streaming=streaming) == 0
    assert value(found, "http_requests_total", endpoint="/health") == 0


async def test_snapshots_become_gauges_and_growing_counters() -> None:
    metrics = Metrics("sglang:", "nano", 1, CONTEXT, ())
    first = Snapshot(0, 1.0, "running", 3, 2, 6, 8, 1, 4, counted(10))
    metrics.snapshot(first)
    again = Snapshot(0, 1.0, "running", 3, 2, 6, 8, 1, 4, counted(4))
    found = samples_of(metrics.exposition())
    assert value(found, "num_running_reqs", **RANK) == 3
    assert value(found, "num_queue_reqs", **RANK) == 2
    assert value(found, "full_token_usage", **RANK) == 0.25
    assert value(found, "swa_token_usage", **RANK) == value(found, "token_usage", **RANK) == 0.75
    assert value(found, "kv_available_tokens", **RANK) == 6 * 256
    assert value(found, "max_total_num_tokens", **RANK) == 8 * 256
    assert value(found, "realtime_tokens_total", mode="decode", **RANK) == 10
    assert value(found, "gen_throughput", **RANK) == 7.5
    metrics.snapshot(again)
    found = samples_of(metrics.exposition())
    assert value(found, "realtime_tokens_total", mode="decode", **RANK) == 14, "a new rank counts from 0"


async def test_latencies_are_measured_from_receipt_to_tokens() -> None:
    metrics = Metrics("sglang:", "nano", 1, CONTEXT, ())
    line = Timeline(streaming=True, prompt_tokens=5, began_s=10.0)
    metrics.accepted(line)
    metrics.gained(line, 1, 10.25)
    metrics.gained(line, 2, 10.75)
    metrics.ended(line, False, 11.0)
    found = samples_of(metrics.exposition())
    labels = {"model_name": "nano", "is_streaming": "true"}
    assert value(found, "time_to_first_token_seconds_sum", **labels) == 0.25
    assert value(found, "inter_token_latency_seconds_sum", model_name="nano") == 0.25
    assert value(found, "e2e_request_latency_seconds_sum", **labels) == 1.0
    assert value(found, "request_time_per_output_token_seconds_sum", model_name="nano") == 0.25
    assert value(found, "generation_tokens_total", **labels) == 3
    assert value(found, "prompt_tokens_total", **labels) == 5


async def test_a_served_request_shows_in_the_metrics() -> None:
    async with stage(says("Hi")) as made, made.client() as client:
        body = {"messages": [{"role": "user", "content": "x"}]}
        answer = (await made.post("/v1/chat/completions", body)).json()
        await client.get("/nothing")
        await made.snapshot()
        exposed = await client.get("/metrics")
    assert exposed.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = samples_of(exposed.content)
    labels = {"model_name": "nano", "is_streaming": "false"}
    assert value(found, "num_requests_total", **labels) == 1
    assert value(found, "generation_tokens_total", **labels) == answer["usage"]["completion_tokens"]
    assert value(found, "prompt_tokens_total", **labels) == answer["usage"]["prompt_tokens"]
    assert value(found, "http_responses_total", endpoint="/v1/chat/completions", status_code="200") == 1
    assert value(found, "http_responses_total", endpoint="other", status_code="404") == 1
    assert value(found, "http_requests_active", endpoint="/v1/chat/completions") == 0
    # A step that was prepared when the end became known is computed in vain.
    computed = value(found, "realtime_tokens_total", mode="decode", **RANK)
    assert computed >= answer["usage"]["completion_tokens"]
    assert value(found, "num_pages", **RANK) == 201


async def test_groups_are_counted_by_rank_and_by_who_chose_it() -> None:
    async with stage(says("Hi")) as made:
        await made.post("/generate", {"text": ["a", "b"]})
        await made.post("/generate", {"text": ["a", "b", "c"], "routed_dp_rank": 0})
        await made.post("/generate", {"text": "a", "routed_dp_rank": 0})
    found = samples_of(made.metrics.exposition())
    labels = {"model_name": "nano", "rank": "0"}
    assert value(found, "dp_routed_requests_total", policy="total_requests", **labels) == 2
    assert value(found, "dp_routed_requests_total", policy="explicit", **labels) == 4
    assert value(found, "dp_atomic_batches_total", policy="explicit", **labels) == 1
    assert value(found, "dp_atomic_batch_items_total", policy="explicit", **labels) == 3


async def test_no_metric_carries_a_clients_text() -> None:
    async with stage(says("Hi")) as made, made.client() as client:
        await client.get("/secret-path")
        await client.get("/v1/models/secret-model")
    assert b"secret" not in made.metrics.exposition()


async def test_the_openapi_document_names_every_route_and_field() -> None:
    async with stage(says("Hi")) as made, made.client() as client:
        found = (await client.get("/openapi.json")).json()
    assert set(found["paths"]) == {
        "/v1/chat/completions",
        "/v1/completions",
        "/generate",
        "/v1/models",
        "/v1/models/{id}",
        "/health",
        "/ready",
        "/health_scheduler",
        "/health_generate",
        "/metrics",
        "/openapi.json",
    }
    assert "logit_bias" in found["components"]["schemas"]["ChatBody"]["properties"]
