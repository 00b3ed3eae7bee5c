"""Routing, sorting and FP4 experts against plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.errors import CheckpointError, ShapeMismatch
from engine.kernels.triton import combine, experts, oracle, routing
from engine.model.expert_layout import laid_experts, stored_matrix
from engine.model.quantised import Fp4Experts
from tests.kernels.triton.cases import DEVICE, distance, fp4_weight, seeded, values

BF16 = 1e-2
"""Roundings to bfloat16 of each choice and of the sum, and FP8 roundings that fall to the other side, since
the matrix unit keeps some 14 bits of a sum of FP8 products."""


@pytest.mark.parametrize(("rows", "count", "of"), [(0, 2, 8), (1, 6, 256), (5, 3, 12)])
def test_route(rows: int, count: int, of: int) -> None:
    logits = torch.randn(rows, of, generator=seeded(rows), device=DEVICE) * 8
    bias = torch.randn(of, generator=seeded(1), device=DEVICE)
    tokens = torch.arange(rows, device=DEVICE)
    tokens[3:4] = -1
    ids, weights = routing.route(logits, tokens, bias, None, count, 1.5)
    wanted, right = oracle.route(logits, tokens, bias, None, count, 1.5)
    assert torch.equal(ids, wanted)
    assert distance(weights, right) < 1e-5
    padding = torch.arange(rows, device=DEVICE) % 3 == 1
    ids, weights = routing.route(logits, tokens, bias, None, count, 1.5, padding)
    assert torch.equal(ids, wanted.masked_fill(padding[:, None], -1))
    assert distance(weights, right.masked_fill(padding[:, None], 0)) < 1e-5


def test_ties_go_to_the_smaller_id() -> None:
    ids, weights = routing.route(
        torch.zeros(1, 9, device=DEVICE), torch.zeros(1, device=DEVICE, dtype=torch.int64),
        torch.tensor([0, 1, 0, 2, 1, 1, 2, 0, 0.0], device=DEVICE), None, 4, 2.0,
    )  # fmt: skip
    assert ids.tolist() == [[3, 6, 1, 4]]
    assert torch.allclose(weights, torch.full_like(weights, 0.5))


def test_route_by_token() -> None:
    table = torch.randint(0, 7, (11, 2), generator=seeded(0), device=DEVICE)
    tokens = torch.tensor([3, -1, 10, 11, 0], device=DEVICE)
    logits = torch.randn(5, 7, generator=seeded(1), device=DEVICE) - 30
    ids, weights = routing.route(logits, tokens, None, table, 2, 1.5)
    wanted, right = oracle.route(logits.double(), tokens, None, table, 2, 1.5)
    assert torch.equal(ids, wanted)
    assert distance(weights, right) < 1e-5
    assert ids[1].tolist() == ids[3].tolist() == [-1, -1]


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize(("tokens", "of"), [(0, 3), (1, 5), (40, 3), (700, 40), (20, 96)])
def test_sort(tokens: int, of: int, rows: int) -> None:
    ids = torch.randint(-2, of + 2, (tokens, 2), generator=seeded(tokens), device=DEVICE)
    ids[ids == 1] = 0  # an expert without rows
    blocks = routing.sort_choices(ids, of, rows)
    owners = blocks.owners.tolist()
    needed = [expert for expert in owners if expert >= 0]
    assert owners == sorted(needed) + [-1] * (len(owners) - len(needed))
    for expert in range(of):
        own = [slots for slots, owner in zip(blocks.slots.tolist(), owners, strict=True) if owner == expert]
        flat = [choice for slots in own for choice in slots]
        held = (ids.flatten() == expert).nonzero().flatten().tolist()
        assert len(own) == -(-len(held) // rows)
        assert flat == held + [-1] * (len(flat) - len(held))


def small_experts(of: int, hidden: int, inner: int) -> Fp4Experts:
    return laid_experts(*fp4_weight(1, of, 2 * inner, hidden), *fp4_weight(2, of, hidden, inner))


def choices(seed: int, rows: int, count: int, of: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(-1, of + 1, (rows, count), generator=seeded(seed), device=DEVICE, dtype=torch.int32)
    return ids, torch.rand(rows, count, generator=seeded(seed + 1), device=DEVICE)


@pytest.mark.parametrize(("rows", "count", "of"), [(0, 2, 3), (1, 2, 3), (5, 3, 4), (37, 2, 3), (290, 1, 2)])
def test_experts(rows: int, count: int, of: int) -> None:
    weight = small_experts(of, 256, 128)
    x, (ids, weights) = values(rows, rows, 256), choices(rows, rows, count, of)
    ids[ids == 2] = 0  # an expert without rows
    extra = values(9, rows, 256)
    for own in (None, extra):
        out = experts.run_experts(x, ids, weights, weight, 10.0, own)
        assert out.dtype == torch.bfloat16
        assert distance(out, oracle.run_experts(x, ids, weights, weight, 10.0, own)) < BF16


def test_rows_of_choices_are_zero_where_another_rank_has_the_expert() -> None:
    weight = small_experts(3, 128, 256)
    x, (ids, weights) = values(1, 5, 128), choices(4, 5, 6, 3)
    out = torch.full((5 * 6, 128), float("nan"), device=DEVICE, dtype=torch.bfloat16)
    combine.clear_outside(out, ids, 3)
    outside = ((ids < 0) | (ids > 2)).flatten()
    assert not out[outside].any()
    assert out[~outside].isnan().all()
    rows = experts.choice_rows(x, ids, weights, weight, 10.0)
    assert distance(rows, oracle.run_choices(x, ids, weights, weight, 10.0)) < BF16


def test_clamp_decides_where_activations_are_large() -> None:
    weight, x = small_experts(2, 128, 128), values(0, 2, 128)
    ids, weights = torch.tensor([[0, 1], [1, 0]], device=DEVICE), torch.ones(2, 2, device=DEVICE)
    tight, loose = (experts.run_experts(x, ids, weights, weight, limit) for limit in (0.05, 10.0))
    assert distance(tight, oracle.run_experts(x, ids, weights, weight, 0.05)) < BF16
    assert distance(tight, loose) > 0.5


def test_padding_adds_nothing_and_a_row_does_not_depend_on_others() -> None:
    weight = small_experts(3, 128, 128)
    x, (ids, weights) = values(1, 9, 128), choices(4, 9, 2, 3)
    ids[4:] = -1
    out = experts.run_experts(x, ids, weights, weight, 10.0)
    assert not out[4:].any()
    assert torch.equal(out[:4], experts.run_experts(x[:4], ids[:4], weights[:4], weight, 10.0))


@pytest.mark.parametrize("byte", [0, 160])
def test_extreme_scales(byte: int) -> None:
    codes, scales = fp4_weight(1, 1, 256, 128)
    scales[:] = byte
    weight = laid_experts(codes, scales, *fp4_weight(2, 1, 128, 128))
    x, ids = values(3, 1, 128), torch.zeros(1, 1, dtype=torch.int64, device=DEVICE)
    one = torch.ones(1, 1, device=DEVICE)
    assert (
        distance(
            experts.run_experts(x, ids, one, weight, 10.0), oracle.run_experts(x, ids, one, weight, 10.0)
        )
        < BF16
    )


@pytest.mark.parametrize(("place", "byte", "told"), [(1, 161, "161"), (1, 133, "2\\^12"), (1, 255, "255")])
def test_scales_that_products_cannot_hold_are_refused(place: int, byte: int, told: str) -> None:
    codes, scales = fp4_weight(1, 1, 256, 128)
    scales[0, 7] = 121
    scales[0, 7, place] = byte
    with pytest.raises(CheckpointError, match=told):
        laid_experts(codes, scales, *fp4_weight(2, 1, 128, 128))


def test_groups_of_zeros_may_have_any_scale() -> None:
    codes, scales = fp4_weight(1, 1, 256, 128)
    scales[0, 7, 1], codes[0, 7, 16:32] = 0, 0x80
    scales[0, 8], codes[0, 8] = 3, 0
    weight = laid_experts(codes, scales, *fp4_weight(2, 1, 128, 128))
    x, ids = values(3, 4, 128), torch.zeros(4, 1, dtype=torch.int64, device=DEVICE)
    one = torch.ones(4, 1, device=DEVICE)
    out = experts.run_experts(x, ids, one, weight, 10.0)
    assert distance(out, oracle.run_experts(x, ids, one, weight, 10.0)) < BF16


@pytest.mark.parametrize(("less", "even"), [(4, True), (24, False)])
def test_scales_far_apart_are_exact(less: int, even: bool) -> None:
    """Within 2^11 in a block of 128 channels, and in a row or not."""
    (codes, scales), second = fp4_weight(1, 1, 256, 256), fp4_weight(2, 1, 256, 128)
    scales[:, 203:207, ::2] -= 4
    scales[:, :200, 4:] -= less
    second[1][:, 9] -= less
    weight = laid_experts(codes, scales, *second)
    assert weight.even == even
    for laid, stored in (((weight.w13, weight.s13), (codes, scales)), ((weight.w2, weight.s2), second)):
        back = stored_matrix(laid[0][0], laid[1][0])
        assert torch.equal(back.codes, stored[0][0])
        assert torch.equal(back.scales, stored[1][0])
    x, ids = values(3, 20, 256), torch.zeros(20, 1, dtype=torch.int64, device=DEVICE)
    one = torch.ones(20, 1, device=DEVICE)
    out = experts.run_experts(x, ids, one, weight, 10.0)
    assert distance(out, oracle.run_experts(x, ids, one, weight, 10.0)) < BF16


@pytest.mark.parametrize("rows", [16, 32])
def test_rounding_in_a_kernel_of_its_own_gives_the_same(rows: int) -> None:
    weight = small_experts(2, 128, 256)
    x, (ids, weights) = values(1, 37, 128), choices(4, 37, 2, 2)
    wide, narrow = (
        experts.ExpertShape(rows, experts.Cut(outputs, 4, 3), experts.Cut(64, 4, 3)) for outputs in (128, 64)
    )
    outs = [experts.run_experts(x, ids, weights, weight, 10.0, shape=shape) for shape in (wide, narrow)]
    assert torch.equal(*outs)


def test_cuts_must_fit() -> None:
    weight = small_experts(2, 128, 128)
    x, (ids, weights) = values(1, 1, 128), choices(4, 1, 2, 2)
    fits, wide = (experts.Cut(outputs, 4, 3) for outputs in (128, 256))
    for shape in (experts.ExpertShape(16, wide, fits), experts.ExpertShape(16, fits, wide)):
        with pytest.raises(ShapeMismatch, match="256"):
            experts.run_experts(x, ids, weights, weight, 10.0, shape=shape)


def test_shapes_are_checked() -> None:
    with pytest.raises(ShapeMismatch):
        laid_experts(*fp4_weight(1, 2, 256, 128), *fp4_weight(2, 2, 128, 256))
    with pytest.raises(ShapeMismatch, match="192 x 128"):
        laid_experts(*fp4_weight(1, 1, 256, 192), *fp4_weight(2, 1, 192, 128))
    with pytest.raises(ShapeMismatch):
        routing.route(torch.zeros(1, 4), torch.zeros(1), None, None, 2, 1.0)
