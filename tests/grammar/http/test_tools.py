"""Tool calls that a grammar demands or shapes, from the body to the answer, through the official client."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import BadRequestError

from tests.api.client import openai_client
from tests.api.stage import CALL, says
from tests.grammar.http.stage import constrained

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
HELLO: Any = [{"role": "user", "content": "Hello"}]
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def tool(name: str = "add", strict: bool | None = None) -> Any:
    function: dict[str, Any] = {"name": name, "parameters": PARAMETERS}
    return {"type": "function", "function": function if strict is None else {**function, "strict": strict}}


NAMED: Any = {"type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize(
    ("tools", "choice", "expected"),
    [
        ([tool(strict=True)], "auto", False),
        ([tool(), tool("sub", strict=True)], None, False),
        ([tool(), tool("sub")], "required", True),
        ([tool(), tool("sub")], NAMED, True),
    ],
)
async def test_strict_and_forced_calls_are_constrained(tools: Any, choice: Any, expected: bool) -> None:
    async with constrained(says(CALL)) as found:
        body = {"messages": HELLO, "tools": tools, **({"tool_choice": choice} if choice else {})}
        answer = await found.made.post(CHAT, body)
        (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": "two"}
        (key,) = found.keys
        assert (key.kind, dict(key.options)["required"]) == ("tool_calls", expected)
        assert ('"sub' in key.text) == (choice is not NAMED and len(tools) > 1)
        # OpenAI's way: a call that was demanded by its name is no reason to finish.
        reason = answer.json()["choices"][0]["finish_reason"]
        assert reason == ("stop" if choice is NAMED else "tool_calls")


async def test_free_calls_and_no_calls_are_not_constrained() -> None:
    async with constrained(says("Hi")) as found:
        for choice in ("auto", "none"):
            body = {"messages": HELLO, "tools": [tool()], "tool_choice": choice}
            assert (await found.made.post(CHAT, body)).status_code == 200
        body = {"messages": HELLO, "tools": [tool(strict=True)], "tool_choice": "none"}
        assert (await found.made.post(CHAT, body)).status_code == 200
        assert [entry.grammar for entry in found.entries] == [b"", b"", b""]


async def test_one_call_alone_is_what_the_grammar_says_too() -> None:
    async with constrained(says(CALL)) as found:
        body = {"messages": HELLO, "tools": [tool(strict=True)], "parallel_tool_calls": False}
        assert (await found.made.post(CHAT, body)).status_code == 200
        assert dict(found.keys[0].options)["parallel"] is False


@pytest.mark.parametrize(
    ("body", "param", "part"),
    [
        ({"tool_choice": "required"}, "tool_choice", "no tool"),
        ({"tools": [tool()], "tool_choice": "must"}, "tool_choice", "auto, none, required"),
        ({"tools": [tool("sub")], "tool_choice": NAMED}, "tool_choice", "'add'"),
        ({"tools": [tool()], "tool_choice": {"type": "allowed_tools"}}, "tool_choice", "function"),
        ({"tools": [tool()], "response_format": {"type": "json_object"}}, "tool_choice", "response_format"),
        ({"tools": [tool()], "regex": "a"}, "tool_choice", "regex"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": "yes"}}]},
            "tools[0].function.strict",
            "true or false",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {
                "type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}}}}]},
            "tools",
            "/0/function/parameters/properties/x/uniqueItems",
        ),
    ],
)  # fmt: skip
async def test_what_cannot_be_demanded_of_tools_is_a_400(body: Any, param: str, part: str) -> None:
    async with constrained(says("Hi")) as found:
        for stream in (False, True):
            answer = await found.made.post(CHAT, {"messages": HELLO, **body, "stream": stream})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param), error
            assert part in error["message"]
        assert found.entries == []


async def test_the_openai_client_gets_strict_calls_whole_and_streamed() -> None:
    async with constrained(says(CALL)) as found, openai_client(found.made) as client:
        asked: Any = {
            "model": "nano",
            "messages": HELLO,
            "tools": [tool(strict=True)],
            "tool_choice": "required",
        }
        whole = await client.chat.completions.create(**asked)
        stream = await client.chat.completions.create(**asked, stream=True)
        parts = [chunk.choices[0].delta.tool_calls async for chunk in stream if chunk.choices]
        arguments = "".join(call.function.arguments for calls in parts for call in calls or [])
    (call,) = whole.choices[0].message.tool_calls
    assert call.function.arguments == arguments == '{"a": 1, "b": "two"}'


async def test_the_openai_client_gets_json_of_a_schema_and_its_refusal() -> None:
    async with constrained(says('{"a": 1, "b": "x"}')) as found, openai_client(found.made) as client:
        wanted: Any = {
            "type": "json_schema",
            "json_schema": {"name": "x", "strict": True, "schema": PARAMETERS},
        }
        whole = await client.chat.completions.create(model="nano", messages=HELLO, response_format=wanted)
        assert json.loads(whole.choices[0].message.content or "") == {"a": 1, "b": "x"}
        assert found.keys[0].kind == "json_schema"
        wanted["json_schema"]["schema"] = {"$ref": "https://example.com/schema"}
        with pytest.raises(BadRequestError) as refused:
            await client.chat.completions.create(model="nano", messages=HELLO, response_format=wanted)
    assert "/json_schema/schema/$ref" in refused.value.message


async def test_with_thinking_calls_begin_behind_the_reasoning() -> None:
    async with constrained(says("Let me see.</think>" + CALL)) as found:
        body = {"messages": HELLO, "tools": [tool(strict=True)], "thinking": {"type": "enabled"}}
        answer = await found.made.post(CHAT, body)
        assert len(answer.json()["choices"][0]["message"]["tool_calls"]) == 1
        assert found.entries[0].grammar_root == "after_think"
