"""The C kernels of every level that this processor runs give what plain torch gives, a row at a time.

Tolerance 2e-5 relative to the largest value: the two sides sum hundreds of float32 products in other orders.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.kernels.cpu import CpuOps
from engine.model.expert_weights import ExpertWeights, MoeWeights
from engine.model.keys import Keys
from engine.model.ops import TorchOps
from engine.model.weights import HeadWeights, MhcWeights
from engine.native import NEEDS, load, processor_flags

LEVELS = [name for name, needs in NEEDS.items() if processor_flags().issuperset(needs)]
ROWS = [1, 2, 3, 5, 12, 13, 29]


@pytest.fixture(params=LEVELS)
def ops(request: pytest.FixtureRequest) -> CpuOps:
    made = CpuOps()
    made.kernels = load(request.param)
    return made


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(3)


def close(got: Tensor, want: Tensor) -> None:
    assert got.shape == want.shape
    assert (got - want).abs().max() <= 2e-5 * want.abs().max().clamp(min=1.0)


def weight(*shape: int, exact: bool) -> Tensor:
    made = torch.randn(*shape) * shape[-1] ** -0.5
    return made.bfloat16().float() if exact else made


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("exact", [True, False], ids=["bf16", "fp32"])
@pytest.mark.parametrize(("n", "k"), [(24, 64), (128, 33), (70, 256), (300, 16)])
def test_a_linear_is_the_product(ops: CpuOps, rows: int, exact: bool, n: int, k: int) -> None:
    x, w = torch.randn(rows, k), weight(n, k, exact=exact)
    close(ops.linear(x, w), TorchOps().linear(x, w))
    assert ops.packed(w).bf16 == exact


@pytest.mark.parametrize("rows", ROWS)
def test_group_linear_is_a_product_a_group(ops: CpuOps, rows: int) -> None:
    x, w = torch.randn(rows, 2, 96), weight(2, 40, 96, exact=True)
    close(ops.group_linear(x, w), TorchOps().group_linear(x, w))


@pytest.mark.parametrize("rows", ROWS)
def test_hyper_connections_mix_as_the_reference(ops: CpuOps, rows: int) -> None:
    hidden, plain = 64, TorchOps()
    x = torch.randn(rows, 4, hidden) * 2
    scale = torch.rand(3).repeat_interleave(torch.tensor([4, 4, 16])) + 0.5
    mhc = MhcWeights(weight(24, 4 * hidden, exact=False) * 3, torch.randn(24), scale, torch.randn(hidden))
    got, want = (o.mhc_pre(x, mhc, 20, 1e-6, 1e-6) for o in (ops, plain))
    for mine, theirs in zip(got, want, strict=True):
        close(mine, theirs)
    y = torch.randn(rows, hidden)
    close(ops.mhc_post(y, x, *want[1:]), plain.mhc_post(y, x, *want[1:]))
    head = HeadWeights(
        torch.randn(4, 4 * hidden),
        torch.randn(4),
        torch.rand(1),
        torch.randn(hidden),
        torch.randn(50, hidden),
    )
    close(ops.logits(x, head, 1e-6, 1e-6), plain.logits(x, head, 1e-6, 1e-6))


@pytest.mark.parametrize("rows", ROWS)
def test_norm_and_rotation(ops: CpuOps, rows: int) -> None:
    x, w = torch.randn(rows, 3, 96), torch.randn(96)
    close(ops.rms_norm(x, w, 1e-6), TorchOps().rms_norm(x, w, 1e-6))
    close(ops.rms_norm(x, None, 1e-6), TorchOps().rms_norm(x, None, 1e-6))
    part = x.view(rows, -1)[:, 32:128]
    close(ops.rms_norm(part, w, 1e-6), TorchOps().rms_norm(part, w, 1e-6))
    turns = torch.polar(torch.ones(rows, 1, 16), torch.randn(rows, 1, 16))
    mine, theirs = x.clone(), x.clone()
    ops.rotate(mine, turns)
    TorchOps().rotate(theirs, turns)
    close(mine, theirs)


def keys(blocks: int, width: int, count: int, wide: int, seen: float) -> Keys:
    pool = torch.randn(200, wide)
    bias = torch.where(torch.rand(blocks, width, count) < seen, 0.0, -torch.inf)
    bias[:, :, 0] = 0.0
    return Keys(pool, torch.randint(0, 200, (blocks, count)), bias)


@pytest.mark.parametrize("heads", [1, 3, 4, 8, 12, 16])
@pytest.mark.parametrize(("blocks", "width"), [(1, 1), (5, 1), (2, 7), (1, 16)])
def test_attention_is_one_softmax_with_a_sink(ops: CpuOps, heads: int, blocks: int, width: int) -> None:
    q, sink = torch.randn(blocks, width, heads, 64) * 2, torch.randn(heads)
    window, compressed = keys(blocks, width, 37, 64, 0.7), keys(blocks, width, 9, 64, 0.5)
    close(ops.attend(q, window, None, sink), TorchOps().attend(q, window, None, sink))
    close(ops.attend(q, window, compressed, sink), TorchOps().attend(q, window, compressed, sink))


def test_attention_of_a_row_keeps_its_bits_beside_others(ops: CpuOps) -> None:
    q, sink = torch.randn(1, 6, 4, 64), torch.randn(4)
    window = keys(1, 6, 40, 64, 0.6)
    together = ops.attend(q, window, None, sink)
    for row in range(6):
        alone = Keys(window.pool, window.rows, window.bias[:, row : row + 1].contiguous())
        assert torch.equal(
            ops.attend(q[:, row : row + 1].contiguous(), alone, None, sink)[0, 0], together[0, row]
        )


@pytest.mark.parametrize("heads", [1, 4, 16])
def test_index_scores_are_weighted_relus(ops: CpuOps, heads: int) -> None:
    q, w, entries = torch.randn(2, 3, heads, 32), torch.randn(2, 3, heads), keys(2, 3, 21, 32, 0.8)
    got, want = ops.index_scores(q, w, entries), TorchOps().index_scores(q, w, entries)
    assert torch.equal(got.isinf(), want.isinf())
    close(got.nan_to_num(neginf=0.0), want.nan_to_num(neginf=0.0))


@pytest.mark.parametrize("rows", ROWS)
def test_experts_add_up_and_empty_ones_cost_nothing(ops: CpuOps, rows: int) -> None:
    experts, hidden, inner = 6, 64, 48
    moe = MoeWeights(
        torch.randn(experts, hidden),
        torch.zeros(experts),
        None,
        ExpertWeights(
            weight(experts, 2 * inner, hidden, exact=True) * 4, weight(experts, hidden, inner, exact=True)
        ),
        weight(2 * inner, hidden, exact=True),
        weight(hidden, inner, exact=True),
    )
    x = torch.randn(rows, hidden) * 3
    ids = torch.stack([torch.randperm(experts - 1)[:2] for _ in range(rows)])
    scores = torch.rand(rows, 2)
    want = sum(
        scores[:, j : j + 1]
        * torch.stack(
            [
                moe.floats.w2[e] @ TorchOps().swiglu((moe.floats.w13[e] @ v)[None], 5.0)[0]
                for e, v in zip(ids[:, j], x, strict=True)
            ]
        )
        for j in range(2)
    )
    assert isinstance(want, Tensor)
    close(ops.experts(x, ids, scores, moe, 5.0), want)
    close(ops.shared_expert(x, moe, 5.0), TorchOps().shared_expert(x, moe, 5.0))


@pytest.mark.parametrize("exact", [True, False], ids=["bf16", "fp32"])
def test_a_row_of_a_linear_keeps_its_bits_whatever_the_rows_beside_it(ops: CpuOps, exact: bool) -> None:
    x, w = torch.randn(40, 200), weight(130, 200, exact=exact)
    alone = torch.cat([ops.linear(row[None], w) for row in x])
    for rows in (2, 7, 12, 25, 40):
        assert torch.equal(ops.linear(x[:rows], w), alone[:rows])


@pytest.mark.parametrize("rows", ROWS)
def test_windows_pool_by_a_softmax_a_channel(ops: CpuOps, rows: int) -> None:
    latents, scores = torch.randn(rows, 8, 48), torch.randn(rows, 8, 48) * 4
    scores[0, :4] = -torch.inf
    close(ops.pool_windows(latents, scores), TorchOps().pool_windows(latents, scores))


@pytest.mark.parametrize("rows", ROWS)
def test_the_online_form_is_the_softmax_and_its_steps_may_be_split(ops: CpuOps, rows: int) -> None:
    state = torch.zeros(rows, 3, 32)
    state[:, 0] = -1e30
    raw, valid = torch.randn(rows, 20, 64) * 3, torch.rand(rows, 20) < 0.8
    whole = ops.fold(state, raw, valid)
    close(whole, TorchOps().fold(state, raw, valid))
    split = ops.fold(ops.fold(state, raw[:, :7], valid[:, :7]), raw[:, 7:], valid[:, 7:])
    assert torch.equal(split, whole)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("hashed", [False, True])
def test_rows_are_routed_as_the_reference_routes_them(ops: CpuOps, rows: int, hashed: bool) -> None:
    table = torch.stack([torch.randperm(8)[:2] for _ in range(50)])
    empty = torch.empty(0)
    moe = MoeWeights(
        torch.randn(8, 32),
        None if hashed else torch.randn(8),
        table if hashed else None,
        ExpertWeights(empty, empty),
        empty,
        empty,
    )
    x, tokens = torch.randn(rows, 32) * 3, torch.randint(0, 50, (rows,))
    ids, weights = ops.route(x, tokens, moe, 2, 1.5)
    want_ids, want = TorchOps().route(x, tokens, moe, 2, 1.5)
    spread = [torch.zeros(rows, 8).scatter_(1, i, w) for i, w in ((ids, weights), (want_ids, want))]
    close(*spread)
