"""A chat's stream adds up to its whole answer, however many characters each chunk carries."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.chat_answer import ChatAnswer, ChatPlan
from engine.config import Settings
from engine.messages import GOES_ON, STOP_EOS, Delta
from tests.api.stage import CALL, served

SERVED = served(Settings())
TEXTS = [
    CALL,
    "Let me think.</think>" + CALL,
    "A < b, and < ｜ too.\n\n",
    "<think>twice</think>then</think>more <｜DSML｜",
    "\n\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=broken",
]


def plan(thinking: bool, calls: int, separate: bool) -> ChatPlan:
    """A plan without log probabilities and usage."""
    return ChatPlan(
        rid="r",
        created=0,
        count=1,
        thinking=thinking,
        separate=separate,
        calls=calls,
        logprobs=False,
        with_usage=False,
        continuous=False,
    )


def pieces_of(text: str, sizes: list[int]) -> list[str]:
    """The text cut into these sizes, the rest at the end."""
    pieces = []
    for size in sizes:
        pieces.append(text[:size])
        text = text[size:]
    return [*pieces, text]


def added_up(deltas: list[dict[str, Any]]) -> dict[str, Any]:
    """What a client makes of a stream's deltas."""
    calls: dict[int, dict[str, str]] = {}
    for delta in deltas:
        for call in delta.get("tool_calls", ()):
            known = calls.setdefault(call["index"], {"name": "", "arguments": ""})
            known["name"] += call["function"].get("name", "")
            known["arguments"] += call["function"]["arguments"]
    return {
        "content": "".join(delta.get("content", "") for delta in deltas),
        "reasoning": "".join(delta.get("reasoning_content", "") for delta in deltas),
        "calls": [calls[index] for index in sorted(calls)],
    }


@pytest.mark.parametrize("text", TEXTS)
@given(
    sizes=st.lists(st.integers(0, 12), max_size=40),
    thinking=st.booleans(),
    calls=st.integers(0, 2),
    separate=st.booleans(),
)
def test_a_stream_adds_up_to_the_whole_answer(
    text: str, sizes: list[int], thinking: bool, calls: int, separate: bool
) -> None:
    made = plan(thinking, calls, separate)
    stream, whole = (ChatAnswer(made, 3, SERVED) for _ in range(2))
    pieces = pieces_of(text, sizes)
    events: list[dict[str, Any]] = []
    for number, piece in enumerate(pieces):
        finish = STOP_EOS if number == len(pieces) - 1 else GOES_ON
        delta = Delta(request_id=1, sink=1, text=piece, token_ids=(1,), finish=finish)
        events += [orjson.loads(event)["choices"][0] for event in stream.gain(0, delta)]
    whole.note(0, Delta(request_id=1, sink=1, text=text, token_ids=(1,), finish=STOP_EOS))
    choice = whole.whole()["choices"][0]
    message = choice["message"]
    told = added_up([event["delta"] for event in events])
    assert told["content"] == (message["content"] or "")
    assert told["reasoning"] == message.get("reasoning_content", "")
    assert told["calls"] == [call["function"] for call in message.get("tool_calls", ())]
    assert len(told["calls"]) <= calls
    finishes = [event["finish_reason"] for event in events]
    assert finishes == [None] * (len(events) - 1) + [choice["finish_reason"]]
    assert "DSML" not in told["content"] + told["reasoning"]
