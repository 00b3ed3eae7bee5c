"""Emitted tokens follow the target's exact distribution, whatever the draft, the cut or the processors."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.messages import Sampling
from engine.runner.acceptance import Acceptance
from engine.runner.acceptance_layout import VerifyRows
from tests.sampling.conftest import Bench
from tests.sampling.naive import distribution, processed
from tests.sampling.test_distributions import bound, chi_square
from tests.sampling.verifying import Toy

V, GAMMA, LENGTH = 5, 3, 3
SAMPLES = 100_000
BATCH = 20_000
PROMPT = (0,)


def table(seed: int, scale: float = 1.2) -> Tensor:
    return torch.randn(V, V, generator=torch.Generator().manual_seed(seed)) * scale


TARGET = table(1)
APART = torch.tensor([0.0, 0.0, 0.0, -200.0, -200.0])
DRAFTS = {
    "near": TARGET + table(2, 0.7),
    "same": TARGET,
    "far": table(3, 2.0),
    "sharp": table(4, 4.0),
}
CASES: dict[str, tuple[str, bool, bool, Sampling]] = {
    # draft, one-hot, cuts, parameters
    "plain": ("near", False, False, Sampling(8, seed=1)),
    "cuts": ("near", False, True, Sampling(8, seed=2)),
    "same": ("same", False, True, Sampling(8, seed=3)),
    "far": ("far", False, False, Sampling(8, seed=4)),
    "cold": ("near", False, True, Sampling(8, temperature=0.6, seed=5)),
    "hot": ("sharp", False, False, Sampling(8, temperature=1.7, seed=6)),
    "top_k": ("near", False, True, Sampling(8, top_k=3, seed=7)),
    "top_p": ("far", False, False, Sampling(8, top_p=0.7, seed=8)),
    "min_p": ("near", False, True, Sampling(8, min_p=0.25, seed=9)),
    "all": ("near", False, True, Sampling(8, temperature=1.4, top_k=4, top_p=0.9, min_p=0.05, seed=10)),
    "bias": ("near", False, False, Sampling(8, logit_bias=((3, 1.5), (1, -2.0)), seed=11)),
    "one_hot": ("near", True, False, Sampling(8, seed=12)),
    "one_hot_cut": ("near", True, True, Sampling(8, seed=13, top_p=0.8)),
}


def check(tokens: Tensor, toy: Toy, sampling: Sampling) -> None:
    """The joint distribution of all tokens, and that of each position."""
    length = tokens.shape[1]
    texts = toy.joint(sampling, PROMPT, length)
    codes = sum(tokens[:, place] * V ** (length - 1 - place) for place in range(length))
    assert isinstance(codes, Tensor)
    counts = torch.bincount(codes, minlength=V**length)
    assert all(p > 0 for count, p in zip(counts.tolist(), texts.values(), strict=True) if count)
    statistic, degrees = chi_square(counts, list(texts.values()))
    assert statistic < bound(degrees), f"joint: {statistic} with {degrees} degrees"
    for place in range(length):
        expected = [0.0] * V
        for text, share in texts.items():
            expected[text[place]] += share
        statistic, degrees = chi_square(torch.bincount(tokens[:, place], minlength=V), expected)
        assert statistic < bound(degrees), f"token {place}: {statistic} with {degrees} degrees"


def check_rate(first: Tensor, toy: Toy, sampling: Sampling) -> None:
    """The first draft is accepted as often as p and q overlap."""
    p = distribution(processed(toy.target[0].tolist(), sampling, PROMPT, (), (1,)), sampling)
    q = distribution(toy.draft[0].tolist(), Sampling(1, temperature=sampling.temperature))
    if toy.one_hot:
        q = [float(token == int(toy.draft[0].argmax())) for token in range(V)]
    rate = sum(map(min, p, q))
    spread = math.sqrt(rate * (1 - rate) / len(first))
    assert abs(float(first.double().mean()) - rate) <= 5 * spread + 1e-6


def follows(toy: Toy, sampling: Sampling, *, cut: bool) -> None:
    """Chains of the toy, in rounds, whole or cut at random, have its target's distribution."""
    bench = Bench(2, V)
    bench.bind(1, sampling, PROMPT)
    acceptance = Acceptance(bench.parameters, bench.counts)
    cuts = torch.Generator().manual_seed(1) if cut else None
    tokens, firsts = [], []
    for start in range(0, SAMPLES, BATCH):
        positions = [8 * chain for chain in range(start, start + BATCH)]
        found, first = toy.chains(acceptance, [1] * BATCH, positions, LENGTH if cut else 2, cuts)
        tokens.append(found)
        firsts.append(first)
    check(torch.cat(tokens), toy, sampling)
    if not cut:
        check_rate(torch.cat(firsts), toy, sampling)


@pytest.mark.parametrize("name", CASES)
def test_texts_follow_the_target(name: str) -> None:
    draft, one_hot, cut, sampling = CASES[name]
    follows(Toy(TARGET, DRAFTS[draft], GAMMA, one_hot), sampling, cut=cut)


@pytest.mark.parametrize("cut", [False, True])
def test_texts_of_a_grammar_follow_the_masked_target(cut: bool) -> None:
    """Drafts keep to the grammar, and what they are weighed by does, too; behind token 2 only 3 comes."""
    places = torch.arange(V)
    legal = (places[:, None] + places) % 3 != 1
    legal[2] = places == 3
    target, draft = (table.masked_fill(~legal, -math.inf) for table in (TARGET, DRAFTS["near"]))
    follows(Toy(target, draft, GAMMA), Sampling(8, temperature=0.9, seed=14), cut=cut)


@pytest.mark.parametrize("one_hot", [False, True])
def test_penalties_see_the_drafts_before_each_row(one_hot: bool) -> None:
    """Each chain has a slot of its own: what it emits changes what it may emit next."""
    sampling = Sampling(
        8, seed=5, repetition_penalty=1.4, frequency_penalty=0.8, presence_penalty=0.5, temperature=0.9
    )
    toy = Toy(TARGET, DRAFTS["near"], GAMMA, one_hot)
    slots = 2500
    bench = Bench(slots, V)
    for slot in range(slots):
        bench.bind(slot, sampling, PROMPT, child=slot)
    tokens = []
    for repeat in range(SAMPLES // slots):
        cuts = torch.Generator().manual_seed(repeat)
        acceptance = Acceptance(bench.parameters, copy.deepcopy(bench.counts))
        tokens.append(toy.chains(acceptance, range(slots), [8 * repeat] * slots, LENGTH, cuts)[0])
    check(torch.cat(tokens), toy, sampling)


def test_a_draft_apart_from_the_target_is_never_accepted() -> None:
    toy = Toy(TARGET + APART, DRAFTS["near"] - APART - 200.0, GAMMA)
    bench = Bench(2, V)
    sampling = Sampling(8, seed=3)
    bench.bind(1, sampling, PROMPT)
    positions = [8 * chain for chain in range(SAMPLES)]
    acceptance = Acceptance(bench.parameters, bench.counts)
    tokens, first = toy.chains(acceptance, [1] * SAMPLES, positions, 2, None)
    assert not bool(first.any())
    check(tokens, toy, sampling)


def test_sampled_chains_stay_exact_among_greedy_ones() -> None:
    bench = Bench(3, V)
    sampling = Sampling(8, seed=3, top_p=0.9)
    bench.bind(1, sampling, PROMPT)
    bench.bind(2, Sampling(8, temperature=0.0), PROMPT)
    toy = Toy(TARGET, DRAFTS["near"], GAMMA)
    slots = [2 if chain % 5 == 0 else 1 for chain in range(SAMPLES * 5 // 4)]
    acceptance = Acceptance(bench.parameters, bench.counts)
    cuts = torch.Generator().manual_seed(2)
    tokens, _ = toy.chains(acceptance, slots, [8 * chain for chain in range(len(slots))], LENGTH, cuts)
    greedy = torch.tensor(slots) == 2
    check(tokens[~greedy], toy, sampling)
    best = [int(TARGET[0].argmax())]
    while len(best) < LENGTH:
        best.append(int(TARGET[best[-1]].argmax()))
    assert bool((tokens[greedy] == torch.tensor(best)).all())


def test_a_cut_that_knows_a_discarded_draft_changes_nothing() -> None:
    """A schedule may look at drafts of earlier rounds; the next draft of the same position is a fresh one."""
    target = torch.tensor([0.7, 0.3]).log()
    draft = torch.zeros(2)
    bench = Bench(2, 2)
    bench.bind(1, Sampling(8, seed=3))
    acceptance = Acceptance(bench.parameters, bench.counts)
    slots = (1,) * SAMPLES
    starts = torch.arange(SAMPLES) * 8
    z = draft.expand(SAMPLES, 2)

    def block(positions: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        places = tuple(positions.tolist())
        choose = acceptance.choose(slots, places)
        return torch.stack((choose(0, z), choose(1, z)), 1), places

    old, _ = block(starts)
    new, places = block(starts + 1)
    lens = np.where(old[:, 1].numpy() == 0, 3, 1)
    rows = VerifyRows(slots, places, lens, new, z[:, None].expand(-1, 2, -1))
    found = acceptance.accept(target.expand(int(lens.sum()), 2), rows)
    statistic, degrees = chi_square(torch.bincount(found.tokens[:, 0], minlength=2), [0.7, 0.3])
    assert statistic < bound(degrees)
