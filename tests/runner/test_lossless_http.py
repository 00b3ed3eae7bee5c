"""What clients ask of a server that drafts, against the same of one that doesn't, over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from bench.serve import HOST, server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

WITHIN = 1e-4
"""Nats between logprobs."""

TEXTS = (
    "The scheduler keeps a queue of requests and a pool of pages. A request waits until",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    '{"name": "Ada", "year": 1815, "city": "London"}\n{"name": "',
)


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, int]]:
    """(without drafts, with drafts)"""
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        lean = "--threads", "1", "--max-running-requests", "8", "--max-total-tokens", "8192"
        flags = (), ("--speculative", "dspark", "--speculative-verify-mode", "static")
        started = [stack.enter_context(server([*lean, *some])) for some in flags]
        yield started[0][0], started[1][0]


def post(port: int, path: str = "/generate", **body: Any) -> Any:
    answer = httpx.post(f"http://{HOST}:{port}{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def greedy(**params: Any) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": 40, **params}


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"ignore_eos": True, "max_new_tokens": 70},
        {"min_new_tokens": 30},
        {"stop": [" the"]},
        {"stop": ["e", "\n"], "no_stop_trim": True},
        {"stop_token_ids": list(range(300, 360))},
        {"logit_bias": {"300": 60.0, "301": -100.0}, "max_new_tokens": 12},
        {"frequency_penalty": 0.9},
        {"presence_penalty": 1.2, "repetition_penalty": 1.3, "ignore_eos": True},
        {"max_new_tokens": 1},
        {"max_new_tokens": 5, "ignore_eos": True},
    ],
    ids=lambda params: " ".join(params) or "nothing",
)
def test_greedy_answers_are_the_same(ports: tuple[int, int], params: dict[str, Any]) -> None:
    both = (post(port, text=list(TEXTS), sampling_params=greedy(**params)) for port in ports)
    for plain, drafted in zip(*both, strict=True):
        assert drafted["output_ids"] == plain["output_ids"]
        assert drafted["text"] == plain["text"]
        assert drafted["meta_info"]["finish_reason"] == plain["meta_info"]["finish_reason"]


def test_logprobs_of_output_and_prompt_are_the_same(ports: tuple[int, int]) -> None:
    ask: dict[str, Any] = {"return_logprob": True, "top_logprobs_num": 4, "logprob_start_len": 0}
    both = (post(port, text=list(TEXTS), sampling_params=greedy(), **ask) for port in ports)
    for one, other in zip(*both, strict=True):
        plain, drafted = one["meta_info"], other["meta_info"]
        for name in ("output_token_logprobs", "input_token_logprobs"):
            assert len(drafted[name]) == len(plain[name]) > 3
            for mine, own in zip(drafted[name], plain[name], strict=True):
                assert mine[1] == own[1]
                assert mine[0] is own[0] is None or mine[0] == pytest.approx(own[0], abs=WITHIN)
        for mine, own in zip(drafted["output_top_logprobs"], plain["output_top_logprobs"], strict=True):
            assert [row[1] for row in mine] == [row[1] for row in own]
            assert [row[0] for row in mine] == pytest.approx([row[0] for row in own], abs=WITHIN)


def test_several_completions_of_one_prompt_are_as_greedy_as_one(ports: tuple[int, int]) -> None:
    one = post(ports[0], text=TEXTS[0], sampling_params=greedy())["output_ids"]
    both = post(ports[1], text=TEXTS[0], sampling_params=greedy(n=2))
    assert [answer["output_ids"] for answer in both] == [one, one]


def test_a_seed_gives_the_same_text_again_alone_and_in_company(ports: tuple[int, int]) -> None:
    port = ports[1]
    params = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "sampling_seed": 7, "max_new_tokens": 40}

    def seeded(text: str) -> list[int]:
        found: list[int] = post(port, text=text, sampling_params=params)["output_ids"]
        return found

    alone = [seeded(text) for text in TEXTS]
    assert [seeded(text) for text in TEXTS] == alone
    assert len({tuple(ids) for ids in alone}) == len(TEXTS)
    full, stop = threading.Barrier(4), threading.Event()

    def company(number: int) -> None:
        full.wait()
        while not stop.is_set():
            post(port, text=TEXTS[number] * 3, sampling_params=greedy(ignore_eos=True))

    with ThreadPoolExecutor(8) as pool:
        others = [pool.submit(company, number) for number in range(3)]
        full.wait()
        try:
            crowd = list(pool.map(seeded, TEXTS))
        finally:
            stop.set()
        for other in others:
            other.result()
    assert crowd == alone


def test_statistics_of_drafts_are_told_where_asked_and_the_drafts_are_real(ports: tuple[int, int]) -> None:
    ask: dict[str, Any] = {"return_speculation_stats": True, "sampling_params": greedy(ignore_eos=True)}
    told = post(ports[1], text=TEXTS[0], **ask)["meta_info"]
    assert told["spec_verify_ct"] > 0
    assert 0 < told["spec_accept_token_num"] <= told["spec_draft_token_num"]
    assert told["completion_tokens"] >= told["spec_accept_token_num"] + told["spec_verify_ct"]


def test_what_no_server_supports_is_refused_by_name_with_drafts_too(ports: tuple[int, int]) -> None:
    for port in ports:
        body = {"text": "a", "sampling_params": {"temperature": 0, "stop_regex": "a+"}}
        answer = httpx.post(f"http://{HOST}:{port}/generate", json=body, timeout=60)
        assert answer.status_code == 400
        assert "stop_regex" in answer.text
