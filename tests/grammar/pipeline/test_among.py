"""Tokens chosen by who reads masks itself are those chosen from logits that a mask has edited."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engine.messages import Sampling, SlotBind
from engine.runner.acceptance_layout import VerifyRows
from engine.runner.choices import PlainChoices
from engine.runner.edits import ChooseAmong, MaskWords
from engine.runner.parameters import SlotParameters
from engine.runner.sampling import Rows

CPU = torch.device("cpu")
V, GAMMA = 300, 3
SLOTS, POSITIONS = (1, 2, 3), (7, 8, 9)
GREEDY: dict[str, Any] = {"temperature": 0.0}
KINDS: dict[str, list[dict[str, Any]]] = {
    "greedy": [GREEDY] * 3,
    "sampled": [{"temperature": 1.0}] * 3,
    "mixed": [GREEDY, {"temperature": 0.7, "seed": 5}, {"temperature": 1.3}],
    "biased": [{**GREEDY, "logit_bias": ((3, 50.0), (4, 50.0))}] * 3,
    "early": [{**GREEDY, "min_new_tokens": 9}] * 3,
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def choices_of(kind: str) -> PlainChoices:
    made = PlainChoices(SlotParameters(5, V, [1], CPU))
    for slot, how in zip(SLOTS, KINDS[kind], strict=True):
        sampling = Sampling(20, **how)
        made.bind(SlotBind(slot, 1, slot, 0, sampling, 4, np.zeros(4, np.int32).tobytes()))
    return made


def words(seed: int, rows: list[int]) -> MaskWords:
    """A few tokens of each row, and all of its last one."""
    allowed = np.random.default_rng(seed).random((len(rows), 320)) < 0.1
    allowed[-1] = True
    bits = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
    return MaskWords(torch.from_numpy(bits), np.array(rows))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rows", [[0, 1, 2], [0, 2]])
def test_drafts_among_what_a_mask_allows(kind: str, seed: int, rows: list[int]) -> None:
    choose, mask = choices_of(kind).choose(SLOTS, POSITIONS), words(seed, rows)
    assert isinstance(choose, ChooseAmong)
    logits = torch.randn(3, V, generator=torch.Generator().manual_seed(seed))
    edited, kept = logits.clone(), logits.clone()
    mask(edited)
    assert torch.equal(choose.among(1, kept, mask), choose(1, edited.clone()))
    assert torch.equal(kept, logits if kind in ("greedy", "biased", "early") else edited)


@pytest.mark.parametrize("seed", range(4))
def test_verified_rows_among_what_a_mask_allows(kind: str, seed: int) -> None:
    """Against an edit that the acceptance can't read; some drafts are what the rows like best."""
    chance = torch.Generator().manual_seed(seed)
    widths, mask = np.array([4, 2, 3]), words(seed, [0, 1, 2, 3, 6, 7, 8])
    logits = torch.randn(9, V, generator=chance)
    edited = logits.clone()
    mask(edited)
    ids = torch.randint(V, (3, GAMMA), generator=chance)
    ids[0, :2], ids[2, :1] = edited[:2].argmax(1), edited[6:7].argmax(1)
    rows = VerifyRows(SLOTS, POSITIONS, widths, ids, None)
    kept = logits.clone()
    found = choices_of(kind).accept(kept, rows, mask)
    hidden = choices_of(kind)._acceptance.accept(logits, rows, lambda own: mask(own))
    for name in ("tokens", "counts", "valid"):
        assert torch.equal(getattr(found, name), getattr(hidden, name)), name
    assert torch.equal(kept, logits)


@pytest.mark.parametrize("seed", range(4))
def test_sampled_rows_among_what_a_mask_allows(kind: str, seed: int) -> None:
    logits, mask = torch.randn(3, V, generator=torch.Generator().manual_seed(seed)), words(seed, [0, 2])
    kept, rows = logits.clone(), Rows(SLOTS, POSITIONS)
    found = choices_of(kind).sample(kept, rows, mask)
    hidden = choices_of(kind)._sampler.sample(logits, rows, lambda own: mask(own))
    assert torch.equal(found.tokens, hidden.tokens)
    assert torch.equal(found.valid, hidden.valid)
    assert torch.equal(kept, logits)


def test_a_row_that_allows_nothing_fails_alone() -> None:
    nothing = MaskWords(torch.zeros(1, 10, dtype=torch.int32), np.array([1]))
    found = choices_of("greedy").sample(torch.ones(3, V), Rows(SLOTS, POSITIONS), nothing)
    assert found.valid.tolist() == [True, False, True]
    rows = VerifyRows(SLOTS, POSITIONS, np.ones(3, np.int64), torch.zeros(3, GAMMA, dtype=torch.int64), None)
    accepted = choices_of("greedy").accept(torch.ones(3, V), rows, nothing)
    assert accepted.valid.tolist() == [True, False, True]
    assert accepted.counts.tolist() == [1, 0, 1]
