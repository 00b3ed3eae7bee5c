"""Parts of the model against their definitions."""

from __future__ import annotations

import math

import pytest
import torch

from engine.model.compressor import started
from engine.model.fields import Yarn
from engine.model.invariant import TileOps
from engine.model.keys import Keys
from engine.model.ops import TorchOps
from engine.model.rope import frequencies, turns
from engine.model.rounding import fp4_rounded, fp8_rounded, hadamard
from engine.model.weights import MhcWeights

OPS = [TorchOps(), TileOps()]


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(11)


@pytest.mark.parametrize("ops", OPS)
def test_rotation_turns_neighbouring_pairs_of_the_last_channels(ops):
    x = torch.randn(5, 3, 24)
    angle = turns(torch.arange(5), frequencies(8, 10000.0, None))
    rotated = x.clone()
    ops.rotate(rotated, angle)
    assert torch.equal(rotated[..., :16], x[..., :16])
    for pair in range(4):
        theta = torch.arange(5).view(5, 1) * 10000.0 ** (-2 * pair / 8)
        first, second = x[..., 16 + 2 * pair], x[..., 17 + 2 * pair]
        assert torch.allclose(
            rotated[..., 16 + 2 * pair], first * theta.cos() - second * theta.sin(), atol=1e-6
        )
        assert torch.allclose(
            rotated[..., 17 + 2 * pair], first * theta.sin() + second * theta.cos(), atol=1e-6
        )


def test_a_rotation_and_its_inverse_cancel():
    x = torch.randn(40, 3, 24)
    angle = turns(torch.arange(0, 400000, 10000), frequencies(8, 160000.0, None))
    rotated = x.clone()
    TorchOps().rotate(rotated, angle)
    TorchOps().rotate(rotated, angle.conj().resolve_conj())
    assert torch.allclose(rotated, x, atol=1e-5)


def test_yarn_leaves_fast_pairs_and_stretches_slow_ones_sixteenfold():
    """The released table: pairs up to 15 as they are, from 25 on divided by 16, a ramp between."""
    plain = frequencies(64, 160000.0, None)
    stretched = frequencies(64, 160000.0, Yarn(16.0, 32.0, 1.0, 65536))
    assert torch.equal(stretched[:16], plain[:16])
    assert torch.allclose(stretched[25:], plain[25:] / 16)
    ratio = (plain / stretched)[15:26]
    assert bool((ratio[1:] > ratio[:-1]).all())
    assert math.isclose(float(plain[1]), 160000.0 ** (-2 / 64), rel_tol=1e-6)


@pytest.mark.parametrize("ops", OPS)
def test_the_mixing_matrix_is_doubly_stochastic_and_not_symmetric(ops):
    weights = MhcWeights(torch.randn(24, 4 * 16) * 0.1, torch.randn(24), torch.ones(24), torch.ones(16))
    _, post, comb = ops.mhc_pre(torch.randn(37, 4, 16), weights, 20, 1e-6, 1e-6)
    assert (comb.sum(1) - 1).abs().max() < 1e-5
    assert (comb.sum(2) - 1).abs().max() < 1e-3
    assert (comb - comb.transpose(1, 2)).abs().max() > 0.1
    assert bool(((post > 0) & (post < 2)).all())


@pytest.mark.parametrize("ops", OPS)
def test_the_online_c128_state_equals_the_batch_softmax(ops):
    """Folded in pieces of any size, after whatever the slot held before."""
    rows = torch.randn(3, 128, 2 * 32)
    rows[..., 32:] *= 4
    state = started(torch.full((3, 3, 32), torch.nan), torch.ones(3, dtype=torch.bool))
    at = 0
    for size in (1, 1, 5, 8, 100, 13):
        valid = torch.ones(3, size, dtype=torch.bool)
        state = ops.fold(state, rows[:, at : at + size], valid)
        at += size
    expected = (rows[..., 32:].softmax(1) * rows[..., :32]).sum(1)
    assert (state[:, 2] / state[:, 1] - expected).abs().max() < 2e-6


@pytest.mark.parametrize("ops", OPS)
def test_folding_nothing_changes_no_bit(ops):
    state = torch.randn(5, 3, 32).exp()
    assert torch.equal(ops.fold(state, torch.randn(5, 8, 64), torch.zeros(5, 8, dtype=torch.bool)), state)


@pytest.mark.parametrize("ops", OPS)
def test_attention_without_any_key_is_zero_and_a_huge_sink_is_finite(ops):
    """The sink takes a share of the weight and gives no value."""
    pool, q = torch.randn(40, 16), torch.randn(6, 1, 4, 16)
    rows = torch.randint(1, 40, (6, 7))
    unseen = Keys(pool, rows, torch.full((6, 1, 7), -torch.inf))
    assert torch.equal(ops.attend(q, unseen, None, torch.randn(4)), torch.zeros_like(q))
    seen = Keys(pool, rows, torch.zeros(6, 1, 7))
    with_sink = ops.attend(q, seen, None, torch.full((4,), 300.0))
    assert bool(with_sink.isfinite().all())
    assert with_sink.abs().max() < 1e-30


@pytest.mark.parametrize("ops", OPS)
def test_window_and_compressed_keys_share_one_softmax(ops):
    pool, q, sink = torch.randn(200, 16), torch.randn(6, 1, 4, 16), torch.randn(4)
    near, far = torch.randint(1, 200, (6, 9)), torch.randint(1, 200, (6, 70))
    none = [torch.zeros(6, 1, n) for n in (9, 70)]
    keys = pool[torch.cat([near, far], 1)]
    scores = torch.einsum("nhd,nkd->nhk", q[:, 0], keys) / 4
    weights = torch.cat([scores, sink.view(1, 4, 1).expand(6, 4, 1)], 2).softmax(2)[..., :-1]
    got = ops.attend(q, Keys(pool, near, none[0]), Keys(pool, far, none[1]), sink)
    assert (got[:, 0] - torch.einsum("nhk,nkd->nhd", weights, keys)).abs().max() < 1e-5


def test_selection_in_order_prefers_the_earlier_of_equal_scores_and_puts_unseen_entries_last():
    scores = torch.tensor([[0.0, 2.0, 0.0, 0.0, 1.0], [3.0, -torch.inf, 1.0, -torch.inf, -torch.inf]])
    assert TorchOps().select_in_order(scores, 3).tolist() == [[0, 1, 4], [0, 2, 4]]


def test_fp8_rounding_keeps_values_that_the_format_holds():
    """448 at a scale of one; a power-of-two scale is exact to undo."""
    x = torch.tensor([[448.0, 1.125, -0.875, 240.0] * 16]) * 2.0**-9
    assert torch.equal(fp8_rounded(x, 64), x)
    assert fp8_rounded(torch.full((1, 64), 1.0625), 64).unique().item() == 1.0


def test_fp4_rounding_gives_the_eight_sizes():
    x = torch.linspace(-6, 6, 32).view(1, 32)
    allowed = {0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0}
    assert {abs(v) for v in fp4_rounded(x, 32).flatten().tolist()} <= allowed


def test_the_hadamard_transform_keeps_products():
    q, k = torch.randn(9, 64), torch.randn(9, 64)
    turned = (q @ hadamard(64) * (k @ hadamard(64))).sum(1)
    assert (turned - (q * k).sum(1)).abs().max() < 1e-4
