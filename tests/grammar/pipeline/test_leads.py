"""Drafts that keep to a grammar: matchers that walk ahead see what a traversal sees, and come back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.errors import GrammarDiverged, Unexpected
from engine.grammar import pipeline_thread
from engine.grammar.key import GrammarKey
from engine.grammar.leads import ANCHOR, Lead
from engine.grammar.matchers import DEAD, ENDED, FREE, MASKED, Chain, Matcher, MatcherBatch
from engine.grammar.pipeline import Pipeline
from engine.grammar.pipeline_request import Constrained
from engine.messages import Sampling, SlotBind
from engine.model.draft import greedy
from engine.runner.masking import MaskGroups
from tests.grammar.pipeline.stage import CPU, JSON, NUMBERS, TEXT, THINK_END, matcher_of, tokenizer
from tests.grammar.pipeline.test_blocks import ANY, BLOCK, LETTERS, letters
from tests.grammar.service.stage import STOP, WIDTH

END = tokenizer().control_ids[THINK_END]
A, B, C = letters()[:3]
WORDS = -(-WIDTH // 32)
STOPS = frozenset([STOP])
FREE_ROW = np.full(WORDS, -1, np.int32)
FREE_ROW[STOP >> 5] &= ~(1 << (STOP & 31))


def lead_of(matcher: Matcher, think_end: int | None = None, budget_s: float = 10.0) -> Lead:
    return Lead(Constrained(matcher, think_end), STOPS, FREE_ROW, budget_s)


def walked(lead: Lead, tokens: list[int]) -> tuple[np.ndarray, list[int]]:
    """Masks and kinds of the rows behind the anchor and these drafts."""
    masks = np.zeros((len(tokens) + 1, WORDS), np.int32)
    kinds = [lead.follow(token, masks, row) for row, token in enumerate([ANCHOR, *tokens])]
    lead.come_back()
    return masks, kinds


@pytest.mark.parametrize("key", [JSON, NUMBERS, TEXT], ids=lambda key: key.text[:20])
@pytest.mark.parametrize("seed", range(6))
def test_rows_ahead_are_those_of_a_traversal(key: GrammarKey, seed: int) -> None:
    """Legal tokens mostly, and at times one that isn't, or the end."""
    chance, matcher = np.random.default_rng(seed), matcher_of(key)
    batch = MatcherBatch(WIDTH, [STOP], BLOCK + 1)
    for _ in range(12):
        before, tokens = matcher.tokens, []
        for _ in range(BLOCK):
            legal = np.flatnonzero(
                np.unpackbits(walked(lead_of(matcher), tokens)[0][-1].view(np.uint8), bitorder="little")
            )
            tokens.append(int(chance.choice(legal)) if chance.random() < 0.9 else ANY)
        masks, kinds = walked(lead_of(matcher), tokens)
        found = batch.traverse([Chain(matcher, np.array([0, *tokens], np.int32))])
        assert kinds == found.kinds.tolist()
        assert np.array_equal(masks, found.bitmask)
        assert matcher.tokens == before
        kept = [token for token, kind in zip(tokens, kinds[1:], strict=True) if kind in (MASKED, ENDED)]
        if matcher.advance(kept[: int(chance.integers(1, BLOCK + 1))])[1]:
            break


def test_a_grammar_that_has_ended_restricts_nothing() -> None:
    matcher = matcher_of(LETTERS)
    matcher.advance([A, B, C, STOP])
    masks, kinds = walked(lead_of(matcher), [ANY, ANY])
    assert kinds == [ENDED, DEAD, DEAD]
    assert (masks == -1).all()


def test_a_reasoning_is_free_until_it_ends() -> None:
    masks, kinds = walked(lead_of(matcher_of(LETTERS), END), [ANY, END, A, C])
    assert kinds == [FREE, FREE, MASKED, MASKED, DEAD]
    assert np.array_equal(masks[0], FREE_ROW)
    # Behind the reasoning, and behind the first letter: "a", "ab" and "abc" are tokens, "bc" is none.
    assert np.bitwise_count(masks[2:4].view(np.uint32)).sum(1).tolist() == [3, 1]


def test_a_walk_that_is_slow_again_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows are within the budget, the third one overruns it and is forgiven; so with the next two."""
    fill, used_s = Matcher.fill, 0.0

    def slow(self: Matcher, masks: np.ndarray, row: int) -> None:
        nonlocal used_s
        used_s += 0.03
        fill(self, masks, row)

    monkeypatch.setattr(Matcher, "fill", slow)
    monkeypatch.setattr(time, "thread_time", lambda: used_s)
    matcher = matcher_of(TEXT)
    lead = lead_of(matcher, budget_s=0.05)
    assert walked(lead, [A] * 5)[1] == [MASKED, MASKED, MASKED, DEAD, DEAD, DEAD]
    assert lead.late
    assert matcher.advance([A, B]) == (2, False)


# ---- the pipeline's guide --------------------------------------------------------------------------


@pytest.fixture(params=["device", "thread"])
def pipeline(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pipeline]:
    """Slot 1 has LETTERS, slot 2 nothing, slot 3 NUMBERS; each stands behind three tokens.

    Masks are made by the device thread itself, or by the grammar thread.
    """
    if request.param == "thread":
        monkeypatch.setattr(pipeline_thread, "FEW", 0)
    found = Pipeline(WIDTH, [STOP], END, CPU, 5, BLOCK + 1, 10.0)
    for slot, key in ((1, LETTERS), (2, None), (3, NUMBERS)):
        if key is not None:
            found.enter(slot, matcher_of(key), 3, after_think=False)
        assert not found.bind(SlotBind(slot, 1, slot, 0, Sampling(9), 3, constrained=key is not None))
    yield found
    found.close()


SLOTS, ANCHORS = np.array([1, 2, 3]), np.array([3, 3, 3])


def drafted(pipeline: Pipeline, epoch: int, choose: Callable[[int, Tensor], Tensor] = greedy) -> Tensor:
    """Guided drafts of the three slots, from logits that like ANY best."""
    guide = pipeline.guide(epoch, SLOTS, ANCHORS)
    assert guide is not None
    z = torch.zeros(3, WIDTH)
    z[:, ANY] = 9.0
    pick = guide.guided(choose)
    return torch.stack([pick(k, z.clone()) for k in range(BLOCK)], 1)


def test_a_draft_keeps_to_its_grammar_and_others_are_free(pipeline: Pipeline) -> None:
    ids = drafted(pipeline, 1)
    assert ids[0, :4].tolist() == [A, B, C, STOP]
    assert ids[1].tolist() == [ANY] * BLOCK
    assert lead_kinds(NUMBERS, ids[2].tolist()) == [MASKED] * (BLOCK + 1)


def lead_kinds(key: GrammarKey, tokens: list[int]) -> list[int]:
    return walked(lead_of(matcher_of(key)), tokens)[1]


def test_rows_behind_a_grammars_end_are_worth_nothing(pipeline: Pipeline) -> None:
    guide = pipeline.guide(1, SLOTS, ANCHORS)
    assert guide is not None
    pick = guide.guided(greedy)
    drafted = torch.stack([pick(k, torch.zeros(3, WIDTH)) for k in range(BLOCK)], 1)
    assert drafted[0, :4].tolist() == [A, B, C, STOP]
    assert guide.worth().tolist() == [4, BLOCK + 1, BLOCK + 1]


def test_the_only_token_allowed_is_certain(pipeline: Pipeline) -> None:
    guide = pipeline.guide(1, SLOTS, ANCHORS)
    assert guide is not None
    pick = guide.guided(greedy)
    for k in range(BLOCK):
        pick(k, torch.zeros(3, WIDTH))
    assert guide.certain()[:2].tolist() == [[False, *[True] * 3, False], [False] * BLOCK]


def test_masks_of_a_step_are_those_of_its_drafts(pipeline: Pipeline) -> None:
    tokens = torch.cat([torch.zeros(3, 1, dtype=torch.int64), drafted(pipeline, 1)], 1)
    widths = np.array([5, BLOCK + 1, 3])
    pipeline.begin(1, 0, MaskGroups(SLOTS, ANCHORS, widths, tokens))
    found = pipeline.finish(1)
    logits = torch.zeros(int(widths.sum()), WIDTH)
    found.words(logits)
    batch = MatcherBatch(WIDTH, [STOP], 8)
    for key, row, first, width in ((LETTERS, 0, 0, 5), (NUMBERS, 2, 5 + BLOCK + 1, 3)):
        ids = tokens[row, :width].numpy().astype(np.int32)
        wanted = batch.traverse([Chain(matcher_of(key), ids)]).bitmask
        allowed = np.unpackbits(wanted.view(np.uint8), axis=1, count=WIDTH, bitorder="little")
        assert np.array_equal((logits[first : first + width] == 0).numpy(), allowed.astype(bool))
    assert (logits[5 : 5 + BLOCK + 1] == 0).all()
    assert found.most.tolist() == [4, 3]
    assert found.lengths.tolist() == [3, 3]


@pytest.mark.parametrize(("few", "path"), [(2, "device"), (1, "thread")])
def test_more_than_a_few_grammars_are_the_grammar_threads(
    few: int, path: str, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of the three slots have a grammar; nothing of a step is done on the other thread."""
    seen: set[str] = set()
    follow, advance = Lead.follow, Matcher.advance

    def followed(self: Lead, token: int, masks: np.ndarray, row: int) -> int:
        seen.add(threading.current_thread().name)
        return follow(self, token, masks, row)

    def advanced(self: Matcher, tokens: list[int]) -> tuple[int, bool]:
        seen.add(threading.current_thread().name)
        return advance(self, tokens)

    monkeypatch.setattr(pipeline_thread, "FEW", few)
    monkeypatch.setattr(Lead, "follow", followed)
    monkeypatch.setattr(Matcher, "advance", advanced)
    tokens = torch.cat([torch.zeros(3, 1, dtype=torch.int64), drafted(pipeline, 1)], 1)
    pipeline.begin(1, 0, MaskGroups(SLOTS, ANCHORS, np.full(3, 2), tokens))
    pipeline.finish(1)
    pipeline.retain(1, [tokens[row, 1:2].tolist() for row in (0, 2)])
    pipeline.close()
    assert seen == {threading.current_thread().name if path == "device" else "grammar masks"}
    assert pipeline.counters.paths == {"device": 0, "thread": 0} | {path: 1}


def test_what_was_not_drafted_is_not_verified(pipeline: Pipeline) -> None:
    tokens = torch.cat([torch.zeros(3, 1, dtype=torch.int64), drafted(pipeline, 1)], 1)
    tokens[0, 2] = ANY
    pipeline.begin(1, 0, MaskGroups(SLOTS, ANCHORS, np.array([4, 1, 1]), tokens))
    with pytest.raises(GrammarDiverged, match="verifies what it didn't draft"):
        pipeline.finish(1)


def test_a_fault_behind_the_last_draft_is_no_mask(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for the row behind the last draft while the draft is made."""
    follow = Lead.follow

    def broken(self: Lead, token: int, masks: np.ndarray, row: int) -> int:
        if row >= BLOCK * 5:
            raise ValueError(f"no row {row}")
        return follow(self, token, masks, row)

    monkeypatch.setattr(Lead, "follow", broken)
    tokens = torch.cat([torch.zeros(3, 1, dtype=torch.int64), drafted(pipeline, 1)], 1)
    pipeline.begin(1, 0, MaskGroups(SLOTS, ANCHORS, np.full(3, BLOCK + 1), tokens))
    with pytest.raises(ValueError, match=f"no row {BLOCK * 5}"):
        pipeline.finish(1)


@pytest.mark.parametrize("drafts", [False, True])
def test_what_a_job_raised_is_what_the_next_step_raises(pipeline: Pipeline, drafts: bool) -> None:
    """Not what follows from it: the order of the jobs is broken from there on."""

    def masked(epoch: int, length: int) -> None:
        groups = MaskGroups(
            SLOTS[:1], np.array([length]), np.array([1]), torch.zeros(0, 1, dtype=torch.int64)
        )
        pipeline.begin(epoch, 0, groups)
        pipeline.finish(epoch)

    for epoch, length, kept in ((0, 3, (A, B, C, STOP)), (1, 7, (ANY,))):
        masked(epoch, length)
        pipeline.retain(epoch, [kept])
    ask = partial(drafted, pipeline, 2) if drafts else partial(masked, 2, 8)
    with pytest.raises(Unexpected, match="Retained in ready"):
        ask()
