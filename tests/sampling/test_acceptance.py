"""Verification of drafts, number by number: against the plain rules, alone or together, cut or whole."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from torch import Tensor

from engine.errors import BadRequest, ShapeMismatch
from engine.messages import Sampling
from engine.runner.acceptance import Acceptance, Accepted
from engine.runner.acceptance_layout import VerifyRows
from engine.runner.sampling import Rows
from tests.sampling.conftest import Bench
from tests.sampling.verifying import Close, Group, emitted

GAMMA = 4
STOP_IDS = (1,)
SAMPLINGS = st.builds(
    Sampling,
    st.just(64),
    temperature=st.sampled_from((0.0, 0.5, 1.0, 1.6)),
    top_k=st.sampled_from((0, 0, 1, 3)),
    top_p=st.sampled_from((1.0, 1.0, 0.6)),
    min_p=st.sampled_from((0.0, 0.0, 0.2)),
    repetition_penalty=st.sampled_from((1.0, 1.5)),
    frequency_penalty=st.sampled_from((0.0, 0.9)),
    presence_penalty=st.sampled_from((0.0, -0.7)),
    min_new_tokens=st.sampled_from((0, 3)),
    stop_token_ids=st.sampled_from(((), (2,))),
    logit_bias=st.sampled_from(((), ((0, 1.5), (3, -2.0), (0, 0.5)))),
    seed=st.integers(-(2**40), 2**40),
)


def build(chance: random.Random, samplings: list[Sampling], vocab_size: int, one_hot: bool) -> list[Group]:
    """One group a request: drafts near the target, some of them impossible."""
    groups = []
    for sampling in samplings:
        rows = chance.randrange(GAMMA + 2)
        logits = [[chance.gauss(0, 1.5) for _ in range(vocab_size)] for _ in range(rows)]
        proposals = [[x + chance.gauss(0, 0.7) for x in row] for row in logits]
        proposals += [[0.0] * vocab_size] * (GAMMA - len(proposals))
        drafts = [
            max(range(vocab_size), key=lambda t, z=z: z[t] + chance.gauss(0, 0.8)) for z in proposals[:GAMMA]
        ]
        if chance.random() < 0.2:
            drafts[chance.randrange(GAMMA)] = chance.choice((-1, vocab_size))
        prompt = tuple(chance.randrange(vocab_size) for _ in range(chance.randrange(1, 5)))
        output = tuple(chance.randrange(vocab_size) for _ in range(chance.randrange(3)))
        kept = None if one_hot else [[float(np.float32(x)) for x in z] for z in proposals[:GAMMA]]
        exact = [[float(np.float32(x)) for x in row] for row in logits]
        groups.append(Group(sampling, prompt, output, exact, drafts, kept))
    return groups


def together(groups: list[Group], vocab_size: int) -> tuple[Bench, Tensor, VerifyRows]:
    """A bench with the groups bound to slots 0, 1, ..., and their one call."""
    bench = Bench(len(groups), vocab_size)
    for slot, group in enumerate(groups):
        bench.bind(slot, group.sampling, group.prompt, group.output)
    logits = torch.tensor([row for group in groups for row in group.logits]).view(-1, vocab_size)
    one_hot = groups[0].proposals is None
    rows = VerifyRows(
        tuple(range(len(groups))),
        tuple(len(group.prompt) + len(group.output) for group in groups),
        np.array([len(group.logits) for group in groups], np.int64),
        torch.tensor([group.drafts for group in groups]),
        None if one_hot else torch.tensor([group.proposals for group in groups]),
    )
    return bench, logits, rows


def texts(found: Accepted) -> list[list[int]]:
    """What each group emits."""
    return [row[:count] for row, count in zip(found.tokens.tolist(), found.counts.tolist(), strict=True)]


@given(
    seed=st.integers(0, 2**31),
    samplings=st.lists(SAMPLINGS, min_size=1, max_size=6),
    vocab_size=st.sampled_from((6, 40, 200)),
    one_hot=st.booleans(),
)
@settings(max_examples=120, deadline=None)
def test_every_group_emits_what_the_rules_say(
    seed: int, samplings: list[Sampling], vocab_size: int, one_hot: bool
) -> None:
    groups = build(random.Random(seed), samplings, vocab_size, one_hot)
    bench, logits, rows = together(groups, vocab_size)
    before, counted = logits.clone(), bench.counts.output.clone()
    found = Acceptance(bench.parameters, bench.counts).accept(logits, rows)
    assert torch.equal(logits, before), "the model's own logits are what logprobs are computed from"
    assert bool(found.valid.all())
    for slot, (group, text) in enumerate(zip(groups, texts(found), strict=True)):
        assert not found.tokens[slot, len(text) :].any()
        grown = torch.bincount(torch.tensor(text, dtype=torch.int64), minlength=vocab_size)
        if bench.parameters.of(slot).penalised:
            assert torch.equal(bench.counts.output[slot] - counted[slot], grown.to(torch.int32))
        try:
            expected = emitted(group, STOP_IDS) if group.logits else []
        except Close:
            continue
        assert text == expected


MIX = [
    Sampling(64, temperature=0.0),
    Sampling(64, seed=1),
    Sampling(64, seed=2, top_k=5),
    Sampling(64, seed=3, top_p=0.9, temperature=0.7),
    Sampling(64, seed=4, min_p=0.05, presence_penalty=0.5),
    Sampling(64, seed=5, repetition_penalty=1.2, logit_bias=((9, 3.0),)),
    Sampling(64, temperature=0.0, frequency_penalty=0.6, min_new_tokens=6),
]


def mixed_groups(seed: int, vocab_size: int, one_hot: bool, count: int = 21) -> list[Group]:
    """Groups whose drafts are likely by target and draft, so that runs of all lengths come about."""
    samplings = [structs.replace(MIX[i % len(MIX)], seed=i) for i in range(count)]
    groups = build(random.Random(seed), samplings, vocab_size, one_hot)
    for group in groups:
        for row, draft in enumerate(group.drafts):
            if row < len(group.logits) and 0 <= draft < vocab_size:
                group.logits[row][draft] += math.log(vocab_size) + 2
            if group.proposals and 0 <= draft < vocab_size:
                group.proposals[row] = list(group.proposals[row])
                group.proposals[row][draft] += math.log(vocab_size) + 1
    return groups


@pytest.mark.parametrize("vocab_size", [64, 8192])
@pytest.mark.parametrize("one_hot", [False, True])
def test_a_group_emits_the_same_whatever_shares_its_batch(vocab_size: int, one_hot: bool) -> None:
    groups = mixed_groups(7, vocab_size, one_hot)
    bench, logits, rows = together(groups, vocab_size)
    whole = texts(Acceptance(bench.parameters, bench.counts).accept(logits, rows))
    again, _, _ = together(groups, vocab_size)
    acceptance = Acceptance(again.parameters, again.counts)
    ends = np.cumsum(rows.verify_lens)
    alone = []
    for index in range(len(groups)):
        own = logits[ends[index] - rows.verify_lens[index] : ends[index]]
        alone += texts(acceptance.accept(own, rows.only(index)))
    assert whole == alone
    assert torch.equal(bench.counts.output, again.counts.output)
    assert len({len(text) for text in whole}) > 3, "runs of all lengths are compared"


@pytest.mark.parametrize("one_hot", [False, True])
def test_a_cut_shortens_a_run_and_changes_nothing_before_it(one_hot: bool) -> None:
    groups = mixed_groups(8, 64, one_hot, 40)
    chance, shortened = random.Random(3), 0
    cut = [replace(group, logits=group.logits[: chance.randrange(GAMMA + 2)]) for group in groups]
    runs = []
    for some in (groups, cut):
        bench, logits, rows = together(some, 64)
        runs.append(texts(Acceptance(bench.parameters, bench.counts).accept(logits, rows)))
    for whole, part, group in zip(*runs, cut, strict=True):
        if len(whole) <= len(group.logits) - 1:
            assert part == whole
        elif group.logits and len(whole) > len(group.logits):
            assert part[:-1] == whole[: len(group.logits) - 1]
            shortened += 1
    assert shortened > 5


def test_a_group_of_one_row_draws_what_plain_decoding_draws() -> None:
    groups = [replace(group, logits=(group.logits * 2)[:1]) for group in mixed_groups(9, 64, False, 60)]
    groups = [group for group in groups if group.logits]
    bench, logits, rows = together(groups, 64)
    found = Acceptance(bench.parameters, bench.counts).accept(logits, rows)
    plain, _, _ = together(groups, 64)
    assert (
        found.tokens[:, 0].tolist()
        == plain.sampler.sample(logits, Rows(rows.slots, rows.positions)).tokens.tolist()
    )
    assert torch.equal(bench.counts.output, plain.counts.output)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("one_hot", [False, True])
def test_a_group_with_a_bad_row_fails_alone(poison: float, one_hot: bool) -> None:
    groups = [group for group in mixed_groups(10, 64, one_hot) if group.logits]
    bench, logits, rows = together(groups, 64)
    good = texts(Acceptance(bench.parameters, bench.counts).accept(logits, rows))
    firsts = np.cumsum(rows.verify_lens) - rows.verify_lens
    for bad in range(len(groups)):
        bench, _, _ = together(groups, 64)
        broken = logits.clone()
        if poison < 0:
            broken[firsts[bad]] = poison
        else:
            broken[firsts[bad], 17] = poison
        found = Acceptance(bench.parameters, bench.counts).accept(broken, rows)
        assert found.valid.tolist() == [group != bad for group in range(len(groups))]
        assert texts(found) == [[] if group == bad else text for group, text in enumerate(good)]
        assert not bench.counts.output[bad].sum() - sum(map(len, [groups[bad].output])) * int(
            bench.parameters.of(bad).penalised
        )


def test_a_broken_draft_row_is_rejected_and_the_target_decides() -> None:
    """Drafts are only advice: NaN in their logits costs acceptance, not the request."""
    bench = Bench(1, 64)
    bench.bind(0, Sampling(64, seed=3))
    logits = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    drafts = torch.full((1, 2, 64), math.nan)
    rows = VerifyRows((0,), (5,), np.array([3]), torch.tensor([[4, 5]]), drafts)
    found = Acceptance(bench.parameters, bench.counts).accept(logits, rows)
    assert (found.counts.tolist(), found.valid.tolist()) == ([1], [True])


def test_a_mask_holds_row_by_row_and_rows_behind_a_forbidden_draft_do_not_matter() -> None:
    groups = [group for group in mixed_groups(11, 64, False, 60) if len(group.logits) == GAMMA + 1]
    groups = [replace(group, drafts=[2, 4, 5, 6]) for group in groups]
    bench, logits, rows = together(groups, 64)

    def only_even(rows: Tensor) -> None:
        rows[:, 1::2] = -math.inf
        # The row behind draft 5, which is odd, is unreachable: the grammar has no state there.
        rows.view(-1, GAMMA + 1, 64)[:, 3:] = -math.inf

    assert rows.draft_logits is not None
    rows.draft_logits[:, torch.arange(GAMMA), torch.tensor([2, 4, 5, 6])] += 8.0
    logits.view(-1, GAMMA + 1, 64)[:, torch.arange(GAMMA), torch.tensor([2, 4, 5, 6])] += 4.0
    found = Acceptance(bench.parameters, bench.counts).accept(logits, rows, only_even)
    assert bool(found.valid.all())
    assert int(found.counts.max()) == 3
    assert bool((found.tokens % 2 == 0).all())


def test_drafts_of_a_request_depend_on_its_round_alone(wide_bench: Bench) -> None:
    for slot, sampling in enumerate(MIX):
        wide_bench.bind(slot, sampling)
    acceptance = Acceptance(wide_bench.parameters, wide_bench.counts)
    z = torch.randn(7, 8192, generator=torch.Generator().manual_seed(1))
    all_slots = acceptance.choose(range(7), [9] * 7)
    picks = [all_slots(k, z) for k in range(3)]
    for slot in range(7):
        alone = acceptance.choose([slot], [9])
        assert [int(alone(k, z[slot : slot + 1])) for k in range(3)] == [int(pick[slot]) for pick in picks]
    assert picks[0][0] == picks[1][0] == z[0].argmax()
    assert sum(int(picks[0][slot] != picks[1][slot]) for slot in range(1, 6)) >= 4
    later = acceptance.choose(range(7), [10] * 7)(0, z)
    assert sum(int(later[slot] != picks[1][slot]) for slot in range(1, 6)) >= 4


def test_a_sharper_draft_is_chosen_by_the_request_temperature_alone(bench: Bench) -> None:
    """Top-k does not cut the draft, a temperature near zero makes it greedy."""
    bench.bind(0, Sampling(8, top_k=2, temperature=50.0, seed=1))
    bench.bind(1, Sampling(8, temperature=1e-6, seed=1))
    acceptance = Acceptance(bench.parameters, bench.counts)
    z = torch.randn(1, 64, generator=torch.Generator().manual_seed(1))
    hot = {int(acceptance.choose([0], [p])(0, z)) for p in range(200)}
    cold = {int(acceptance.choose([1], [p])(0, z)) for p in range(200)}
    assert len(hot) > 40
    assert cold == {int(z.argmax())}


def test_no_rows_emit_nothing_and_wrong_shapes_are_refused(bench: Bench) -> None:
    bench.bind(0, Sampling(8, seed=1))
    acceptance = Acceptance(bench.parameters, bench.counts)
    nothing = np.zeros(0, np.int64)
    ids, empty = torch.zeros(1, 3, dtype=torch.int64), torch.zeros(0, 64)
    found = acceptance.accept(empty, VerifyRows((), (), nothing, ids[:0], None))
    assert found.tokens.shape == (0, 4)
    found = acceptance.accept(empty, VerifyRows((0,), (5,), np.array([0]), ids, None))
    assert (found.tokens.tolist(), found.counts.tolist(), found.valid.tolist()) == ([[0] * 4], [0], [True])
    with pytest.raises(ShapeMismatch, match="2 rows to verify, 0 rows of logits"):
        acceptance.accept(empty, VerifyRows((0,), (5,), np.array([2]), ids, None))
    with pytest.raises(ShapeMismatch, match=r"verify_lens 0 \.\. 5 with 3"):
        acceptance.accept(torch.zeros(5, 64), VerifyRows((0,), (5,), np.array([5]), ids, None))
    wrong = torch.zeros(1, 2, 64)
    with pytest.raises(ShapeMismatch, match="draft logits"):
        acceptance.accept(torch.zeros(1, 64), VerifyRows((0,), (5,), np.array([1]), ids, wrong))
    with pytest.raises(BadRequest, match="slot 7 is sampled before it is bound"):
        acceptance.accept(torch.zeros(1, 64), VerifyRows((7,), (5,), np.array([1]), ids, None))
