"""Matchers that are slow: once in a while it is forgiven, else it fails their requests and no others."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest
import torch

from engine.grammar import matchers
from engine.grammar.key import GrammarKey
from engine.grammar.matchers import Matcher, MatcherBatch
from engine.grammar.pipeline import Pipeline
from engine.grammar.pipeline_request import FORGETS, Constrained
from tests.grammar.pipeline.stage import matcher_of
from tests.grammar.pipeline.test_blocks import LETTERS, STOP, A, B, C, Steps

ENDLESS = GrammarKey("ebnf", r'root ::= "a"* "b"')


@pytest.fixture
def steps() -> Iterator[Steps]:
    found = Steps()
    yield found
    found.pipeline.close()


def test_a_slow_matcher_fails_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's call is real; what takes the processor is work in front of it, as a hard grammar would.

    The other request's thread waits as long without a processor, which nobody is failed for.
    """
    monkeypatch.setattr(matchers, "PATIENCE", 2_000)
    steps = Steps(budget_s=0.05)
    slow, _ = steps.enter(1, LETTERS), steps.enter(2, LETTERS)
    advance = Matcher.advance

    def work(self: Matcher, tokens: list[int]) -> tuple[int, bool]:
        if self is not slow:
            time.sleep(0.1)
            return advance(self, tokens)
        ends_s = time.thread_time() + 0.1
        while time.thread_time() < ends_s:
            pass
        return advance(self, tokens)

    monkeypatch.setattr(Matcher, "advance", work)
    steps.masks((1, [A]), (2, [A]))
    steps.keep((1, [A]), (2, [A]))
    # Once it is forgiven: the host may have stood still.
    assert not steps.masks((1, [B]), (2, [B]))[0].failed
    steps.keep((1, [B]), (2, [B]))
    found, rows = steps.masks((1, [C]), (2, [C]))
    assert re.match(r"GrammarTooSlow: 1 tokens of the grammar took \d{3,} ms", found.failed[0])
    assert set(found.failed) == {0}
    assert rows == [[], [], [C], [STOP]]
    steps.keep((1, []), (2, [C]))
    assert steps.masks((2, []))[1] == [[STOP]]
    steps.pipeline.close()


@pytest.mark.parametrize(("tokens", "fails"), [(FORGETS - 1, True), (FORGETS, False)])
def test_an_overrun_is_forgiven_once_in_a_while(tokens: int, fails: bool) -> None:
    request = Constrained(matcher_of(ENDLESS), None)
    assert not request.overruns()
    request.advance([A] * tokens, 10.0)
    assert request.overruns() == fails


def in_time(monkeypatch: pytest.MonkeyPatch, *answers: bool) -> list[bool]:
    """Whether each traversal of a request is within its budget; returns what is left of the answers."""
    left, traversed = [*answers], MatcherBatch._traversed
    monkeypatch.setattr(MatcherBatch, "_traversed", lambda *args: left.pop(0) and traversed(*args))
    return left


def test_a_traversal_that_overruns_its_budget_once_is_made_again(
    steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step without drafts before it, whose rows are masked by one traversal."""
    in_time(monkeypatch, False, True, False)
    steps.enter(1, LETTERS)
    found, rows = steps.masks((1, [A]))
    assert not found.failed
    assert rows == [[A], [B]]
    steps.keep((1, [A]))
    assert steps.masks((1, [B]))[0].failed[0].startswith("GrammarTooSlow")


def test_a_request_that_is_forgiven_changes_nothing_for_others(
    steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only its own rows are made again, and who overran twice fails beside it."""
    left = in_time(monkeypatch, True, False, True, False, False, True)
    steps.enter(1, LETTERS), steps.enter(2, LETTERS)
    found, rows = steps.masks((1, [A]), (2, [A, B]))
    assert not found.failed
    assert rows == [[A], [B], [A], [B], [C]]
    assert len(left) == 3
    steps.keep((1, [A]), (2, [A]))
    found, rows = steps.masks((1, [B]), (2, [B]))
    assert set(found.failed) == {1}
    assert rows == [[B], [C], [], []]
    assert not left


def test_a_large_vocabulary_has_a_budget_for_a_block_whose_tokens_are_all_tried() -> None:
    small, large = (Pipeline(size, [1], None, torch.device("cpu"), 2, 6) for size in (8192, 129_280))
    try:
        assert small._thread._budget_s == 0.05
        assert large._thread._budget_s > 6 * 0.09
    finally:
        small.close()
        large.close()
