"""/v1/chat/completions, through the official client and as raw HTTP."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import BadRequestError, InternalServerError

from tests.api.client import events_of, openai_client
from tests.api.stage import CALL, says, stage

pytestmark = pytest.mark.anyio
HELLO: Any = [{"role": "user", "content": "Hello"}]
TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


async def test_the_openai_client_streams_a_chat() -> None:
    async with stage(says("Good day 🙂, how are you?")) as made, openai_client(made) as client:
        stream = await client.chat.completions.create(
            model="nano", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "Good day 🙂, how are you?"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 3
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 0


async def test_a_whole_answer_and_its_stream_say_the_same() -> None:
    async with stage(says("One two three.")) as made, openai_client(made) as client:
        whole = await client.chat.completions.create(model="nano", messages=HELLO)
        stream = await client.chat.completions.create(model="nano", messages=HELLO, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert whole.choices[0].message.content == text == "One two three."
    assert whole.choices[0].finish_reason == "stop"


async def test_a_stream_is_role_then_content_then_one_finish_then_usage_then_done() -> None:
    async with stage(says("Hi you")) as made:
        body = {"messages": HELLO, "stream": True, "stream_options": {"include_usage": True}}
        events = events_of((await made.post("/v1/chat/completions", body)).text)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [event["choices"][0]["finish_reason"] for event in events[:-1]].count(None) == len(events) - 2
    assert events[-2]["choices"][0]["delta"] == {}
    assert events[-1]["choices"] == []
    assert all(event["usage"] is None for event in events[:-1])


async def test_continuous_usage_is_in_every_chunk_and_grows() -> None:
    async with stage(says("Hi you")) as made:
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = {"messages": HELLO, "stream": True, "stream_options": options}
        events = events_of((await made.post("/v1/chat/completions", body)).text)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[0] <= 1 < counts[-1]


async def test_reasoning_is_apart_from_content_with_thinking_on() -> None:
    async with stage(says("Let me see.</think>Four.")) as made, openai_client(made) as client:
        on: Any = {"chat_template_kwargs": {"thinking": True}}
        whole = await client.chat.completions.create(model="nano", messages=HELLO, extra_body=on)
        stream = await client.chat.completions.create(
            model="nano", messages=HELLO, extra_body=on, stream=True
        )
        deltas = [chunk.choices[0].delta.model_dump() async for chunk in stream]
    message = whole.choices[0].message.model_dump()
    assert (message["reasoning_content"], message["content"]) == ("Let me see.", "Four.")
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "Let me see."
    assert "".join(delta.get("content") or "" for delta in deltas) == "Four."


async def test_reasoning_that_is_not_to_be_apart_is_the_beginning_of_the_content() -> None:
    async with stage(says("Let me see.</think>Four.")) as made:
        body = {"messages": HELLO, "chat_template_kwargs": {"thinking": True}, "separate_reasoning": False}
        message = (await made.post("/v1/chat/completions", body)).json()["choices"][0]["message"]
    assert message["content"] == "Let me see.Four."
    assert "reasoning_content" not in message


async def test_thinking_that_never_closes_is_all_reasoning() -> None:
    async with stage(says("Hm")) as made:
        body = {"messages": HELLO, "chat_template_kwargs": {"thinking": True}}
        message = (await made.post("/v1/chat/completions", body)).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm", "")


async def test_each_way_to_ask_for_thinking_gives_the_same_prompt() -> None:
    ways: list[dict[str, Any]] = [
        {"chat_template_kwargs": {"thinking": True}},
        {"chat_template_kwargs": {"enable_thinking": True}},
        {"thinking": {"type": "enabled"}},
        {},
        {"thinking": {"type": "disabled"}},
        {"chat_template_kwargs": {"thinking": False}, "thinking": {"type": "enabled"}},
    ]
    async with stage(says("Hm")) as made:
        for way in ways:
            await made.post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 1, **way})
        prompts = [step.tokens for step in made.device.steps if step.mode == "extend"]
    assert prompts == [prompts[0]] * 3 + [prompts[3]] * 3
    assert prompts[0] != prompts[3]


async def test_dsml_calls_become_tool_calls() -> None:
    async with stage(says(CALL)) as made, openai_client(made) as client:
        whole = await client.chat.completions.create(model="nano", messages=HELLO, tools=TOOLS)
        stream = await client.chat.completions.create(model="nano", messages=HELLO, tools=TOOLS, stream=True)
        chunks = [chunk.choices[0] async for chunk in stream]
    choice = whole.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Wait.")
    assert choice.message.tool_calls is not None
    function = choice.message.tool_calls[0].function  # type: ignore[union-attr]
    assert (function.name, json.loads(function.arguments)) == ("add", {"a": 1, "b": "two"})
    calls = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
    assert (calls[0].index, calls[0].type, calls[0].function.name) == (0, "function", "add")
    assert "".join(call.function.arguments for call in calls) == function.arguments
    assert chunks[-1].finish_reason == "tool_calls"


async def test_markup_of_tools_that_were_not_offered_is_no_content() -> None:
    async with stage(says(CALL)) as made:
        for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
            answer = (await made.post("/v1/chat/completions", {"messages": HELLO, **more})).json()
            message = answer["choices"][0]["message"]
            assert (message["content"], message.get("tool_calls")) == ("Wait.", None)
            assert answer["choices"][0]["finish_reason"] == "stop"


async def test_only_the_first_call_is_kept_where_the_client_wants_no_parallel_ones() -> None:
    block = CALL.replace("Wait.", "")
    two = block.replace("\n</｜DSML｜tool_calls>", "") + block.partition("tool_calls>")[2]
    async with stage(says(two)) as made:
        for parallel, count in ((True, 2), (False, 1)):
            body = {"messages": HELLO, "tools": TOOLS, "parallel_tool_calls": parallel}
            message = (await made.post("/v1/chat/completions", body)).json()["choices"][0]["message"]
            assert len(message["tool_calls"]) == count


async def test_several_completions_count_the_prompt_once() -> None:
    async with stage(says("Hi you")) as made, openai_client(made) as client:
        one = await client.chat.completions.create(model="nano", messages=HELLO)
        three = await client.chat.completions.create(model="nano", messages=HELLO, n=3)
    assert [choice.index for choice in three.choices] == [0, 1, 2]
    assert one.usage is not None
    assert three.usage is not None
    assert three.usage.prompt_tokens == one.usage.prompt_tokens
    assert three.usage.completion_tokens == 3 * one.usage.completion_tokens
    assert {bind.child for bind in made.device.binds.values()} == {0, 1, 2}


async def test_log_probabilities_spell_the_content_with_bytes() -> None:
    async with stage(says("Hé you")) as made, openai_client(made) as client:
        whole = await client.chat.completions.create(
            model="nano", messages=HELLO, logprobs=True, top_logprobs=2
        )
    choice = whole.choices[0]
    assert choice.logprobs is not None
    content = choice.logprobs.content
    assert content is not None
    spelt = b"".join(bytes(entry.bytes or ()) for entry in content)
    assert spelt.decode() == choice.message.content == "Hé you"
    assert [len(entry.top_logprobs) for entry in content] == [2] * len(content)
    assert content[0].logprob == -0.5


async def test_log_probabilities_without_tops_give_the_chosen_token() -> None:
    async with stage(says("Hi")) as made:
        body = {"messages": HELLO, "logprobs": True, "stream": True}
        events = events_of((await made.post("/v1/chat/completions", body)).text)
    entries = [e for event in events for e in (event["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert "".join(entry["token"] for entry in entries) == "Hi"


async def test_a_stop_string_ends_the_content_and_is_not_part_of_it() -> None:
    async with stage(says("one two three four")) as made, openai_client(made) as client:
        whole = await client.chat.completions.create(model="nano", messages=HELLO, stop=[" three"])
        await made.settled()
        stream = await client.chat.completions.create(
            model="nano", messages=HELLO, stop=" three", stream=True
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert whole.choices[0].message.content == text == "one two"
    assert whole.choices[0].finish_reason == "stop"


async def test_the_length_limit_is_a_finish_reason() -> None:
    async with stage(says("one two three four")) as made, openai_client(made) as client:
        whole = await client.chat.completions.create(model="nano", messages=HELLO, max_completion_tokens=2)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 2


async def test_an_engine_that_compiles_no_grammars_says_so() -> None:
    async with stage(says("{}")) as made, openai_client(made) as client:
        with pytest.raises(InternalServerError) as refused:
            await client.chat.completions.create(
                model="nano", messages=HELLO, response_format={"type": "json_object"}
            )
    assert refused.value.status_code == 503
    assert refused.value.type == "service_unavailable_error"


async def test_a_schema_that_cannot_be_enforced_is_refused_with_its_place() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    async with stage(says("{}")) as made, openai_client(made) as client:
        with pytest.raises(BadRequestError) as refused:
            await client.chat.completions.create(model="nano", messages=HELLO, response_format=wanted)
    assert (refused.value.param, refused.value.code) == ("response_format", "unsupported_grammar")
    assert "/json_schema/schema/properties/a/uniqueItems" in refused.value.message
