"""How the wait for a grammar ends: by the grammar, a deadline, a full queue, or a client that leaves."""

from __future__ import annotations

import os
import signal
from typing import Any

import anyio
import pytest

from engine.grammar.gate import GrammarRefused
from engine.messages import Stop
from tests.api.client import RawClient, events_of
from tests.api.stage import says
from tests.grammar.http.stage import Constrained, constrained
from tests.grammar.service.stage import endless, patient

pytestmark = pytest.mark.anyio
TEXT = "/v1/completions"


def slow(seed: int = 0, **more: Any) -> dict[str, Any]:
    """A body whose grammar compiles for longer than any limit here; see `unchecked`."""
    return {"prompt": "x", "structural_tag": {"type": "structural_tag", "seed": seed}, **more}


@pytest.fixture(autouse=True)
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """No schema that the gate takes compiles for seconds: this one stands for what it may overlook."""
    import api.gate

    real = api.gate.parse_request

    def parse(fields: Any, policy: Any = None, prefix: str = "") -> Any:
        tag = fields.get("structural_tag")
        if isinstance(tag, str) and '"seed"' in tag:
            return endless(int(tag.rsplit(":", 1)[1].strip(" }")))
        return real(fields, policy, prefix)

    monkeypatch.setattr(api.gate, "parse_request", parse)


async def test_a_grammar_that_takes_too_long_is_a_408_and_others_go_on() -> None:
    async with constrained(says("abc"), patient(workers=2)) as found:
        late: list[Any] = []

        async def wait() -> None:
            late.append(await found.made.post(TEXT, slow(stream=True)))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await found.compiling.busy()
            for number in range(5):
                answer = await found.made.post(TEXT, {"prompt": "x", "regex": f"a{{{number + 1}}}"})
                assert answer.status_code == 200
            assert late == []
            found.compiling.expire()
        (answer,) = late
        assert (answer.status_code, answer.json()["error"]["type"]) == (408, "timeout_error")
        assert answer.headers["retry-after"] == "1"
        assert found.figure("num_grammar_timeout_total") == 1
        assert found.figure("num_grammar_queue_reqs") == 0


async def test_a_client_that_leaves_ends_its_wait_at_once() -> None:
    async with constrained(says("abc"), patient(workers=1)) as found:
        clients = [RawClient(found.made.app, TEXT, slow(n=2, stream=stream)) for stream in (False, True)]
        async with anyio.create_task_group() as tasks:
            for client in clients:
                tasks.start_soon(client.run)
            await until(found, "num_grammar_queue_reqs", 2)
            clients[0].leave()
            await until(found, "num_grammar_queue_reqs", 1)
            clients[1].leave()
            await until(found, "num_grammar_queue_reqs", 0)
        assert [client.status for client in clients] == [None, None]
        assert found.figure("num_aborted_requests_total") == 4
        assert found.entries == []


async def until(found: Constrained, name: str, value: float) -> None:
    await found.compiling.until(lambda: found.figure(name) == value)


async def test_a_full_queue_is_a_429() -> None:
    async with constrained(says("abc"), patient(workers=1, queued=1)) as found:
        statuses: list[int] = []

        async def wait(seed: int) -> None:
            statuses.append((await found.made.post(TEXT, slow(seed))).status_code)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait, 1)
            tasks.start_soon(wait, 2)
            await found.compiling.queued(1)
            answer = await found.made.post(TEXT, {"prompt": "x", "regex": "a"})
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
            found.compiling.expire()
        assert statuses == [408, 408]


async def test_a_worker_that_is_killed_is_its_requests_500() -> None:
    async with constrained(says("abc"), patient(workers=1)) as found:
        answers: list[Any] = []

        async def wait() -> None:
            answers.append(await found.made.post(TEXT, slow()))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            pool = found.compiling.service.pool
            await found.compiling.busy()
            (worker,) = pool.running.values()
            os.kill(worker.child.process.pid, signal.SIGKILL)
        assert (answers[0].status_code, answers[0].json()["error"]["type"]) == (500, "internal_error")
        assert "SIGKILL" in answers[0].json()["error"]["message"]
        assert found.series("grammar_worker_ends_total")['{cause="crashed",model_name="nano"}'] == 1
        assert found.figure("num_grammar_aborted_total") == 1
        assert (await found.made.post(TEXT, {"prompt": "x", "regex": "abc"})).status_code == 200


async def test_before_the_workers_are_up_and_after_the_end_it_is_a_503() -> None:
    async with constrained(says("abc")) as found:
        pool, body = found.compiling.service.pool, {"prompt": "x", "regex": "abc"}
        up, pool.started = pool.started, anyio.Event()
        answer = await found.made.post(TEXT, body)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert "are starting" in answer.json()["error"]["message"]
        assert found.figure("grammar_workers") == 0
        assert (await found.made.post(TEXT, {"prompt": "x"})).status_code == 200
        pool.started = up
        assert (await found.made.post(TEXT, body)).status_code == 200
        assert found.figure("grammar_workers") == 1


async def test_the_end_of_the_server_answers_who_waits() -> None:
    async with constrained(says("abc"), patient(workers=1)) as found:
        answers: list[Any] = []

        async def wait() -> None:
            answers.append(await found.made.post(TEXT, slow()))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await until(found, "num_grammar_queue_reqs", 1)
            found.compiling.service.mailbox.tell(Stop("the server closes"))
        assert answers[0].status_code == 503
        later = await found.made.post(TEXT, {"prompt": "x", "regex": "abc"})
        assert later.status_code == 503
        assert "shutting down" in later.json()["error"]["message"]


async def test_what_the_compiler_refuses_is_a_400_that_names_the_field(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import api.gate
    from engine.grammar.key import GrammarKey

    monkeypatch.setattr(api.gate, "parse_request", lambda *_: GrammarKey("ebnf", "root ::= missing"))
    async with constrained(says("abc")) as found:
        for _ in range(2):
            answer = await found.made.post(TEXT, {"prompt": "x", "ebnf": "root ::= missing", "n": 3})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"], error["code"]) == (400, "ebnf", "unsupported_grammar")
        assert found.figure("num_grammar_aborted_total") == 2


async def test_completions_of_one_request_share_one_grammar_and_streams_wait_for_it() -> None:
    async with constrained(says("abc")) as found:
        body = {"prompt": "x", "regex": "[a-c]+", "n": 2, "stream": True}
        answer = await found.made.post(TEXT, body)
        events = events_of(answer.text)
        for choice in (0, 1):
            parts = [event["choices"][0] for event in events if event["choices"][0]["index"] == choice]
            assert "".join(part["text"] for part in parts) == "abc"
        assert len(found.entries) == 2
        assert found.entries[0].grammar is found.entries[1].grammar
        assert found.figure("num_grammar_total") == 1
        assert found.figure("num_so_requests_total") == 2


async def test_sixteen_different_keys_at_once_are_compiled_once_each() -> None:
    async with constrained(says("abc"), patient(workers=2)) as found:

        async def one(number: int) -> None:
            body = {"prompt": "x", "regex": f"[a-z]{{{number % 16 + 1}}}"}
            assert (await found.made.post(TEXT, body)).status_code == 200

        async with anyio.create_task_group() as tasks:
            for number in range(48):
                tasks.start_soon(one, number)
        sources = found.series("grammar_resolutions_total")
        assert sources['{model_name="nano",source="compile"}'] == 16
        assert found.figure("num_grammar_total") == 48
        assert found.figure("grammar_cache_entries") == 16
        assert found.figure("grammar_cache_pinned_bytes") == 0  # Nothing is held once it is handed over.
        assert found.figure("grammar_wait_seconds_count") == 48
        assert found.figure("grammar_compilation_time_seconds_count") == 16


async def test_the_gate_remembers_what_it_read_within_its_bytes() -> None:
    async with constrained(says("abc")) as found:
        gate = found.made.app._service.gate
        first = await gate.wish({"regex": "ab"})
        assert (await gate.wish({"regex": "ab"})).key is first.key  # type: ignore[union-attr]
        gate.memory_bytes = 3 * gate.held_bytes
        for number in range(20):
            await gate.wish({"regex": f"a{{{number}}}"})
            assert gate.held_bytes <= gate.memory_bytes
        assert (await gate.wish({"regex": "ab"})).key is not first.key  # type: ignore[union-attr]
        with pytest.raises(GrammarRefused):
            await gate.wish({"regex": "(a"})
