"""A client's faults are answered with an OpenAI error object before the first byte, and harm nobody."""

from __future__ import annotations

from typing import Any

import anyio
import msgspec
import pytest

from api.schema import ChatBody, CompletionBody, GenerateBody, SamplingParams
from engine.errors import UnsupportedFeature
from engine.features import FEATURES, STRUCTURED, refuse_unsupported
from tests.api.stage import CONTEXT, TOKENIZER, Stage, says, stage

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
NATIVE = "/generate"
WORD = "open-sesame"
HELLO = [{"role": "user", "content": "Hello"}]
VOCABULARY = TOKENIZER.vocab_size

WRONG: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {}, "messages"),
    (CHAT, {"messages": [{"role": "nobody", "content": "x"}]}, "messages[0].role"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0].type",
    ),
    (CHAT, {"messages": HELLO, "top_logprobs": 1}, "top_logprobs"),
    (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": VOCABULARY + 1}, "top_logprobs"),
    (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    (CHAT, {"messages": HELLO, "n": 17}, "n"),
    (CHAT, {"messages": HELLO, "n": 10**12}, "n"),
    (CHAT, {"messages": HELLO, "n": 0}, "n"),
    (CHAT, {"messages": HELLO, "temperature": -0.1}, "temperature"),
    (CHAT, {"messages": HELLO, "temperature": 2.1}, "temperature"),
    (CHAT, {"messages": HELLO, "temperature": "hot"}, "temperature"),
    (CHAT, {"messages": HELLO, "top_p": 0}, "top_p"),
    (CHAT, {"messages": HELLO, "top_p": 1.1}, "top_p"),
    (CHAT, {"messages": HELLO, "min_p": 2}, "min_p"),
    (CHAT, {"messages": HELLO, "top_k": VOCABULARY + 1}, "top_k"),
    (CHAT, {"messages": HELLO, "top_k": -2}, "top_k"),
    (CHAT, {"messages": HELLO, "frequency_penalty": 3}, "frequency_penalty"),
    (CHAT, {"messages": HELLO, "presence_penalty": -3}, "presence_penalty"),
    (CHAT, {"messages": HELLO, "repetition_penalty": 0}, "repetition_penalty"),
    (CHAT, {"messages": HELLO, "logit_bias": {str(VOCABULARY): 1}}, "logit_bias"),
    (CHAT, {"messages": HELLO, "logit_bias": {"-1": 1}}, "logit_bias"),
    (CHAT, {"messages": HELLO, "logit_bias": {"word": 1}}, "logit_bias"),
    (CHAT, {"messages": HELLO, "logit_bias": {"5": 101}}, "logit_bias"),
    (CHAT, {"messages": HELLO, "max_tokens": 0}, "max_tokens"),
    (CHAT, {"messages": HELLO, "max_tokens": -5}, "max_tokens"),
    (CHAT, {"messages": HELLO, "max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT, {"messages": HELLO, "max_tokens": CONTEXT}, "messages"),
    (CHAT, {"messages": HELLO, "max_tokens": 4, "min_tokens": 5}, "min_tokens"),
    (CHAT, {"messages": HELLO, "stop": ""}, "stop"),
    (CHAT, {"messages": HELLO, "stop": ["a", ""]}, "stop"),
    (CHAT, {"messages": HELLO, "stop": ["a"] * 17}, "stop"),
    (CHAT, {"messages": HELLO, "stop": "a" * 257}, "stop"),
    (CHAT, {"messages": HELLO, "stop": ["a", 3]}, "stop[1]"),
    (CHAT, {"messages": HELLO, "stop_token_ids": [VOCABULARY]}, "stop_token_ids"),
    (CHAT, {"messages": HELLO, "seed": 1 << 63}, "seed"),
    (CHAT, {"messages": HELLO, "stream_options": {"include_usage": True}}, "stream_options"),
    (CHAT, {"messages": HELLO, "response_format": {"type": "json_schema"}}, "response_format"),
    (CHAT, {"messages": HELLO, "response_format": {"type": "text", "more": 1}}, "response_format.more"),
    (CHAT, {"messages": HELLO, "regex": "a\0b"}, "regex"),
    (CHAT, {"messages": HELLO, "json_schema": "{"}, "json_schema"),
    (CHAT, {"messages": HELLO, "guided_json": {"not": {}}}, "guided_json"),
    (CHAT, {"messages": HELLO, "modalities": ["text", "audio"]}, "modalities"),
    (CHAT, {"messages": HELLO, "bad_words": ["x"]}, "bad_words"),
    (CHAT, {"messages": HELLO, "tools": [{}]}, "tools[0].function"),
    (CHAT, {"messages": HELLO, "tool_choice": "required"}, "tool_choice"),
    (CHAT, {"messages": HELLO, "chat_template_kwargs": {"thinking": "yes"}}, "chat_template_kwargs.thinking"),
    (CHAT, {"messages": HELLO, "thinking": {"type": "on"}}, "thinking.type"),
    (CHAT, {"messages": HELLO, "reasoning_effort": "extreme"}, "reasoning_effort"),
    (CHAT, {"messages": HELLO, "routed_dp_rank": 1}, "routed_dp_rank"),
    (CHAT, {"messages": HELLO, "rid": "a\nb"}, "rid"),
    (TEXT, {"prompt": ""}, "prompt"),
    (TEXT, {"prompt": []}, "prompt"),
    (TEXT, {"prompt": ["a", ""]}, "prompt[1]"),
    (TEXT, {"prompt": [[]]}, "prompt[0]"),
    (TEXT, {"prompt": [1, "a"]}, "prompt[0]"),
    (TEXT, {"prompt": [-1]}, "prompt"),
    (TEXT, {"prompt": [VOCABULARY]}, "prompt"),
    (TEXT, {"prompt": "x", "logprobs": 21}, "logprobs"),
    (TEXT, {"prompt": "x " * CONTEXT}, "prompt"),
    (TEXT, {"prompt": "x", "suffix": "y"}, "suffix"),
    (NATIVE, {}, "text"),
    (NATIVE, {"text": "a", "input_ids": [1]}, "text"),
    (NATIVE, {"input_ids": [VOCABULARY]}, "input_ids"),
    (NATIVE, {"input_ids": []}, "input_ids"),
    (NATIVE, {"text": "a", "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
    (NATIVE, {"text": "a", "sampling_params": {"max_new_tokens": 0}}, "sampling_params.max_new_tokens"),
    (NATIVE, {"text": "a", "sampling_params": {"json_schema": "{"}}, "sampling_params.json_schema"),
    (NATIVE, {"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
    (NATIVE, {"text": ["a", "b"], "rid": ["x", "x"]}, "rid"),
    (NATIVE, {"text": "a", "return_logprob": True, "top_logprobs_num": 99}, "top_logprobs_num"),
    (NATIVE, {"text": "a", "return_logprob": True, "logprob_start_len": 99}, "logprob_start_len"),
    (NATIVE, {"text": "a", "lora_path": "x"}, "lora_path"),
]


async def test_every_wrong_field_is_a_400_that_names_it_streaming_or_not() -> None:
    async with stage(says("Hi")) as made:
        for path, body, param in WRONG:
            for stream in (False,) if "stream_options" in body else (False, True):
                answer = await made.post(path, {**body, "stream": stream})
                error = answer.json()["error"]
                assert (answer.status_code, error["param"]) == (400, param), (body, error)
                assert error["type"] == "invalid_request_error"
                assert answer.headers["content-type"] == "application/json"
        assert made.device.steps == []


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b'{"messages": NaN}',
        b'{"messages": [], "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": ' + b"[" * 100_000,
    ],
)
async def test_a_body_that_is_no_json_or_has_no_number_is_a_400(raw: bytes) -> None:
    async with stage(says("Hi")) as made, made.client() as client:
        answer = await client.post(CHAT, content=raw)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_the_context_error_has_the_wording_and_code_that_clients_match() -> None:
    async with stage(says("Hi")) as made:
        answer = await made.post(CHAT, {"messages": [{"role": "user", "content": "x " * CONTEXT}]})
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert f"maximum context length is {CONTEXT} tokens" in error["message"]
    assert "in the messages" in error["message"]


async def test_unknown_fields_are_ignored() -> None:
    async with stage(says("Hi")) as made:
        answer = await made.post(
            CHAT, {"messages": HELLO, "brand_new": {"x": 1}, "user": "me", "store": True}
        )
    assert answer.status_code == 200


async def test_nulls_are_defaults() -> None:
    fields = ("temperature", "top_p", "n", "stop", "logit_bias", "seed", "stream", "tools", "response_format")
    async with stage(says("Hi")) as made:
        answer = await made.post(CHAT, {"messages": HELLO, **dict.fromkeys(fields)})
    assert answer.status_code == 200


async def test_an_unknown_model_is_a_404() -> None:
    async with stage(says("Hi")) as made:
        for path, body in ((CHAT, {"messages": HELLO}), (TEXT, {"prompt": "x"})):
            answer = await made.post(path, {**body, "model": "other"})
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "model_not_found"


async def test_a_body_beyond_the_limit_is_a_413() -> None:
    async with stage(says("Hi"), max_body_bytes=1000) as made:
        answer = await made.post(CHAT, {"messages": [{"role": "user", "content": "x" * 2000}]})
    assert answer.status_code == 413


async def test_a_key_is_needed_where_one_is_set_but_not_by_probes() -> None:
    async with stage(says("Hi"), api_key=WORD) as made:
        body = {"messages": HELLO}
        wrong = ({}, {"authorization": "Bearer no"}, {"authorization": WORD})
        assert [(await made.post(CHAT, body, headers=headers)).status_code for headers in wrong] == [401] * 3
        right = await made.post(CHAT, body, headers={"authorization": f"Bearer {WORD}"})
        assert right.status_code == 200
        async with made.client() as client:
            assert (await client.get("/health")).status_code == 200
            assert (await client.get("/v1/models")).status_code == 401


async def test_wrong_paths_and_methods_are_404_and_405() -> None:
    async with stage(says("Hi")) as made, made.client() as client:
        assert (await client.get("/nothing")).status_code == 404
        refused = await client.get(CHAT)
        assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
        assert (await client.post("/health")).status_code == 405


async def test_a_full_queue_is_a_429_with_retry_after_and_frees_itself() -> None:
    async with stage(says("Hi"), max_running_requests=1, max_queued_requests=3) as made:
        made.gate = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(made.post, CHAT, {"messages": HELLO, "n": 3})
            await made.settled(3)
            answer = await made.post(CHAT, {"messages": HELLO, "n": 2})
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
            assert answer.json()["error"]["type"] == "rate_limit_error"
            made.gate.set()
        assert (await made.post(CHAT, {"messages": HELLO, "n": 2})).status_code == 200


async def test_a_group_that_no_empty_queue_could_hold_is_a_400() -> None:
    async with stage(says("Hi"), max_running_requests=2, max_queued_requests=3) as made:
        for path, body, param in (
            (CHAT, {"messages": HELLO, "n": 4}, "n"),
            (TEXT, {"prompt": ["a", "b"], "n": 2}, "prompt"),
            (NATIVE, {"text": ["a"] * 4}, "text"),
        ):
            answer = await made.post(path, body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_a_request_id_is_echoed_and_a_live_one_refused() -> None:
    async with stage(says("Hi")) as made:
        headers = {"x-request-id": "mine-1"}
        first = await made.post(CHAT, {"messages": HELLO}, headers=headers)
        assert (first.headers["x-request-id"], first.json()["id"]) == ("mine-1", "mine-1")
        await made.settled()
        assert (await made.post(CHAT, {"messages": HELLO, "n": 2}, headers=headers)).status_code == 200
        for wrong in ({"messages": HELLO, "n": 0}, []):
            assert (await made.post(CHAT, wrong, headers=headers)).headers["x-request-id"] == "mine-1"
        fresh = await made.post(CHAT, {"messages": HELLO})
        assert fresh.headers["x-request-id"].startswith("chatcmpl-")
        await live_rid_is_refused(made)


async def live_rid_is_refused(made: Stage) -> None:
    made.gate = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: made.post(CHAT, {"messages": HELLO, "rid": "twice"}))
        await made.settled(1)
        second = await made.post(CHAT, {"messages": HELLO, "rid": "twice"})
        assert (second.status_code, second.json()["error"]["param"]) == (400, "rid")
        made.gate.set()


async def test_one_bad_request_harms_nobody_else() -> None:
    """I15: bad requests between good ones, and a row whose sampling fails on the device."""
    answers: list[int] = []
    async with stage(says("one two three")) as made:

        async def good() -> None:
            answer = await made.post(CHAT, {"messages": HELLO})
            assert answer.json()["choices"][0]["message"]["content"] == "one two three"
            answers.append(answer.status_code)

        async with anyio.create_task_group() as tasks:
            for path, body, _ in WRONG[:8]:
                tasks.start_soon(good)
                tasks.start_soon(made.post, path, body)
        made.device.fails = dict.fromkeys((10, 11), "no finite logit")
        failed = await made.post(CHAT, {"messages": HELLO, "n": 3})
        await good()
    assert answers == [200] * 9
    assert (failed.status_code, failed.json()["error"]["message"]) == (500, "no finite logit")


def test_every_field_that_is_read_by_nobody_is_refused_by_the_features_table() -> None:
    """A field of type Any has no reader but the table, or the gate of grammars."""
    for kind in (ChatBody, CompletionBody, GenerateBody, SamplingParams):
        for field in msgspec.structs.fields(kind):
            if field.type is Any and field.name not in STRUCTURED:
                assert FEATURES[field.name].why_not, field.name


async def test_a_mode_that_lacks_what_a_field_asks_for_refuses_it_before_the_first_byte() -> None:
    """A server in a mode that no row of the table knows supports nothing but plain greedy decoding."""
    async with stage(says("Hi"), modes=frozenset({"unheard-of"})) as made:
        for path, body, name in (
            (CHAT, {"messages": HELLO, "top_p": 0.5}, "sampling"),
            (CHAT, {"messages": HELLO, "presence_penalty": 1}, "penalties"),
            (TEXT, {"prompt": "x", "echo": True}, "echo"),
            (NATIVE, {"text": "x", "return_logprob": True}, "logprobs"),
        ):
            answer = await made.post(path, body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
        greedy = {"text": "x", "sampling_params": {"temperature": 0, "n": 1}, "logprob_start_len": -1}
        assert (await made.post(NATIVE, greedy)).status_code == 200


def test_a_mode_that_a_feature_does_not_work_with_refuses_it_by_name() -> None:
    refuse_unsupported(["logprobs"], {"overlap"})
    with pytest.raises(UnsupportedFeature, match="logprobs does not work with unheard-of"):
        refuse_unsupported(["logprobs"], {"overlap", "unheard-of"})
