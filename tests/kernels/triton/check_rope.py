"""RMSNorm of heads, rotation and storing of latents against plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tests.kernels.triton.interpreting  # noqa: F401
from engine.errors import ShapeMismatch
from engine.kernels.triton import norm, rope, store
from engine.kernels.triton import turns as by_kernel
from engine.kernels.triton.faults import Fault, no_faults
from engine.model import rope as reference
from engine.model.coded_rows import CodedRows, values_of
from engine.model.latent_rows import pack_rows, unpack_rows
from engine.model.ops import TorchOps
from engine.model.rounding import fp8_rounded
from engine.model.row_layout import V4_ROW, RowLayout
from tests.kernels.triton.cases import DEVICE, distance, seeded

EPS = 1e-6
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 1e-3}
"""Float32: sums in another order. bfloat16: of values that are rounded twice, some fall to the other side."""


def turns(rows: int, rotary: int) -> Tensor:
    positions = torch.arange(rows, device=DEVICE) * 977 + 3
    return reference.turns(positions, reference.frequencies(rotary, 1e4, None).to(DEVICE))


@pytest.mark.parametrize("half", [32, 5])
def test_turns_of_far_positions(half: int) -> None:
    table = reference.frequencies(2 * half, 1e4, None).to(DEVICE)
    positions = torch.tensor([0, 1, 7, 4095, 1 << 20, 999_983, 105_616], device=DEVICE)
    wanted = reference.turns(positions, table)
    forward, back = by_kernel.turns_and_back(positions, table)
    assert float((forward - wanted).abs().max()) < 1e-6
    assert torch.equal(back, forward.conj().resolve_conj())
    assert torch.equal(by_kernel.turns(positions, table), forward)
    assert by_kernel.turns(positions[:0], table).shape == (0, 1, half)
    with pytest.raises(ShapeMismatch):
        by_kernel.turns(positions[::2], table)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "heads", "wide", "rotary"), [(0, 4, 64, 16), (1, 4, 512, 64), (5, 3, 80, 16), (9, 16, 128, 64)]
)
def test_q_norm_rope(rows: int, heads: int, wide: int, rotary: int, dtype: torch.dtype) -> None:
    q = torch.randn(rows, heads, wide, generator=seeded(rows), device=DEVICE).mul(7).to(dtype)
    by, ops = turns(rows, rotary), TorchOps()
    wanted = ops.rms_norm(q, None, EPS)
    ops.rotate(wanted, by)
    rope.q_norm_rope(q, by, EPS)
    assert distance(q, wanted) < TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chosen_rows_are_those_of_all(dtype: torch.dtype) -> None:
    """Any number of times, in any order; what they are taken from stays."""
    q, by = torch.randn(7, 3, 80, generator=seeded(3), device=DEVICE).to(dtype), turns(7, 16)
    before, chosen = q.clone(), torch.tensor([5, 0, 0, 6, 2, 0, 1, 3, 4], device=DEVICE)
    out = rope.q_norm_rope(q, by, EPS, chosen)
    assert torch.equal(q, before)
    assert torch.equal(out, rope.q_norm_rope(q, by, EPS)[chosen])
    assert rope.q_norm_rope(q, by, EPS, chosen[:0]).shape == (0, 3, 80)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotate_leaves_other_channels_and_is_undone(dtype: torch.dtype) -> None:
    before = torch.randn(7, 3, 80, generator=seeded(1), device=DEVICE).to(dtype)
    by, x, wanted = turns(7, 16), before.clone(), before.clone()
    TorchOps().rotate(wanted, by)
    rope.rotate(x, by)
    assert torch.equal(x[..., :64], before[..., :64])
    assert distance(x, wanted) < TOLERANCES[dtype]
    assert distance(x, before) > 0.1
    rope.rotate(x, by.conj().resolve_conj())
    assert distance(x, before) < 4 * TOLERANCES[dtype]


def test_strided_rows_and_neighbours_stay() -> None:
    whole = torch.randn(6, 2, 3 * 64, generator=seeded(2), device=DEVICE).bfloat16()
    before, by = whole.clone(), turns(6, 32)
    part = whole[:, :, 64:128]
    wanted = before[:, :, 64:128].contiguous()
    rope.q_norm_rope(wanted, by, EPS)
    rope.q_norm_rope(part, by, EPS)
    assert torch.equal(part, wanted)
    assert torch.equal(whole[:, :, :64], before[:, :, :64])
    assert torch.equal(whole[:, :, 128:], before[:, :, 128:])


def test_a_row_does_not_depend_on_others() -> None:
    q = torch.randn(9, 4, 128, generator=seeded(3), device=DEVICE).bfloat16()
    alone, by = q[4:5].clone(), turns(9, 64)
    rope.q_norm_rope(q, by, EPS)
    rope.q_norm_rope(alone, by[4:5], EPS)
    assert torch.equal(q[4:5], alone)


def test_shapes_are_checked() -> None:
    with pytest.raises(ShapeMismatch):
        rope.rotate(torch.zeros(2, 3, 64, device=DEVICE), turns(3, 16))
    with pytest.raises(ShapeMismatch):
        rope.rotate(torch.zeros(2, 3, 8, device=DEVICE), turns(2, 16))


def stored(x: Tensor, by: Tensor, pool: Tensor, places: list[int], simulated: bool = False) -> int:
    """Normalises, turns and stores x; returns what stands in `faults`."""
    weight = torch.rand(x.shape[1], generator=seeded(8), device=DEVICE) + 0.5
    faults = no_faults(DEVICE)
    at = torch.tensor(places, dtype=torch.int64, device=DEVICE)
    store.norm_rope_store(x, weight, by, pool, at, EPS, faults, simulated)
    return int(faults.item())


def latents(rows: int, wide: int) -> Tensor:
    """Some rows have groups of zeros, of tiny and of large values."""
    x = torch.randn(rows, wide, generator=seeded(rows + 20), device=DEVICE) * 3
    x[0, :64] = 0
    x[rows // 2, 64:128] *= 1e-7
    x[rows - 1, 1] = 300
    return x


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "wide", "rotary"), [(1, 512, 64), (6, 128, 64), (5, 80, 16)])
def test_store(rows: int, wide: int, rotary: int, kept: torch.dtype) -> None:
    by, ops = turns(rows, rotary), TorchOps()
    places = [3 * i + 1 for i in range(rows)]
    for given in {torch.float32, kept}:
        x, pool = latents(rows, max(wide, 128))[:, :wide].to(given), torch.zeros(20, wide, dtype=kept)
        pool = pool.to(DEVICE)
        assert stored(x, by, pool, places) == 0
        wanted = ops.rms_norm(x.to(kept), torch.rand(wide, generator=seeded(8), device=DEVICE) + 0.5, EPS)
        ops.rotate(wanted.unsqueeze(1), by)
        assert distance(pool[places], wanted) < TOLERANCES[kept]
        others = [place for place in range(20) if place not in places]
        assert not pool[others].any()


@pytest.mark.parametrize("layout", [V4_ROW, RowLayout(64, 16), RowLayout(192, 64)])
def test_fp8_rows_are_what_rounding_says(layout: RowLayout) -> None:
    """Bit by bit, after the same normalised latents; simulated rounding in a wide pool gives the same."""
    rows, wide = 6, layout.nope + layout.rotary
    x, by = latents(rows, 512)[:, :wide].bfloat16(), turns(rows, layout.rotary)
    plain, simulated = (torch.zeros(9, wide, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    coded = torch.zeros(9, layout.row_bytes, dtype=torch.uint8, device=DEVICE)
    places = [2, 8, 1, 5, 4, 7]
    assert not stored(x, by, plain, places) + stored(x, by, simulated, places, True)
    assert not stored(x, by, coded, places)
    wanted = torch.cat([fp8_rounded(plain[:, : layout.nope], 64), plain[:, layout.nope :]], dim=1)
    assert torch.equal(simulated, wanted)
    assert torch.equal(coded[places], pack_rows(plain, layout)[places])
    assert torch.equal(unpack_rows(coded, layout), wanted)
    assert not coded[[0, 3, 6]].any()


@pytest.mark.parametrize("rows", [0, 1, 9])
@pytest.mark.parametrize(
    ("kind", "ranks"), [("coded", 256), ("simulated", 128), ("plain", 384), ("plain", 96)]
)
def test_queries_and_latents_of_one_product(kind: str, rows: int, ranks: int) -> None:
    """Bit by bit what two kernels make of them."""
    first = torch.randn(rows, ranks + 128, generator=seeded(rows), device=DEVICE).bfloat16()
    by, places = turns(rows, 64), torch.arange(rows, device=DEVICE) * 2 % 17
    weights = [torch.rand(wide, generator=seeded(wide), device=DEVICE) for wide in (ranks, 128)]
    shape = (20, RowLayout(64, 64).row_bytes) if kind == "coded" else (20, 128)
    pools = [torch.zeros(shape, dtype=torch.uint8 if kind == "coded" else torch.bfloat16, device=DEVICE)]
    pools.append(pools[0].clone())
    faults, simulated = no_faults(DEVICE), kind == "simulated"
    out = store.norm_and_store(first, *weights, by, pools[0], places, EPS, faults, simulated)
    latents = first[:, ranks:]
    store.norm_rope_store(latents, weights[1], by, pools[1], places, EPS, faults, simulated)
    wanted = norm.norm_rows(first[:, :ranks], weights[0], EPS)
    assert torch.equal(*pools)
    assert torch.equal(values_of(out), values_of(wanted))
    assert isinstance(out, CodedRows) == isinstance(wanted, CodedRows) == (ranks % 128 == 0)
    if isinstance(out, CodedRows) and isinstance(wanted, CodedRows):
        assert torch.equal(out.codes.float(), wanted.codes.float())
        assert torch.equal(out.scales, wanted.scales)


def test_an_fp8_row_of_deepseek_v4_has_584_bytes() -> None:
    assert (V4_ROW.row_bytes, V4_ROW.nope, V4_ROW.scales_at) == (584, 448, 576)


def test_absent_places_and_places_outside_store_nothing() -> None:
    x = latents(4, 128).bfloat16()
    for pool in (
        torch.zeros(9, 128, dtype=torch.bfloat16, device=DEVICE),
        torch.zeros(9, RowLayout(64, 64).row_bytes, dtype=torch.uint8, device=DEVICE),
    ):
        assert stored(x, turns(4, 64), pool, [0, -1, 3, 0]) == 0
        assert stored(x, turns(4, 64), pool, [0, -1, 3, 9]) == Fault.LATENT_ROW
        assert stored(x, turns(4, 64), pool, [-2, -1, 3, 0]) == Fault.LATENT_ROW
        assert stored(x[:0], turns(0, 64), pool, []) == 0
        assert pool[3].any()
        assert not pool[[0, 1, 2, 4, 5, 6, 7, 8]].any()


def test_pools_are_checked() -> None:
    x, by = latents(2, 128), turns(2, 64)
    for pool in (torch.zeros(4, 127), torch.zeros(4, 584, dtype=torch.uint8), torch.zeros(0, 128)):
        with pytest.raises(ShapeMismatch):
            stored(x, by, pool.to(DEVICE), [1, 2])
    with pytest.raises(ShapeMismatch, match="multiples"):
        RowLayout(70, 64)
