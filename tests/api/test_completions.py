"""/v1/completions: prompts of every shape, echo, log probabilities, several completions."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.client import events_of, openai_client
from tests.api.stage import TOKENIZER, says, stage

pytestmark = pytest.mark.anyio
TEXT = "/v1/completions"


async def test_the_openai_client_completes_and_streams() -> None:
    async with stage(says(" and more")) as made, openai_client(made) as client:
        whole = await client.completions.create(model="nano", prompt="Once")
        stream = await client.completions.create(model="nano", prompt="Once", stream=True)
        text = "".join([chunk.choices[0].text async for chunk in stream])
    assert whole.choices[0].text == text == " and more"
    assert whole.choices[0].finish_reason == "stop"


async def test_every_shape_of_prompt_is_taken_in_order() -> None:
    ids = TOKENIZER.encode("Once")
    async with stage(says("!")) as made:
        for prompt, count in (("Once", 1), (ids, 1), (["a", "b"], 2), ([ids, ids], 2), (["a", ids], 2)):
            answer = (await made.post(TEXT, {"prompt": prompt})).json()
            assert [choice["index"] for choice in answer["choices"]] == list(range(count))
            assert {choice["text"] for choice in answer["choices"]} == {"!"}


async def test_choices_of_several_prompts_are_numbered_by_prompt_then_completion() -> None:
    async with stage(says("!")) as made:
        body = {"prompt": ["a", "bb"], "n": 2, "echo": True}
        answer = (await made.post(TEXT, body)).json()
    assert [choice["text"] for choice in answer["choices"]] == ["a!", "a!", "bb!", "bb!"]
    tokens = len(TOKENIZER.encode("a")) + len(TOKENIZER.encode("bb"))
    assert answer["usage"]["prompt_tokens"] == tokens


async def test_the_default_length_is_openais_sixteen() -> None:
    async with stage(says("word " * 40)) as made:
        answer = (await made.post(TEXT, {"prompt": "x"})).json()
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_echo_with_log_probabilities_scores_the_prompt_but_its_first_token() -> None:
    prompt = "Once upon a time there was a very long prompt " * 8
    ids = TOKENIZER.encode(prompt)
    async with stage(says("!")) as made:
        for stream in (False, True):
            body = {"prompt": prompt, "echo": True, "logprobs": 2, "stream": stream}
            columns = await echoed(made.post(TEXT, body), stream)
            assert columns["token_logprobs"] == [None, *(-float(at) for at in range(1, len(ids))), -0.5]
            assert "".join(columns["tokens"]) == prompt + "!"
            assert columns["text_offset"][-1] == len(prompt)
            assert columns["top_logprobs"][0] is None


async def echoed(posting: Any, stream: bool) -> dict[str, list[Any]]:
    """The log probability columns of the one choice, joined over chunks."""
    answer = await posting
    chunks = events_of(answer.text) if stream else [answer.json()]
    columns = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks).endswith("!")
    return {key: [value for column in columns for value in column[key]] for key in columns[0]}


async def test_log_probabilities_hold_the_chosen_token_and_the_best() -> None:
    async with stage(says("Hi")) as made:
        body = {"prompt": "x", "logprobs": 2}
        columns = (await made.post(TEXT, body)).json()["choices"][0]["logprobs"]
    assert columns["tokens"] == [TOKENIZER.token_string(i) for i in TOKENIZER.encode("Hi")]
    assert set(columns["token_logprobs"]) == {-0.5}
    assert all(token in top for token, top in zip(columns["tokens"], columns["top_logprobs"], strict=True))
    assert columns["text_offset"][0] == 0


async def test_sampling_fields_reach_the_rank() -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.3,
        "logit_bias": {"5": -3, "4": 2.5},
        "seed": -9,
        "stop_token_ids": [9],
        "ignore_eos": True,
        "logprobs": 1,
    }
    async with stage(says("!")) as made:
        await made.post(TEXT, {"prompt": "x", "max_tokens": 3, "min_tokens": 2, **fields})
        (bind,) = made.device.binds.values()
    got = bind.sampling
    assert (got.max_new_tokens, got.min_new_tokens, got.seed, got.logprobs) == (3, 2, -9, 1)
    assert (got.temperature, got.top_p, got.top_k, got.min_p) == (0.5, 0.9, 7, 0.1)
    assert (got.repetition_penalty, got.frequency_penalty, got.presence_penalty) == (1.1, 0.2, 0.3)
    assert (got.logit_bias, got.stop_token_ids, got.ignore_eos) == (((4, 2.5), (5, -3.0)), (9,), True)


async def test_a_stop_string_can_stay_in_the_text() -> None:
    async with stage(says("one two three")) as made:
        body = {"prompt": "x", "stop": " two"}
        trimmed = (await made.post(TEXT, body)).json()["choices"][0]
        kept = (await made.post(TEXT, {**body, "include_stop_str_in_output": True})).json()["choices"][0]
    assert (trimmed["text"], kept["text"]) == ("one", "one two")


async def test_a_stop_token_ends_the_text_and_is_not_part_of_it() -> None:
    first, second = TOKENIZER.encode("one two")[:2]
    async with stage(says("one two")) as made:
        answer = (await made.post(TEXT, {"prompt": "x", "stop_token_ids": [second]})).json()
    assert answer["choices"][0]["text"] == TOKENIZER.decode([first])
    assert answer["choices"][0]["finish_reason"] == "stop"
