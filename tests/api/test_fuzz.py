"""Requests generated from /openapi.json: whatever comes, the answer is a documented one."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import anyio.from_thread
import httpx
import pytest
import schemathesis
from anyio.from_thread import BlockingPortal
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS, load_all_checks

from api.openapi import document
from tests.api.stage import NAME, Stage, says, stage

load_all_checks()
SCHEMA = schemathesis.openapi.from_dict(document(NAME))
WANTED = CHECKS.get_by_names(
    [
        "not_a_server_error",
        "status_code_conformance",
        "content_type_conformance",
        "response_schema_conformance",
    ]
)
POSTS = ("/v1/chat/completions", "/v1/completions", "/generate")


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[BlockingPortal, Stage]]:
    """An engine on a loop of its own, for tests that generate their inputs on this thread."""
    with (
        anyio.from_thread.start_blocking_portal("asyncio") as portal,
        portal.wrap_async_context_manager(stage(says("Hi you"))) as made,
    ):
        yield portal, made


def ask(made: Stage, case: Any) -> Any:
    """The case as a request of this process."""
    parts = case.as_transport_kwargs(base_url="http://engine")
    headers = {key: value for key, value in parts["headers"].items() if isinstance(value, str)}

    async def send() -> httpx.Response:
        async with made.client() as client:
            request = client.build_request(
                parts["method"],
                parts["url"],
                json=parts.get("json"),
                params=parts.get("params"),
                headers=headers,
            )
            return await client.send(request)

    return send


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize("path", POSTS)
def test_generated_bodies_get_documented_answers(
    running: tuple[BlockingPortal, Stage], path: str, mode: GenerationMode
) -> None:
    portal, made = running
    logging.getLogger("hypothesis").setLevel(logging.ERROR)

    @settings(
        max_examples=40,
        deadline=None,
        derandomize=True,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(case=SCHEMA[path]["POST"].as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        answer = portal.call(ask(made, case))
        case.validate_response(answer, checks=WANTED)

    check()
    assert made.live == 0


@given(name=st.text(min_size=1, max_size=30))
@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_model_name_is_found_or_a_404(running: tuple[BlockingPortal, Stage], name: str) -> None:
    portal, made = running

    async def send() -> httpx.Response:
        async with made.client() as client:
            return await client.post("/v1/completions", json={"model": name, "prompt": "x", "max_tokens": 1})

    assert portal.call(send).status_code == (200 if name == NAME else 404)
