"""The probe that makes a token: one attempt for all who ask; and every probe answers HEAD."""

from __future__ import annotations

import anyio
import pytest

from api.probes import PROBES
from tests.api.stage import says, stage

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
