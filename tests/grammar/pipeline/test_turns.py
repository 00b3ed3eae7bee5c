"""Drafts, masks and kept tokens of a step may be either thread's, each: matchers and masks are the same."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.grammar.matchers import Chain, Matcher, MatcherBatch
from engine.grammar.pipeline import Pipeline
from engine.grammar.pipeline_thread import MaskThread
from engine.messages import Sampling, SlotBind
from engine.model.draft import greedy
from engine.runner.masking import MaskGroups
from tests.grammar.pipeline.stage import CPU, JSON, NUMBERS, TEXT, matcher_of
from tests.grammar.pipeline.test_blocks import BLOCK
from tests.grammar.service.stage import STOP, WIDTH

PROMPT, STEPS = 3, 6
KEYS = (JSON, NUMBERS, TEXT)
SLOTS = np.arange(1, len(KEYS) + 1)


@pytest.fixture
def pipeline() -> Iterator[Pipeline]:
    made = Pipeline(WIDTH, [STOP], None, CPU, 5, BLOCK + 1, 10.0)
    yield made
    made.close()


class Twin:
    """A matcher that advances by itself, and which tokens it allows."""

    def __init__(self, matcher: Matcher) -> None:
        self.matcher = matcher
        self._batch = MatcherBatch(WIDTH, [STOP], BLOCK + 1)

    def allowed(self, drafts: list[int]) -> np.ndarray:
        found = self._batch.traverse([Chain(self.matcher, np.array([0, *drafts], np.int32))])
        return np.unpackbits(found.bitmask.view(np.uint8), axis=1, count=WIDTH, bitorder="little") == 1


class Stage:
    """Requests that draft at random, and twins of their matchers."""

    def __init__(self, pipeline: Pipeline, chance: np.random.Generator) -> None:
        self.pipeline, self.chance = pipeline, chance
        self.twins = [Twin(matcher_of(key)) for key in KEYS]
        self.own = [matcher_of(key) for key in KEYS]
        for slot, matcher in zip(SLOTS.tolist(), self.own, strict=True):
            pipeline.enter(slot, matcher, PROMPT, after_think=False)
            assert not pipeline.bind(SlotBind(slot, 1, slot, 0, Sampling(9), PROMPT, constrained=True))

    def step(self, epoch: int) -> None:
        """Others enter and leave between two parts, on the grammar thread as always."""
        behind = np.array([PROMPT + twin.matcher.tokens for twin in self.twins])
        drafts = self._drafted(epoch, behind)
        self.pipeline.enter(100 + epoch, matcher_of(TEXT), PROMPT, after_think=False)
        tokens = torch.cat([torch.zeros(len(KEYS), 1, dtype=torch.int64), drafts], 1)
        widths = self.chance.integers(1, BLOCK + 2, len(KEYS))
        self.pipeline.begin(epoch, epoch % 2, MaskGroups(SLOTS, behind, widths, tokens))
        self.pipeline.leave(100 + epoch)
        found = self.pipeline.finish(epoch)
        assert not found.failed
        logits = torch.zeros(int(widths.sum()), WIDTH)
        found.words(logits)
        rows = np.split(logits.numpy() == 0, np.cumsum(widths)[:-1])
        kept = map(self._kept, self.twins, rows, drafts.tolist())
        self.pipeline.retain(epoch, [*kept])

    def _drafted(self, epoch: int, behind: np.ndarray) -> Tensor:
        guide = self.pipeline.guide(epoch, SLOTS, behind)
        assert guide is not None
        pick = guide.guided(greedy)
        scores = torch.from_numpy(self.chance.random((BLOCK, len(KEYS), WIDTH), np.float32))
        return torch.stack([pick(k, scores[k]) for k in range(BLOCK)], 1)

    def _kept(self, twin: Twin, mask: np.ndarray, draft: list[int]) -> list[int]:
        assert np.array_equal(mask, twin.allowed(draft[: len(mask) - 1]))
        run = draft[: int(self.chance.integers(len(mask)))] or [int(mask[0].argmax())]
        return run[: twin.matcher.advance(run)[0]]


@pytest.mark.parametrize("seed", range(8))
def test_either_thread_may_do_each_part_of_a_step(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    chance = np.random.default_rng(seed)
    monkeypatch.setattr(MaskThread, "few", lambda *_: bool(chance.integers(2)))
    stage = Stage(pipeline, chance)
    for epoch in range(1, STEPS + 1):
        stage.step(epoch)
        if any(twin.matcher.terminated for twin in stage.twins):
            break
    pipeline.close()
    assert [one.tokens for one in stage.own] == [twin.matcher.tokens for twin in stage.twins]
