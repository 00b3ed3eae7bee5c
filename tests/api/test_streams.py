"""Streams under stress: clients that leave or lag, errors after the first byte, characters in parts."""

from __future__ import annotations

from typing import Any

import anyio
import orjson
import pytest

from engine.messages import Drain, Entry, RankDown, Sampling
from tests.api.client import RawClient, events_of
from tests.api.stage import RANK, TOKENIZER, says, says_ids, stage

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Both loops: cancellation is where they differ."""
    return str(request.param)


CHAT = "/v1/chat/completions"
HELLO: Any = [{"role": "user", "content": "Hello"}]
ENDLESS = says_ids(TOKENIZER.encode(" word"))
LONG = {"messages": HELLO, "stream": True, "ignore_eos": True, "max_tokens": 400}


async def test_a_leaving_client_cancels_its_request_within_a_step_and_no_other() -> None:
    async with stage(ENDLESS) as made:
        leaver, stayer = (RawClient(made.app, CHAT, LONG) for _ in range(2))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(leaver.run)
            tasks.start_soon(stayer.run)
            await leaver.got.wait()
            await stayer.got.wait()
            made.gate = anyio.Event()
            leaver.leave()
            await made.settled(1)
            steps = len(made.device.steps)
            made.gate.set()
        after = made.device.steps[steps + 2 :]
        # One step was running and one prepared: from the third on the leaver's row is gone.
        assert after
        assert all(len(step.counts) == 4 for step in after)
        assert len(events_of(stayer.text)) >= 400
        await made.snapshot()
        assert b'num_aborted_requests_total{model_name="nano"} 1.0' in made.metrics.exposition()
        used = made.metrics.registry.get_sample_value("sglang:kv_used_tokens", RANK)
        assert used == 0


@pytest.mark.parametrize("body", [{**LONG, "stream": False}, {**LONG, "stream": False, "n": 3}])
async def test_a_client_that_leaves_a_plain_request_cancels_it(body: dict[str, Any]) -> None:
    async with stage(ENDLESS) as made:
        made.gate = anyio.Event()
        client = RawClient(made.app, CHAT, body)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.run)
            await made.settled(body.get("n", 1))
            client.leave()
            await made.settled(0)
            made.gate.set()
        assert client.status is None


async def test_a_client_that_leaves_while_its_request_waits_cancels_it() -> None:
    async with stage(ENDLESS, max_running_requests=1) as made:
        running, waiting = (RawClient(made.app, CHAT, LONG) for _ in range(2))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(running.run)
            await running.got.wait()
            tasks.start_soon(waiting.run)
            await made.settled(2)
            waiting.leave()
            await made.settled(1)
        assert waiting.writes == []


async def test_a_slow_client_gets_merged_chunks_and_the_whole_text() -> None:
    async with stage(ENDLESS, stream_buffer=100) as made:
        client = RawClient(made.app, CHAT, {**LONG, "max_tokens": 150})
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.run)
            await client.got.wait()
            client.reads = anyio.Event()
            await made.settled(0)
            client.reads.set()
    events = events_of(client.text)
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    assert text == " word" * 150
    assert len(events) < 150


async def test_a_client_slower_than_its_bound_is_aborted_with_that_reason() -> None:
    async with stage(ENDLESS, stream_buffer=10) as made:
        slow, other = RawClient(made.app, CHAT, LONG), RawClient(made.app, CHAT, LONG)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(slow.run)
            tasks.start_soon(other.run)
            await slow.got.wait()
            slow.reads = anyio.Event()
            await made.settled(1)
            slow.reads.set()
    events = events_of(slow.text)
    assert events[-1]["error"]["code"] == "slow_client"
    assert all(event["choices"][0]["finish_reason"] is None for event in events[:-1])
    assert events_of(other.text)[-1]["choices"][0]["finish_reason"] == "length"


async def test_the_death_of_the_rank_is_an_error_in_the_stream_and_then_503() -> None:
    async with stage(ENDLESS) as made:
        client = RawClient(made.app, CHAT, LONG)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.run)
            await client.got.wait()
            made.ingress.tell(RankDown(0, "killed"))
        events = events_of(client.text)
        assert "rank 0 has ended: killed" in events[-1]["error"]["message"]
        assert all(event["choices"][0]["finish_reason"] is None for event in events[:-1])
        refused = await made.post(CHAT, {"messages": HELLO})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")


async def test_a_failure_before_the_first_token_has_its_own_status() -> None:
    async with stage(ENDLESS) as made:
        made.device.fails = {1: "no finite logit"}
        client = RawClient(made.app, CHAT, LONG)
        await client.run()
    assert client.status == 500
    assert orjson.loads(client.text)["error"]["message"] == "no finite logit"


async def test_characters_that_span_tokens_arrive_whole() -> None:
    """Each token is one byte of the text."""
    by_bytes = {TOKENIZER.token_bytes(i): i for i in range(TOKENIZER.vocab_size)}
    text = "€🙂ж"
    script = says_ids([*(by_bytes[bytes([byte])] for byte in text.encode()), 1])
    async with stage(script) as made:
        client = RawClient(made.app, CHAT, {"messages": HELLO, "stream": True})
        await client.run()
    contents = [event["choices"][0]["delta"].get("content", "") for event in events_of(client.text)]
    assert [content for content in contents if content] == list(text)


async def test_every_event_is_one_line_of_json() -> None:
    async with stage(says("line\none\n\ndata: two")) as made:
        client = RawClient(made.app, CHAT, {"messages": HELLO, "stream": True})
        await client.run()
    contents = [event["choices"][0]["delta"].get("content", "") for event in events_of(client.text)]
    assert "".join(contents) == "line\none\n\ndata: two"


async def test_a_draining_server_finishes_what_runs_and_refuses_the_rest() -> None:
    async with stage(ENDLESS) as made:
        client = RawClient(made.app, CHAT, LONG)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.run)
            await client.got.wait()
            made.ingress.tell(Drain())
            refused = await made.post(CHAT, {"messages": HELLO})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert events_of(client.text)[-1]["choices"][0]["finish_reason"] == "length"
        assert len(made.refs["shutdown"]) == 1


async def test_a_group_whose_submitter_gave_up_is_cancelled_by_its_first_chunk() -> None:
    sampling = Sampling(max_new_tokens=400, ignore_eos=True)
    async with stage(ENDLESS) as made:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await made.engine.submit([Entry(sink=0, prompt=bytes(4), sampling=sampling)])
        with anyio.fail_after(60):
            while not made.edge.orphans:
                await anyio.sleep(0.001)
        await made.settled(0)
        assert len(made.device.steps) < 50


async def test_many_streams_at_once_each_get_their_own_text() -> None:
    words = {f"w{i}": [*TOKENIZER.encode(f" reply {i}" * 5), 1] for i in range(24)}

    def script(bind: Any, place: int) -> int:
        ids = words[f"w{bind.sampling.seed}"]
        return ids[min(place, len(ids) - 1)]

    async with stage(script, max_running_requests=7) as made:
        texts: dict[int, str] = {}

        async def ask(seed: int) -> None:
            body = {"messages": HELLO, "seed": seed, "stream": seed % 2 == 0}
            answer = await made.post(CHAT, body)
            if seed % 2:
                texts[seed] = answer.json()["choices"][0]["message"]["content"]
            else:
                events = events_of(answer.text)
                texts[seed] = "".join(e["choices"][0]["delta"].get("content", "") for e in events)

        async with anyio.create_task_group() as tasks:
            for seed in range(24):
                tasks.start_soon(ask, seed)
    assert texts == {seed: f" reply {seed}" * 5 for seed in range(24)}
