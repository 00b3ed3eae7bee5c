"""The shipped model under grammars: plain and with its own draft, in company, retracted, aborted."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from engine.grammar.key import GrammarKey
from engine.messages import ABORTED, FAILED, LENGTH, STOP_EOS, Abort, Sampling, Submit, SubmitBatch
from engine.runner.masking import NOTHING_ALLOWED
from tests.grammar.pipeline.stage import (
    JSON,
    NUMBERS,
    SLOTS,
    TEXT,
    WORDS,
    Served,
    follows,
    shipped,
    submit,
    tokenizer,
)
from tests.grammar.service.stage import STOP

KEYS: list[GrammarKey | None] = [WORDS, None, NUMBERS, TEXT, None, JSON, WORDS, NUMBERS, None]


@pytest.fixture(params=["plain", "dspark"])
def rank(request: pytest.FixtureRequest) -> Iterator[Served]:
    """A rank without and with drafts."""
    served = Served(shipped()[1] if request.param == "dspark" else None)
    yield served
    served.close()


def crowd(**sampling: object) -> list[Submit]:
    """More requests than slots, constrained and free."""
    return [
        submit(
            number, f"Number {number} of a list, as it should be:", key, most=24 if key else 10, **sampling
        )
        for number, key in enumerate(KEYS, 1)
    ]


def check(served: Served, requests: list[Submit]) -> None:
    """Every constrained output is a sentence of its grammar; nothing of a free one is touched by it."""
    for item, key in zip(requests, KEYS, strict=False):
        tokens, finish = served.text[item.request_id], served.finish[item.request_id][0]
        if key is not None:
            assert finish == STOP_EOS
            assert follows(key, tokens)
        else:
            assert finish in (STOP_EOS, LENGTH)
        if key is JSON:
            assert isinstance(json.loads(tokenizer().decode(tokens)), dict)


def test_greedy_outputs_follow_their_grammars_alike_with_and_without_drafts() -> None:
    requests = crowd()
    assert len(requests) > SLOTS
    plain, drafting = Served(), Served(shipped()[1])
    assert plain.run(*requests) == drafting.run(*requests)
    check(plain, requests)
    assert drafting.most > 2
    for served in (plain, drafting):
        figures = served.pipeline.figures()
        assert figures['dspark_grammar_terminations_total{outcome="complete"}'] == 6
        assert figures['dspark_grammar_batches_total{outcome="partial"}'] == 0
        assert figures['dspark_grammar_seconds_count{phase="wait"}'] > 5
        served.close()
    alone = Served()
    for item in requests[2:4]:
        assert alone.run(item)[item.request_id] == plain.text[item.request_id]
        alone.left.clear()
    alone.close()


@pytest.mark.parametrize("mode", ["cap-accept", "compact"])
def test_sampled_outputs_follow_their_grammars_whatever_is_verified(mode: str) -> None:
    served = Served(shipped()[1], mode)
    requests = crowd(temperature=1.3, top_p=0.95, frequency_penalty=0.4, logit_bias=((STOP, 2.0),))
    served.run(*requests)
    check(served, requests)
    served.close()


def test_sampled_outputs_follow_their_grammars(rank: Served) -> None:
    requests = crowd(temperature=1.0)[:8]
    rank.run(*requests)
    check(rank, requests)


def test_retraction_advances_no_matcher_again(rank: Served) -> None:
    """Prompts that fill their page, and too few pages for the outputs of all."""
    drafter = rank.runner.speculation.drafter if rank.runner.speculation else None
    text, keys = " ".join(["word"] * 400), (NUMBERS, TEXT, NUMBERS)
    requests = []
    for number, key in enumerate(keys, 1):
        item = submit(number, text, key, most=30)
        prompt = item.prompt[: 4 * (253 + number // 3)]
        requests.append(
            Submit(number, prompt, item.sampling, grammar_key=item.grammar_key, grammar=item.grammar)
        )
    wide = rank.run(*requests)
    tight = Served(drafter, full_pages=5)
    tight.rank.planner.ratio = 0  # Admits all at once, whatever they may come to need.
    assert tight.run(*requests) == wide
    assert tight.rank.planner.retracted[0] > 0
    for item, key in zip(requests, keys, strict=True):
        assert follows(key, wide[item.request_id])
    tight.close()


def test_an_abort_in_the_middle_changes_nobody_else(rank: Served) -> None:
    requests = crowd()
    for item in requests:
        rank.tell(SubmitBatch((item,)))
    rank.load()
    for number in range(3):
        rank.step()
        rank.tell(Abort(requests[2 * number].request_id))
    rank.drain()
    gone = {1, 3, 5}
    assert {number for number, end in rank.finish.items() if end[0] == ABORTED} == gone
    whole = Served()
    whole.run(*requests)
    for number, tokens in whole.text.items():
        assert rank.text.get(number, []) == tokens[: len(rank.text.get(number, []))]
        assert number in gone or rank.text[number] == tokens
    assert sorted(rank.left) == sorted(
        item.request_id for item, key in zip(requests, KEYS, strict=True) if key is not None
    )
    whole.close()


def test_a_request_waits_for_its_grammar_while_others_run(rank: Served) -> None:
    late, free = submit(1, "Say", WORDS), submit(2, "Count from one", None, most=8)
    rank.tell(SubmitBatch((late, free)))
    while rank.step():
        assert 1 not in rank.text
    assert rank.finish[2][0] in (LENGTH, STOP_EOS)
    assert rank.rank.state == "idle"
    rank.load()
    while rank.step():
        pass
    assert follows(WORDS, rank.text[1])


def test_a_minimum_that_the_grammar_cant_reach_fails_its_request_alone(rank: Served) -> None:
    requests = [
        submit(1, "Say", WORDS, min_new_tokens=20),
        submit(2, "Say", WORDS),
        submit(3, "Say", None, most=9),
    ]
    rank.run(*requests)
    assert rank.finish[1] == (FAILED, 500, NOTHING_ALLOWED)
    assert follows(WORDS, rank.text[2])
    assert len(rank.text[3]) <= 9


def test_the_end_of_a_grammar_ends_a_request_that_ignores_eos(rank: Served) -> None:
    item = submit(1, "Say", WORDS, ignore_eos=True, most=30)
    rank.run(item)
    assert rank.finish[1][0] == STOP_EOS
    assert follows(WORDS, rank.text[1])


def test_a_matcher_that_disagrees_fails_its_request_alone(rank: Served) -> None:
    requests = [submit(1, "Digits:", NUMBERS), submit(2, "Digits:", NUMBERS)]
    for item in requests:
        rank.tell(SubmitBatch((item,)))
    rank.load()
    rank.step()
    rank.step()
    thread = rank.pipeline._thread
    thread.lane.submit(thread._requests[1].advance, [5], 1.0).result()
    rank.drain()
    assert rank.finish[1][0] == FAILED
    assert rank.finish[1][2].startswith("GrammarDiverged: token 5")
    assert follows(NUMBERS, rank.text[2])


def test_a_request_that_was_never_given_a_matcher_fails_alone(rank: Served) -> None:
    from engine.messages import MatcherReady

    requests = [submit(1, "Digits:", NUMBERS), submit(2, "Digits:", NUMBERS)]
    for item in requests:
        rank.tell(SubmitBatch((item,)))
    del rank.wanted[1]
    rank.tell(MatcherReady(1))
    rank.load()
    while rank.step():
        pass
    assert rank.finish[1][0] == FAILED
    assert "no matcher" in rank.finish[1][2]
    assert follows(NUMBERS, rank.text[2])


def test_sampling_of_free_requests_is_as_without_any_grammar(rank: Served) -> None:
    item = submit(1, "Once upon a time", None, most=12)
    seeded = Submit(2, item.prompt, Sampling(12, temperature=0.9, seed=4))
    rank.run(item, seeded, submit(3, "Say", JSON))
    other = Served(rank.runner.speculation.drafter if rank.runner.speculation else None)
    other.run(item, seeded)
    assert {number: rank.text[number] for number in (1, 2)} == other.text
    other.close()
