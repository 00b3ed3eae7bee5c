"""What is told of wrong answers, wrong counters and pages that are held; each fault is planted."""

from __future__ import annotations

import random
from typing import Any

import orjson
import pytest

from engine.soak.checks import faults_of
from engine.soak.crowd import Crowd
from engine.soak.exposition import drained, read, shrunk
from engine.soak.http import Answer
from engine.soak.item import CHAT, COMPLETIONS, Item, Reply
from engine.soak.ledger import Ledger
from engine.soak.plan import WEIGHTS, Plan, Served
from engine.soak.structured import Forms

USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
CHOICE = {"index": 0, "text": "hi", "logprobs": None, "finish_reason": "length"}
WHOLE = Item(kind="completion", path=COMPLETIONS, body={"prompt": "x"}, limit=2)
STREAM = Item(kind="completion", path=COMPLETIONS, body={"prompt": "x", "stream": True}, limit=2)


def answer(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Answer:
    """As it would have come."""
    raw = body if isinstance(body, bytes) else orjson.dumps(body)
    return Answer(status=status, headers=headers or {}, body=bytearray(raw), complete=True)


def events(*chunks: Any) -> bytes:
    """An event stream."""
    return b"".join(
        b"data: " + (one if isinstance(one, bytes) else orjson.dumps(one)) + b"\n\n" for one in chunks
    )


def whole(**more: Any) -> dict[str, Any]:
    """A completion's body."""
    return {"choices": [{**CHOICE, **more}], "usage": USAGE}


PART = {"choices": [{**CHOICE, "finish_reason": None}], "usage": None}
END = {"choices": [{**CHOICE, "text": ""}], "usage": None}
LAST = {"choices": [], "usage": USAGE}


def test_right_answers_have_no_faults() -> None:
    reply, faults = faults_of(WHOLE, answer(whole()))
    assert (faults, reply and reply.choices[0].text) == ([], "hi")
    reply, faults = faults_of(STREAM, answer(events(PART, END, LAST, b"[DONE]")))
    assert (faults, reply and reply.completion_tokens) == ([], 2)


@pytest.mark.parametrize(
    ("item", "came", "told"),
    [
        (WHOLE, Answer(status=200), "before the answer"),
        (WHOLE, answer(whole(), 500), "status 500, not 200"),
        (WHOLE, answer(b"{"), "malformed"),
        (WHOLE, answer({"choices": [CHOICE]}), "malformed"),
        (WHOLE, answer(whole(finish_reason=None)), "finish_reason None"),
        (WHOLE, answer(whole(index=1)), "not numbered"),
        (WHOLE, answer({"choices": [], "usage": USAGE}), "0 completions, not 1"),
        (WHOLE, answer({**whole(), "usage": {**USAGE, "total_tokens": 6}}), "are not 6"),
        (
            WHOLE,
            answer({**whole(), "usage": {**USAGE, "completion_tokens": 3, "total_tokens": 6}}),
            "at most 2",
        ),
        (STREAM, answer(events(PART, END, LAST)), "came 0 times"),
        (STREAM, answer(events(PART, END, LAST, b"[DONE]", b"[DONE]")), "came 2 times"),
        (STREAM, answer(events(PART, b"[DONE]", END, LAST)), "not last"),
        (STREAM, answer(events(PART, LAST, b"[DONE]")), "without finish_reason"),
        (STREAM, answer(events(PART, END, END, LAST, b"[DONE]")), "after its choice's end"),
        (STREAM, answer(events(PART, END, b"[DONE]")), "isn't the usage"),
        (STREAM, answer(events(PART, {"error": {"message": "x"}}, b"[DONE]")), "an error in a stream"),
    ],
)
def test_each_wrong_answer_is_told(item: Item, came: Answer, told: str) -> None:
    _, faults = faults_of(item, came)
    assert len(faults) == 1
    assert told in faults[0]


def test_refusals_need_an_error_object_and_a_hint_when_to_come_again() -> None:
    item = Item(kind="burst", path=COMPLETIONS, body={}, statuses=frozenset({429}))
    error = {"error": {"message": "full", "type": "rate"}}
    assert faults_of(item, answer(error, 429, {"retry-after": "1"}))[1] == []
    assert "Retry-After" in faults_of(item, answer(error, 429))[1][0]
    assert "malformed" in faults_of(item, answer({"detail": "full"}, 429, {"retry-after": "1"}))[1][0]


@pytest.mark.parametrize(
    ("kind", "text", "finish", "fine"),
    [
        ("regex", "yes", "stop", True),
        ("regex", "yesno", "stop", False),
        ("regex", "yes", "length", False),
        ("json_schema", '{"ok":true}', "stop", True),
        ("json_schema", '{"ok":1}', "stop", False),
        ("json_schema", '{"ok":tru', "stop", False),
    ],
)
def test_structured_answers_are_checked_by_their_form(kind: str, text: str, finish: str, fine: bool) -> None:
    class First(random.Random):
        """Always the first form."""

        def choice(self, seq: Any) -> Any:
            return seq[0]

    forms = Forms()
    item = forms.regex(First(), "x") if kind == "regex" else forms.schema(First(), "x")
    message = {"role": "assistant", "content": text}
    choice = {**CHOICE, "finish_reason": finish} | (
        {"text": text} if kind == "regex" else {"message": message}
    )
    assert (faults_of(item, answer({"choices": [choice], "usage": USAGE}))[1] == []) is fine


def exposition(running: int = 0, free: int = 512, used: int = 0, requests: int = 1) -> str:
    """A scrape of a server with one rank."""
    gauges = {
        "num_running_reqs": running, "num_queue_reqs": 0, "kv_available_tokens": free, "kv_used_tokens": used,
        "max_total_num_tokens": 512,
    }  # fmt: skip
    lines = [f'# TYPE p:{name} gauge\np:{name}{{dp_rank="0"}} {value}' for name, value in gauges.items()]
    lines.append(
        f'# TYPE p:num_requests_total counter\np:num_requests_total{{is_streaming="true"}} {requests}.0'
    )
    status = 'p:http_responses_total{endpoint="/v1/completions",status_code="200"}'
    return "\n".join([*lines, f"# TYPE p:http_responses_total counter\n{status} {requests}.0"])


def test_held_pages_and_running_requests_are_told() -> None:
    assert drained(read(exposition(), "p:")) == []
    assert drained(read(exposition(free=256, used=256), "p:")) == ["rank 0: kv_used_tokens is 256"]
    assert drained(read(exposition(free=256), "p:")) == [
        "rank 0: 256 free + 0 held tokens of cache are not 512"
    ]
    assert drained(read(exposition(running=1), "p:")) == ["rank 0: num_running_reqs is 1"]


def test_counters_that_fall_or_vanish_are_told_and_gauges_may() -> None:
    before = read(exposition(running=3, requests=5), "p:")
    assert shrunk(before, read(exposition(requests=5), "p:")) == []
    fell = shrunk(before, read(exposition(requests=4), "p:"))
    assert 'num_requests_total{is_streaming="true"} fell from 5 to 4' in fell
    assert "is gone" in shrunk(before, read("", "p:"))[0]


def test_the_servers_counters_must_be_the_clients() -> None:
    ledger = Ledger()
    zero, one = read(exposition(requests=0), "p:"), read(exposition(requests=1), "p:")
    for figures, tokens in ((zero, 0.0), (one, 2.0)):
        figures.values["generation_tokens_total"] = {"": tokens}
        figures.values["prompt_tokens_total"] = {"": tokens * 1.5}
    assert any(
        "completions: the server counted 1, the clients 0" in fault for fault in ledger.compare(zero, one)
    )
    reply, _ = faults_of(WHOLE, came := answer(whole()))
    assert isinstance(reply, Reply)
    ledger.note(WHOLE, came, reply)
    assert ledger.compare(zero, one) == []
    one.values["generation_tokens_total"] = {"": 1.0}
    assert ledger.compare(zero, one) == ["output tokens: the server counted 1, the clients 2 to 2"]


def test_only_a_rank_refuses_what_was_counted_as_accepted() -> None:
    ledger = Ledger()
    zero, one = read(exposition(requests=0), "p:"), read(exposition(requests=1), "p:")
    full = {"error": {"message": "1 requests find 48 of 48 places taken"}}
    ledger.note(WHOLE, answer(full, 429), None)
    assert any("completions: the server counted 1" in fault for fault in ledger.compare(zero, one))
    text = "33 requests wait, at most 32 may; there is no room for 1 more"
    ledger.note(WHOLE, answer({"error": {"message": text}}, 429), None)
    assert not any("completions: " in fault for fault in ledger.compare(zero, one))


def test_equal_seeds_make_equal_plans_with_every_kind() -> None:
    def drawn(seed: int) -> list[tuple[str, Any]]:
        plan = Plan(seed, Served(2, 8192, 8192), list(WEIGHTS))
        return [(item.kind, item.body) for item in (plan.next() for _ in range(600))]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    assert {kind for kind, _ in drawn(1)} >= set(WEIGHTS) - {"canary"}
    assert CHAT != COMPLETIONS


def test_a_crowd_has_the_largest_requests_of_every_kind() -> None:
    served, kinds = Served(2, 8192, 8192), list(WEIGHTS)
    crowd = Crowd(1, served, kinds).items(60)
    assert {item.kind for item in crowd} >= set(WEIGHTS) - {"canary"}
    assert sum(item.completions for item in crowd) >= 60
    usual = Plan(1, served, kinds)
    for kind in ("long", "scored", "generate", "many", "batch", "chat", "logprobs"):
        largest = [item for item in crowd if item.kind == kind]
        others = [item for item in (usual.next() for _ in range(800)) if item.kind == kind]
        assert min(map(extent, largest)) >= max(map(extent, others))


def extent(item: Item) -> tuple[int, int]:
    """(completions, tokens or characters of what is asked): what a server's memory is taken by."""
    assert isinstance(item.body, dict)
    asked = item.body.get("input_ids") or item.body.get("prompt") or ""
    return item.completions, len(asked) if isinstance(asked, list) else 0
