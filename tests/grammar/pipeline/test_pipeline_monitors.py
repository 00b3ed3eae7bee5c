"""Each rule and monitor of the matchers' machine is broken by a planted fault: none of them is vacuous."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from engine.actors.core import Reply
from engine.actors.grammar_pipeline import (
    Arrived,
    Barrier,
    Began,
    Entered,
    GrammarPipeline,
    Kept,
    Leads,
    Left,
    Retained,
    Returned,
    Traversed,
)
from engine.errors import Unexpected
from engine.fsm.owners import SPECS
from engine.fsm.search import load_search
from tests.search.planting import explored

SEARCHES = {path.stem: load_search(path) for path in sorted((SPECS / "search").glob("masks-*.toml"))}


def nothing(self: Any, msg: Any) -> None:
    """Does nothing."""


def always(self: Any, msg: Any) -> bool:
    """Says yes."""
    return True


def never(self: Any, msg: Any) -> bool:
    """Says no."""
    return False


def pays_and_still_owes(self: GrammarPipeline, msg: Any) -> None:
    """The idempotence is lost: whoever comes second advances again."""
    for kept in self.owed:
        self.emit(Reply(kept.request, kept.tokens))
        self.stands[kept.request] = kept.first + len(kept.tokens)


def feeds_twice(self: GrammarPipeline, msg: Any) -> None:
    """Both paths at once."""
    for kept in self.owed:
        self.emit(Reply(kept.request, kept.tokens))
    self.stands |= {kept.request: kept.first + len(kept.tokens) for kept in self.owed}
    for kept in self.owed:
        self.emit(Reply(kept.request, kept.tokens))
    self.owed = ()


def forgets_what_is_owed(self: GrammarPipeline, msg: Any) -> None:
    """Counts tokens that no matcher gets."""
    self.stands |= {kept.request: kept.first + len(kept.tokens) for kept in self.owed}
    self.owed = ()


def moves_while_read(self: GrammarPipeline, msg: Traversed) -> bool:
    """A traversal that moves its matchers."""
    self.stands |= {request: self.stands[request] + 1 for request in self.requests}
    return True


def keeps_a_matcher(self: GrammarPipeline, msg: Left) -> None:
    """Forgets nobody."""


def walks_off(self: GrammarPipeline, msg: Leads) -> None:
    """Matchers that are counted where they walk to."""
    self.led, self.requests, self.anchors = msg.epoch, msg.requests, msg.anchors
    self.stands |= {request: self.stands[request] + 1 for request in msg.requests}


def pays_when_back(self: GrammarPipeline, msg: Leads) -> None:
    """Matchers walk ahead from where they stood before the last step's tokens."""
    if not isinstance(msg, Leads):
        PAY(self, msg)


PAY = GrammarPipeline.advance


def owes_to_strangers(self: GrammarPipeline, msg: Retained) -> None:
    """What is kept is owed one position later."""
    self.owing = msg.epoch
    self.owed = tuple(Kept(k.request, k.first + 1, k.tokens, k.ended) for k in msg.kept)
    self.requests = self.anchors = ()


def sees_an_end_at_once(self: GrammarPipeline, msg: Retained) -> None:
    """Notes the end of a grammar before its last tokens are paid."""
    self.owing, self.owed = msg.epoch, msg.kept
    self.over |= {kept.request for kept in msg.kept if kept.ended}
    self.requests = self.anchors = ()


FAULTS: list[tuple[str, str, Callable[..., Any], str]] = [
    ("masks-race", "advance", pays_and_still_owes, "I1"),
    ("masks-race", "advance", feeds_twice, "fed_in_order"),
    ("masks-race", "advance", forgets_what_is_owed, "read_matchers_have_every_token"),
    ("masks-race", "is_of_this_step", moves_while_read, "I1"),
    ("masks-race", "owe", owes_to_strangers, "GP1"),
    ("masks-race", "owe", sees_an_end_at_once, "I6"),
    ("masks-race", "lead", walks_off, "I1"),
    ("masks-race", "advance", pays_when_back, "I1"),
    ("masks-race", "leads_from_the_anchors", never, "Leads in resting"),
    ("masks-race", "is_owed", never, "every_kept_token_was_fed"),
    ("masks-race", "reaches_the_anchors", never, "Barrier in begun"),
    ("masks-requests", "leave", keeps_a_matcher, "nobody_is_left"),
    ("masks-requests", "enter", nothing, "Began in resting"),
]


@pytest.mark.parametrize(("search", "method", "fault", "monitor"), FAULTS)
def test_a_fault_is_noticed(
    search: str, method: str, fault: Callable[..., Any], monitor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GrammarPipeline, method, fault)
    assert monitor in explored(SEARCHES[search], monkeypatch).text


def test_masks_without_the_barrier_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """I1: the step's masks are made while tokens of the step before are still owed."""
    monkeypatch.setattr(GrammarPipeline, "reaches_the_anchors", always)
    advance = GrammarPipeline.advance

    def late(self: GrammarPipeline, msg: Any) -> None:
        if isinstance(msg, Arrived):
            advance(self, msg)

    monkeypatch.setattr(GrammarPipeline, "advance", late)
    assert "I1" in explored(SEARCHES["masks-race"], monkeypatch).text


def stepped(tokens: tuple[int, ...] = (7, 8)) -> GrammarPipeline:
    """One request; its first step keeps tokens behind the prompt of 4."""
    masks = GrammarPipeline()
    for msg in (Entered(1, 4), Began(1, (1,), (4,)), Barrier(1), Traversed(1)):
        assert not masks.receive(msg)
    masks.receive(Retained(1, (Kept(1, 4, tokens),)))
    return masks


def led() -> GrammarPipeline:
    """Its second step drafts."""
    masks = stepped()
    masks.receive(Leads(2, (1,), (6,)))
    return masks


def led_twice() -> GrammarPipeline:
    """Its second step has drafted."""
    masks = led()
    masks.receive(Returned(2))
    return masks


REFUSED: list[tuple[str, Callable[[], GrammarPipeline], object]] = [
    ("an unknown request", stepped, Began(2, (2,), (6,))),
    ("a request named twice", stepped, Began(2, (1, 1), (6, 6))),
    ("a step over again", stepped, Began(1, (1,), (6,))),
    ("drafts of an unknown request", stepped, Leads(2, (2,), (6,))),
    ("drafts from elsewhere", stepped, Leads(2, (1,), (5,))),
    ("drafts over again", led_twice, Leads(2, (1,), (6,))),
    ("the drafts of another step", led, Returned(1)),
    ("a request that leaves while its matcher walks", led, Left(1)),
]


@pytest.mark.parametrize(("what", "make", "msg"), REFUSED, ids=[one[0] for one in REFUSED])
def test_what_breaks_a_rule_is_refused(what: str, make: Callable[[], GrammarPipeline], msg: object) -> None:
    with pytest.raises(Unexpected):
        make().receive(msg)


@pytest.mark.parametrize("anchor", [4, 5, 7])
def test_anchors_that_tokens_in_question_dont_reach_are_refused(anchor: int) -> None:
    masks = stepped()
    masks.receive(Began(2, (1,), (anchor,)))
    with pytest.raises(Unexpected):
        masks.receive(Barrier(2))


def test_tokens_that_dont_follow_or_come_behind_an_end_are_refused() -> None:
    for kept in (Kept(1, 7, (9,)), Kept(1, 5, (9,)), Kept(2, 6, (9,)), Kept(1, 6, ())):
        masks = stepped()
        for msg in (Began(2, (1,), (6,)), Barrier(2), Traversed(2)):
            masks.receive(msg)
        with pytest.raises(Unexpected):
            masks.receive(Retained(2, (kept,)))
    over = GrammarPipeline()
    over.receive(Entered(1, 4))
    for msg in (Began(1, (1,), (4,)), Barrier(1), Traversed(1)):
        over.receive(msg)
    over.receive(Retained(1, (Kept(1, 4, (7,), ended=True),)))
    for msg in (Began(2, (1,), (5,)), Barrier(2), Traversed(2)):
        over.receive(msg)
    with pytest.raises(Unexpected):
        over.receive(Retained(2, (Kept(1, 5, (8,)),)))


def test_a_matcher_that_a_step_reads_stays() -> None:
    masks = stepped()
    masks.receive(Began(2, (1,), (6,)))
    with pytest.raises(Unexpected):
        masks.receive(Left(1))


@pytest.mark.parametrize("seed", range(20))
def test_racing_paths_feed_every_token_once(seed: int) -> None:
    """Result paths that are early, late, lost or doubled against the barrier of random steps."""
    rng = random.Random(seed)
    masks = GrammarPipeline()
    known = dict.fromkeys(range(3), 2)
    fed: dict[int, list[int]] = {request: [] for request in known}
    results: list[int] = []

    def tell(msg: object) -> None:
        for effect in masks.receive(msg):
            assert isinstance(effect, Reply)
            fed[effect.slot] += effect.value
        while results and rng.random() < 0.4:
            result = rng.choice(results)
            if rng.random() < 0.7:
                results.remove(result)
            for effect in masks.receive(Arrived(result)):
                assert isinstance(effect, Reply)
                fed[effect.slot] += effect.value

    for request in known:
        tell(Entered(request, 2))
    for epoch in range(1, 60):
        riders = tuple(sorted(rng.sample(range(3), rng.randint(1, 3))))
        tell(Began(epoch, riders, tuple(known[request] for request in riders)))
        tell(Barrier(epoch))
        assert all(2 + len(fed[request]) == known[request] for request in riders)
        tell(Traversed(epoch))
        kept = []
        for request in riders:
            first, count = known[request], rng.randint(0, 6)
            known[request] += count
            if count:
                kept.append(Kept(request, first, tuple(range(first, first + count))))
        results.append(epoch)
        tell(Retained(epoch, tuple(kept)))
    tell(Began(60, (0, 1, 2), tuple(known.values())))
    tell(Barrier(60))
    for request, tokens in fed.items():
        assert tokens == list(range(2, known[request]))
