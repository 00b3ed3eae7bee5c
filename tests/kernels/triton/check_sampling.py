"""Draws of whole and of cut rows against the plain code: the same tokens, and the same cut."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from engine.errors import ShapeMismatch
from engine.kernels.triton import draws, draws_numbers, logits, logits_best
from engine.messages import Sampling
from engine.runner import filters, logprobs, randomness
from tests.kernels.triton.cases import DEVICE
from tests.kernels.triton.sampling_cases import PADDING, Slots, normal_logits

MIX = [
    Sampling(64, temperature=0.0, seed=1),
    Sampling(64, seed=2),
    Sampling(64, seed=3, temperature=1.7),
    Sampling(64, seed=4, top_k=5),
    Sampling(64, seed=5, top_p=0.9, temperature=0.7),
    Sampling(64, seed=6, min_p=0.05),
    Sampling(64, seed=7, top_k=1),
    Sampling(64, seed=8, top_k=40, top_p=0.5, min_p=0.01),
    Sampling(64, seed=9, top_k=30, min_p=0.02),
    Sampling(64, seed=10, temperature=1e-30, top_k=4),
    Sampling(64, seed=11, top_p=1e-9),
    Sampling(64, seed=12, temperature=1e-6),
]
WIDE_MIX = [
    # More than are ranked by counting: these rows are searched.
    Sampling(64, seed=1, top_p=0.999, temperature=3.0),
    Sampling(64, seed=2, top_k=700, top_p=0.95, min_p=1e-4),
    Sampling(64, seed=3, min_p=1e-3, temperature=4.0),
    Sampling(64, seed=4, top_k=900, temperature=2.0),
]


@triton.jit
def _uniforms(keys, positions, out, WORD: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, draws_numbers.uniform(tl.load(keys + at), tl.load(positions + at), WORD))


def test_uniforms_have_the_bits_of_the_plain_code() -> None:
    keys = torch.randint(-(2**63), 2**63 - 1, (16,), device=DEVICE)
    positions = torch.arange(16, device=DEVICE) * 1_000_003
    for purpose, draw in ((randomness.Purpose.SAMPLE, 0), (randomness.Purpose.RESIDUAL, 6)):
        out = torch.empty(16, dtype=torch.float64, device=DEVICE)
        _uniforms[(1,)](keys, positions, out, int(purpose) | draw << 8, 16)
        assert torch.equal(out, randomness.uniforms(keys, positions, purpose, draw))


def test_tokens_are_those_of_the_plain_code() -> None:
    slots, rows = Slots(257, MIX), normal_logits(257, len(MIX), 257)
    before = rows.clone()
    out = slots.sample(rows)
    assert (out.tokens.tolist(), out.valid.tolist()) == slots.expect(rows)
    assert torch.equal(rows, before)
    assert torch.equal(out.best, rows.amax(1))


def test_rows_of_which_many_tokens_may_stay() -> None:
    slots, rows = Slots(1100, WIDE_MIX), normal_logits(0, len(WIDE_MIX), 1100)
    assert slots.sample(rows).tokens.tolist() == slots.expect(rows)[0]


def test_equal_logits_are_ranked_by_token() -> None:
    mix = [
        Sampling(64, temperature=0.0), Sampling(64, seed=1), Sampling(64, seed=2, top_k=6),
        Sampling(64, seed=3, top_p=0.5), Sampling(64, seed=4, top_k=3, top_p=0.7),
        Sampling(64, seed=5, min_p=0.5), Sampling(64, seed=6, top_k=515, top_p=0.9),
    ]  # fmt: skip
    flat = torch.zeros(len(mix), 520, device=DEVICE)
    few = normal_logits(1, len(mix), 300, scale=1.0).round()
    for rows in (few, flat):
        slots = Slots(rows.shape[1], mix)
        out = slots.sample(rows)
        assert out.tokens.tolist() == slots.expect(rows)[0]
    assert out.lasts[2] < 300, "six of several equal tokens stay"


def test_a_row_with_one_allowed_token_draws_it() -> None:
    mix = [MIX[0], MIX[1], MIX[3], MIX[10]]
    rows = torch.full((len(mix), 257), float("-inf"), device=DEVICE)
    rows[:, 256] = -3e38
    out = Slots(257, mix).sample(rows)
    assert out.valid.all()
    assert (out.tokens == 256).all()


def test_unfit_rows_and_padding_fail_alone() -> None:
    mix = [Sampling(64, seed=i, top_k=i) for i in range(6)]
    slots, rows = Slots(130, mix), normal_logits(3, 6, 130)
    wanted = slots.expect(rows)[0]
    rows[0], rows[1, 5], rows[2, 9] = float("-inf"), float("inf"), float("nan")
    out = slots.sample(rows, (*slots.numbers[:4], PADDING, slots.numbers[5]))
    assert out.valid.tolist() == [False, False, False, True, False, True]
    assert out.tokens.tolist() == [0, 0, 0, wanted[3], 0, wanted[5]]


@pytest.mark.parametrize("rows", [0, 1])
def test_few_rows(rows: int) -> None:
    slots = Slots(200, [MIX[5]] * rows)
    given = normal_logits(9, rows, 200)
    assert slots.sample(given).tokens.tolist() == (slots.expect(given)[0] if rows else [])


def test_a_row_does_not_depend_on_the_others() -> None:
    mix = [MIX[0], MIX[1], MIX[3], *[MIX[0]] * 14]
    slots, rows = Slots(260, mix), normal_logits(4, len(mix), 260)
    some = [1, 2, 16]
    alone = Slots(260, [mix[i] for i in some])
    alone.parameters.floats[1:] = slots.parameters.floats[[i + 1 for i in some]]
    alone.parameters.ints[1:] = slots.parameters.ints[[i + 1 for i in some]]
    alone.positions = tuple(slots.positions[i] for i in some)
    out, own = slots.sample(rows), alone.sample(rows[some].contiguous())
    assert torch.equal(own.tokens, out.tokens[some])
    assert torch.equal(own.totals, out.totals[some])


@pytest.mark.parametrize("columns", [300, 1100])
def test_the_cut_is_the_plain_one(columns: int) -> None:
    mix = [MIX[4], MIX[7], WIDE_MIX[2]] if columns < 1000 else WIDE_MIX[:2]
    slots, rows = Slots(columns, mix), normal_logits(5, len(mix), columns).mul(4).round().div(4)
    out = slots.sample(rows)
    floats, ints = slots.parameters.floats[1:], slots.parameters.ints[1:]
    weights = ((rows - rows.amax(1, keepdim=True)) / floats[:, :1]).exp()
    keys, token = weights.view(torch.int32), torch.arange(columns, device=DEVICE)
    # Logits are apart, so that weights are equal or far apart; their last bits are another exp's.
    ties = (keys - out.floors[:, None]).abs() < 8
    kept = torch.where(ties, token <= out.lasts[:, None], keys > out.floors[:, None])
    totals = filters.cut(weights, ints[:, 1], floats[:, 1], floats[:, 2], int(ints[:, 1].max()))
    assert torch.equal(kept, weights > 0)
    assert torch.allclose(out.totals, totals, rtol=1e-6)


@pytest.mark.parametrize(("count", "columns", "most"), [(3, 131, 5), (2, 300, 0), (1, 4, 4), (0, 9, 0)])
def test_log_probabilities_and_the_best_ones(count: int, columns: int, most: int) -> None:
    rows = normal_logits(columns, count, columns, scale=4.0)
    tokens = torch.arange(count, device=DEVICE)
    logprob, ids, values = logits_best.best_logprobs(rows, tokens, most)
    wanted = logprobs.token_logprobs(rows, tokens, [most] * count)
    assert torch.equal(ids, wanted.ids)
    assert torch.allclose(logprob, wanted.chosen, rtol=1e-5, atol=1e-5)
    assert torch.allclose(values, wanted.values, rtol=1e-5, atol=1e-5)


def test_equal_logits_come_by_token_among_the_best() -> None:
    rows = normal_logits(6, 2, 400).round()
    _, ids, _ = logits_best.best_logprobs(rows, torch.zeros(2, dtype=torch.int64, device=DEVICE), 12)
    assert torch.equal(ids, rows.sort(dim=1, descending=True, stable=True).indices[:, :12])


def test_columns_must_agree() -> None:
    rows, one = torch.zeros(2, 8, device=DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ShapeMismatch):
        logits.group_stats(rows, one, torch.zeros(1, 6, device=DEVICE))
    with pytest.raises(ShapeMismatch):
        draws.draw(rows, logits.group_stats(rows), one, one, rows, one)
    with pytest.raises(ShapeMismatch):
        logits_best.best_logprobs(rows, one, 3)
