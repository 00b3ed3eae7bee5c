"""/generate: the native route's shapes."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.api.client import events_of
from tests.api.stage import EOS, TOKENIZER, says, stage

pytestmark = pytest.mark.anyio
NATIVE = "/generate"


async def test_a_single_text_gives_one_object() -> None:
    async with stage(says("Hi you")) as made:
        answer = (await made.post(NATIVE, {"text": "x", "sampling_params": {"max_new_tokens": 9}})).json()
    assert answer["text"] == "Hi you"
    assert answer["output_ids"] == [*TOKENIZER.encode("Hi you"), EOS]
    meta = answer["meta_info"]
    assert meta["finish_reason"] == {"type": "stop", "matched": EOS}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (1, len(answer["output_ids"]))
    assert (meta["cached_tokens"], meta["dp_rank"]) == (0, 0)
    assert meta["e2e_latency"] > 0


async def test_a_list_gives_a_list_in_input_order_with_its_own_parameters_and_ids() -> None:
    async with stage(says("one two three four")) as made:
        body = {
            "input_ids": [[5, 6, 7], [8]],
            "sampling_params": [{"max_new_tokens": 1}, {"max_new_tokens": 2}],
            "rid": ["a", "b"],
        }
        answers = (await made.post(NATIVE, body)).json()
    assert [answer["meta_info"]["id"] for answer in answers] == ["a", "b"]
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [3, 1]
    assert [answer["meta_info"]["finish_reason"] for answer in answers] == [
        {"type": "length", "length": 1},
        {"type": "length", "length": 2},
    ]


async def test_several_completions_of_one_text_are_a_list() -> None:
    async with stage(says("Hi")) as made:
        answers = (await made.post(NATIVE, {"text": "x", "sampling_params": {"n": 3}})).json()
    assert [answer["text"] for answer in answers] == ["Hi"] * 3


async def test_a_streams_text_is_everything_so_far_and_batches_carry_an_index() -> None:
    async with stage(says("one two three")) as made:
        single = events_of((await made.post(NATIVE, {"text": "x", "stream": True})).text)
        batch = events_of((await made.post(NATIVE, {"text": ["x", "y"], "stream": True})).text)
    texts = [event["text"] for event in single]
    assert texts[-1] == "one two three"
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    assert "index" not in single[0]
    assert {event["index"] for event in batch} == {0, 1}
    assert [event["meta_info"]["finish_reason"] is None for event in single][-1] is False


async def test_log_probabilities_are_triples_of_output_and_wanted_prompt() -> None:
    ids = TOKENIZER.encode("Once upon a time")
    async with stage(says("Hi")) as made:
        body = {
            "input_ids": ids,
            "return_logprob": True,
            "logprob_start_len": 1,
            "top_logprobs_num": 2,
            "return_text_in_logprobs": True,
        }
        meta = (await made.post(NATIVE, body)).json()["meta_info"]
    assert [token for _, token, _ in meta["output_token_logprobs"]] == [*TOKENIZER.encode("Hi"), EOS]
    assert meta["output_token_logprobs"][0][2] == TOKENIZER.token_string(TOKENIZER.encode("Hi")[0])
    assert [value for value, _, _ in meta["input_token_logprobs"]] == [-float(i) for i in range(1, len(ids))]
    assert len(meta["output_top_logprobs"][0]) == 2


async def test_a_stop_string_is_named_and_trimmed_unless_kept() -> None:
    async with stage(says("one two three")) as made:
        body = {"text": "x", "sampling_params": {"stop": [" two"]}}
        trimmed = (await made.post(NATIVE, body)).json()
        kept = (
            await made.post(NATIVE, {"text": "x", "sampling_params": {"stop": " two", "no_stop_trim": True}})
        ).json()
    assert (trimmed["text"], kept["text"]) == ("one", "one two")
    assert trimmed["meta_info"]["finish_reason"] == {"type": "stop", "matched": " two"}


async def test_a_rank_can_be_demanded_by_header_or_body() -> None:
    async with stage(says("Hi")) as made:
        for more, headers in (({"routed_dp_rank": 0}, {}), ({}, {"x-data-parallel-rank": "0"})):
            answer = await made.post(NATIVE, {"text": "x", **more}, headers=headers)
            assert answer.json()["meta_info"]["dp_rank"] == 0
        for more, headers in (({"data_parallel_rank": 3}, {}), ({}, {"x-data-parallel-rank": "one"})):
            assert (await made.post(NATIVE, {"text": "x", **more}, headers=headers)).status_code == 400
