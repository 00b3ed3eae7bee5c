"""The probe that makes a token: one attempt for all who ask; and every probe answers HEAD."""

from __future__ import annotations

from functools import partial

import anyio
import pytest
from trio.testing import MockClock

from api.probes import PROBES
from tests.api.stage import Stage, says, says_ids, stage

pytestmark = pytest.mark.anyio


async def test_callers_at_the_same_time_share_one_token() -> None:
    async with stage(says("Hi there")) as made, made.client() as client:
        answers: list[int] = []

        async def ask() -> None:
            answers.append((await client.get("/health_generate")).status_code)

        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(ask)
        assert answers == [200] * 5
        assert sum(bool(step.binds) for step in made.device.steps) == 1


@pytest.mark.parametrize("anyio_backend", [("trio", {"clock": MockClock(autojump_threshold=0)})])
async def test_a_token_comes_while_every_slot_decodes_and_the_queue_is_full() -> None:
    """In virtual time: at most two steps were planned before the probe came, and it rides in the third."""
    places = {"max_running_requests": 2, "max_queued_requests": 2}
    async with stage(says_ids([5]), **places) as made, made.client() as client:
        made.step_s = 1.0
        body = {"model": "nano", "prompt": "Hi", "max_tokens": 400, "ignore_eos": True}
        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(partial(client.post, "/v1/completions", json=body))
            await anyio.sleep(5.0)
            for _ in range(3):
                assert (await client.post("/v1/completions", json=body)).status_code == 429
                began_s = anyio.current_time()
                assert (await client.get("/health_generate")).status_code == 200
                assert anyio.current_time() - began_s <= 3.0
            await made.settled(4)
            made.ingress.size = 0
            tasks.start_soon(have_room, made, 1.0)
            assert (await client.get("/health_generate")).status_code == 200
            tasks.cancel_scope.cancel()


async def have_room(made: Stage, after_s: float) -> None:
    """The mailbox of ingress, full so far, has room from then on."""
    await anyio.sleep(after_s)
    made.ingress.size = 4096


async def test_every_probe_answers_head_without_a_key() -> None:
    key = "secret"  # pragma: allowlist secret
    async with stage(says("Hi"), api_key=key) as made, made.client() as client:
        for path in PROBES:
            answer = await client.head(path)
            assert (path, answer.status_code) == (path, 200)


async def test_health_says_that_the_process_is_up_while_it_takes_no_requests() -> None:
    async with stage(says("Hi")) as made, made.client() as client:
        made.health.why = "the model is loading"
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).status_code == 503
