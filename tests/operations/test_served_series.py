"""Series of a server with two rank processes: nothing is lost, counted twice, or goes back."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.actors.test_processes import PROMPT, WITHIN_S
from tests.actors.test_rank_processes import Pair

pytestmark = pytest.mark.slow
GEOMETRY = Path(__file__).parents[1] / "actors" / "geometry.json"
ROUTED = (0, 0, 0, 1, 1)
TOKENS = 5

Found = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two ranks and their native exchange."""
    from engine.config import NANO

    folder = tmp_path_factory.mktemp("model") / "nano"
    shutil.copytree(NANO, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    shutil.copy(GEOMETRY, folder / "config.json")
    made = Pair(folder, "native")
    try:
        made.wait_ready()
        yield made
    finally:
        made.close()


def scrape(server: Pair) -> Found:
    """Every sample; those of engine types and other constant labels left out of the key."""
    text = httpx.get(server.url + "/metrics", timeout=WITHIN_S).text
    return {
        (sample.name.removeprefix("sglang:"), own(sample.labels)): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def own(labels: dict[str, str]) -> tuple[tuple[str, str], ...]:
    fixed = ("model_name", "engine_type", "tp_rank", "pp_rank", "moe_ep_rank")
    return tuple(sorted((label, value) for label, value in labels.items() if label not in fixed))


def of(found: Found, name: str, **labels: object) -> float:
    return found[name, own({label: str(value) for label, value in labels.items()})]


def ask(server: Pair, rank: int) -> None:
    answer = server.post({**PROMPT, "max_tokens": TOKENS, "routed_dp_rank": rank})
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == TOKENS


def settled(server: Pair, name: str, total: float, *labels: dict[str, object]) -> Found:
    """A scrape in which the ranks' last snapshots have come; fails after a minute."""
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        found = scrape(server)
        if sum(of(found, name, **one) for one in labels) == total:
            return found
        time.sleep(0.1)
    raise AssertionError({key: value for key, value in found.items() if key[0] == name})


def test_each_rank_counts_its_own_and_the_server_adds_nothing_to_it(server: Pair) -> None:
    each = [{"dp_rank": 0}, {"dp_rank": 1}]
    before = scrape(server)
    clients = [threading.Thread(target=ask, args=(server, rank)) for rank in ROUTED]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    began = sum(of(before, "queue_time_seconds_count", **one) for one in each)
    settled(server, "queue_time_seconds_count", began + len(ROUTED), *each)
    decoded, stages = "per_stage_req_latency_seconds_count", [{**one, "stage": "decode"} for one in each]
    settled(server, decoded, sum(of(before, decoded, **one) for one in stages) + len(ROUTED), *stages)
    time.sleep(1.2)  # two more snapshots: nothing is counted again
    found = scrape(server)
    for rank in (0, 1):
        asked = ROUTED.count(rank)

        def grew(name: str, **labels: object) -> float:
            return of(found, name, **labels) - of(before, name, **labels)

        assert grew("queue_time_seconds_count", dp_rank=rank) == asked
        assert grew("per_stage_req_latency_seconds_count", dp_rank=rank, stage="decode") == asked
        assert grew("realtime_tokens_total", dp_rank=rank, mode="decode") >= asked * TOKENS
        assert grew("dp_routed_requests_total", rank=rank, policy="explicit") == asked
        assert grew("dp_attention_steps_total", dp_rank=rank, rank_state="busy") >= TOKENS
        assert of(found, "startup_time_seconds", dp_rank=rank, phase="total") > 0
        assert grew("scheduler_process_cpu_seconds_total", dp_rank=rank) > 0
    told = "generation_tokens_total"
    given = of(found, told, is_streaming="false") - of(before, told, is_streaming="false")
    assert given == len(ROUTED) * TOKENS


def test_the_exchange_is_timed_on_both_sides(server: Pair) -> None:
    ask(server, 0)
    exchanges = [("dp2_sync_exchanges_total", {"dp_rank": rank, "channel": "mlp_info"}) for rank in (0, 1)]
    deadline_s = time.monotonic() + 60
    while True:
        # Snapshots of both ranks behind the last round.
        found = scrape(server)
        told = [of(found, name, **labels) for name, labels in exchanges]
        if (told[0] == told[1] and told[0] > TOKENS) or time.monotonic() > deadline_s:
            break
        time.sleep(0.1)
    both = []
    for rank in (0, 1):
        labels = {"dp_rank": rank, "channel": "mlp_info"}
        exchanges = of(found, "dp2_sync_exchanges_total", **labels)
        both.append(exchanges)
        assert exchanges > TOKENS
        for part in ("exchange", "peer_wait", "arrival_skew", "post_latest_arrival"):
            assert of(found, f"dp2_sync_{part}_seconds_count", **labels) == exchanges
        whole = of(found, "dp2_sync_exchange_seconds_sum", **labels)
        parts = [
            of(found, f"dp2_sync_{part}_seconds_sum", **labels)
            for part in ("peer_wait", "post_latest_arrival")
        ]
        # Of the native times, the wait and what follows it make up the whole.
        assert whole == pytest.approx(sum(parts), rel=1e-6)
        assert of(found, "dp2_sync_exchange_seconds_bucket", **labels, le="+Inf") == exchanges
        assert of(found, "dp2_sync_exchanges_total", dp_rank=rank, channel="verify_tier") == 0
    assert both[0] == both[1]


def test_no_total_ever_goes_back(server: Pair) -> None:
    clients = [threading.Thread(target=ask, args=(server, rank)) for rank in ROUTED]
    for client in clients:
        client.start()
    before = scrape(server)
    while any(client.is_alive() for client in clients):
        found = scrape(server)
        assert set(before) <= set(found)
        for key, value in before.items():
            if key[0].endswith(("_total", "_bucket", "_count", "_sum")):
                assert found[key] >= value, key
        before = found
    for client in clients:
        client.join()
