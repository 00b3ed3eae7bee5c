"""Rounds of several tokens on their way to a client: stop strings, usage, metrics."""

from __future__ import annotations

import dataclasses

import msgspec
import orjson
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from api.chat_answer import ChatAnswer
from api.completions_answer import CompletionAnswer, CompletionPlan
from api.generate_answer import GenerateAnswer, GeneratePlan, Item
from api.intake import Prompt
from engine.config import Settings
from engine.messages import LENGTH, STOP_STRING, Abort, Delta, Tick
from engine.rank_metrics import COUNTERS, FIGURE, GAUGES, RankMetrics
from tests.api.stage import TOKENIZER, served
from tests.api.test_chat_answer import plan
from tests.api.test_detok import Listener, step
from tests.machines.harness import submit_of
from tests.machines.rounds import answer, begun, drafting

SERVED = served(Settings())
PROMPT = Prompt(ids=(5, 6), text="ab")


def test_a_stop_string_within_a_round_cuts_it_and_all_that_is_on_its_way_is_dropped() -> None:
    listener = Listener()
    listener.watch(stop=("lo w",))
    listener.feed(b"ye")
    listener.feed(b"lo world")
    listener.feed(b"s and")
    listener.feed(b" more", LENGTH)
    assert listener.text() == "ye"
    last = listener.last()
    assert (last.finish, bytes(last.token_ids)) == (STOP_STRING, b"lo w")
    assert [effect.msg for effect in listener.others if isinstance(effect.msg, Abort)] == [
        Abort(1, STOP_STRING)
    ]


def test_a_stop_string_before_the_length_limit_of_the_same_round_wins() -> None:
    listener = Listener()
    listener.watch(stop=("b",))
    listener.feed(b"abcd", LENGTH)
    assert (listener.text(), listener.last().finish, listener.last().matched) == ("a", STOP_STRING, "b")


def test_a_terminal_event_says_what_became_of_the_requests_drafts() -> None:
    listener = Listener()
    listener.watch()
    for verified, accepted, finish in ((3, 2, 0), (0, 0, 0), (2, 0, LENGTH)):
        said = step({1: (b"x" * (accepted + 1), finish)})
        listener.receive(
            msgspec.structs.replace(said, verified=bytes([verified]), accepted=bytes([accepted]))
        )
    assert [delta.drafts for delta in listener.deltas[1]] == [(0, 0, 0), (0, 0, 0), (2, 5, 2)]


@pytest.mark.parametrize("asked", [False, True])
def test_usage_tells_of_drafts_where_it_is_asked_to(asked: bool) -> None:
    delta = Delta(1, 1, "hi", (7, 8, 9), finish=LENGTH, drafts=(2, 5, 2))
    completion = CompletionPlan(
        rid="r",
        prompts=(PROMPT,),
        prompt_tokens=2,
        created=0,
        echo=False,
        logprobs=False,
        with_usage=False,
        continuous=False,
        with_drafts=asked,
    )
    chat = ChatAnswer(dataclasses.replace(plan(False, 0, True), with_drafts=asked), 2, SERVED)
    for one in (CompletionAnswer(completion, SERVED), chat):
        one.note(0, delta)
        usage = one.whole()["usage"]
        details = {"accepted_prediction_tokens": 2, "rejected_prediction_tokens": 3}
        assert usage.get("completion_tokens_details") == (details if asked else None)


@pytest.mark.parametrize("asked", [False, True])
def test_meta_info_tells_of_drafts_where_it_is_asked_to(asked: bool) -> None:
    how = GeneratePlan(
        items=(Item("r", PROMPT),),
        single=True,
        logprobs=False,
        top=False,
        prompt_from=-1,
        texts=False,
        drafts=asked,
        received_s=0.0,
        wall_s=lambda: 1.0,
    )
    one = GenerateAnswer(how, TOKENIZER, (0,))
    body = orjson.loads(one.gain(0, Delta(1, 1, "hi", (7,), finish=LENGTH, drafts=(2, 5, 2)))[0])
    shown = {name: value for name, value in body["meta_info"].items() if name.startswith("spec_")}
    names = ("spec_verify_ct", "spec_draft_token_num", "spec_accept_token_num")
    assert shown == (dict(zip(names, (2, 5, 2), strict=True)) if asked else {})


def test_every_figure_of_a_drafting_rank_is_a_series_that_exists_from_the_start() -> None:
    h = drafting()
    registry = CollectorRegistry()
    metrics = RankMetrics(registry, "engine_", "m", 1, 1500)
    before = generate_latest(registry).decode()
    begun(h, submit_of(1, 4, 40))
    answer(h, [[8, 8, 8, 8]], [8])
    h.tell(Tick(1.0, 1.0))
    (snapshot,) = h.snapshots
    for key in snapshot.counters:
        found = FIGURE.fullmatch(key)
        assert found is not None
        assert found["name"] in GAUGES or found["name"] in COUNTERS, key
    metrics.note(snapshot)
    after = generate_latest(registry).decode()
    series = [{line.rpartition(" ")[0] for line in text.splitlines()} for text in (before, after)]
    assert series[0] == series[1]
    assert 'engine_spec_accepted_tokens_total{dp_rank="0"' in after
    assert any(
        line.startswith("engine_spec_accepted_tokens_total{") and line.endswith(" 3.0")
        for line in after.splitlines()
    )
