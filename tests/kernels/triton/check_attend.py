"""Sparse attention against plain torch: all forms of keys, pools and cuts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import tests.kernels.triton.interpreting  # noqa: F401
from engine.errors import ShapeMismatch
from engine.kernels.triton import attend, oracle_attention
from engine.kernels.triton.attend import AttendShape
from engine.kernels.triton.faults import Fault, no_faults
from engine.kernels.triton.rope import Heads, q_norm_rope
from engine.model import rope
from engine.model.keys import Keys, SeenKeys
from engine.model.latent_rows import pack_rows
from engine.model.ops import TorchOps
from engine.model.row_layout import V4_ROW
from tests.kernels.triton.cases import DEVICE, distance, seeded

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.uint8: 4e-3}
"""By the pool's type. float32: sums in another order (three TF32 products on a device). Otherwise shares and
the result are rounded to bfloat16 once each, at most 2^-9; keys and queries are exact in both."""
MANY = attend.APART if attend.runs_apart(torch.device(DEVICE)) else attend.MANY[torch.uint8]
"""What many queries over FP8 rows take by themselves."""
WHOLE = AttendShape(16, 32, 0, 4, 2)
PARTS = AttendShape(16, 16, 2, 4, 2)


def pool_of(rows: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    latents = torch.randn(rows, 512, generator=seeded(seed), device=DEVICE)
    latents[0] = 0
    return pack_rows(latents, V4_ROW) if dtype == torch.uint8 else latents.to(dtype)


def queries(blocks: int, width: int, heads: int, dtype: torch.dtype) -> Tensor:
    q = torch.randn(blocks, width, heads, 512, generator=seeded(heads), device=DEVICE)
    return q.to(torch.float32 if dtype == torch.float32 else torch.bfloat16)


def some_rows(lists: int, columns: int, size: int, seed: int = 1) -> Tensor:
    """Random rows, a few of them absent."""
    rows = torch.randint(1, size, (lists, columns), generator=seeded(seed), device=DEVICE)
    rows[:, 1::7] = 0
    rows[:, 5::9] = -1
    return rows


def ranges(queries: int, columns: int) -> Tensor:
    """Each query sees one column later than the one before; the last one none."""
    first = torch.arange(queries, device=DEVICE)
    seen = torch.stack([first, columns - queries - first], 1).clamp_min(0).int()
    seen[-1] = 0
    return seen


def sinks(heads: int) -> Tensor:
    return torch.randn(heads, generator=seeded(5), device=DEVICE)


def turns(rows: int) -> Tensor:
    table = rope.frequencies(64, 1e4, None).to(DEVICE)
    return rope.turns(torch.arange(rows, device=DEVICE) * 31, table).conj().resolve_conj()


@pytest.mark.parametrize("cut", [WHOLE, PARTS])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_ranges(dtype: torch.dtype, cut: AttendShape) -> None:
    q, faults, back = queries(1, 2, 5, dtype), no_faults(DEVICE), turns(2)
    window = SeenKeys(pool_of(50, dtype), some_rows(1, 40, 50), ranges(3, 40)[:2])
    own = SeenKeys(pool_of(30, dtype, 3), some_rows(2, 37, 30, 2).int(), None)
    out = attend.attend(q, window, own, sinks(5), faults, back, shape=cut)
    assert out.dtype == q.dtype
    assert distance(out, oracle_attention.attend(q, window, own, sinks(5), back)) < TOLERANCES[dtype]
    assert not faults.any()


@pytest.mark.parametrize("cut", [WHOLE, PARTS])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_heads_are_prepared_by_the_same_kernel(dtype: torch.dtype, cut: AttendShape) -> None:
    """What it leaves to the product's queries, and what it gives, are as of two kernels."""
    q, faults, back = queries(2, 1, 17, dtype).mul_(7), no_faults(DEVICE), turns(4)
    window = SeenKeys(pool_of(50, dtype), some_rows(2, 40, 50), ranges(3, 40)[:2])
    before, forward = q.clone(), back[2:].conj().resolve_conj()
    given = attend.attend(
        q, window, None, sinks(17), faults, back[:2], shape=cut, before=Heads(forward, 1e-6)
    )
    assert torch.equal(q, before)
    apart = q_norm_rope(q.flatten(0, 1), forward, 1e-6).view(q.shape)
    wanted = attend.attend(apart, window, None, sinks(17), faults, back[:2], shape=cut)
    assert distance(given, wanted) < TOLERANCES[dtype] / 4
    assert not faults.any()


@pytest.mark.parametrize("cut", [WHOLE, PARTS])
def test_dense_bias(cut: AttendShape) -> None:
    """Blocks that share their keys, each query with a bias of its own; heads beyond one program."""
    q, dtype = queries(2, 2, 17, torch.float32)[:, :1], torch.float32
    bias = torch.zeros(2, 1, 20, device=DEVICE)
    bias[0, 0, 3:], bias[1, 0, 0] = -torch.inf, -torch.inf
    rows = torch.randint(1, 50, (2, 20), generator=seeded(3), device=DEVICE)
    window = Keys(pool_of(50, dtype), rows, bias)
    compressed = SeenKeys(pool_of(9, dtype, 4), some_rows(2, 5, 9), None)
    for keys in (None, compressed):
        out = attend.attend(q, window, keys, sinks(17), no_faults(DEVICE), shape=cut)
        wanted = oracle_attention.attend(q, window, keys, sinks(17), None)
        assert distance(out, wanted) < TOLERANCES[dtype]
    wanted = TorchOps().attend(q, window, None, sinks(17))
    assert distance(attend.attend(q, window, None, sinks(17), no_faults(DEVICE), shape=cut), wanted) < 1e-5


@pytest.mark.parametrize("cut", [AttendShape(64, 64, 0, 8, 2), MANY])
def test_all_heads_of_a_program_at_once(cut: AttendShape) -> None:
    q = queries(1, 1, 70, torch.bfloat16)
    window = SeenKeys(pool_of(80, torch.uint8), some_rows(1, 70, 80), None)
    out = attend.attend(q, window, None, sinks(70), no_faults(DEVICE), shape=cut)
    assert distance(out, oracle_attention.attend(q, window, None, sinks(70), None)) < 4e-3


@pytest.mark.parametrize("tiles", [0, 1, 3])
@pytest.mark.parametrize("columns", [9, 250])
def test_the_cut_of_many_queries(tiles: int, columns: int) -> None:
    """Queries of every sort at once: seeing some of both lists, all of them, of one or of none."""
    q, faults, back = queries(1, 4, 3, torch.bfloat16), no_faults(DEVICE), turns(4)
    seen = [[0, columns], [columns // 3, columns], [2, 0], [1, 5]]
    window = SeenKeys(
        pool_of(99, torch.uint8), some_rows(1, columns, 99), torch.tensor(seen, device=DEVICE).int()
    )
    told = torch.tensor([[0, 70], [0, 1], [0, 0], [3, 67]], dtype=torch.int32, device=DEVICE)
    far = SeenKeys(pool_of(60, torch.uint8, 3), some_rows(4, 70, 60, 2).int(), told)
    cut = replace(MANY, tiles=tiles)
    out = attend.attend(q, window, far, sinks(3), faults, back, shape=cut)
    assert distance(out, oracle_attention.attend(q, window, far, sinks(3), back)) < TOLERANCES[torch.uint8]
    assert not faults.any()
    assert not out[:, 2].any()
    assert window.seen is not None
    alone = SeenKeys(window.pool, window.rows, window.seen[1:2].contiguous())
    own = SeenKeys(far.pool, far.rows[1:2], told[1:2])
    assert torch.equal(
        attend.attend(q[:, 1:2], alone, own, sinks(3), faults, back[1:2], shape=cut), out[:, 1:2]
    )
    window.rows[0, 5] = 99
    attend.attend(q, window, far, sinks(3), faults, back, shape=cut)
    assert faults.item() == Fault.KEY_ROW


@pytest.mark.parametrize("cut", [WHOLE, PARTS])
def test_without_keys_the_sink_takes_all(cut: AttendShape) -> None:
    q, pool = queries(1, 2, 4, torch.bfloat16), pool_of(9, torch.bfloat16)
    nothing = torch.zeros(2, 2, dtype=torch.int32, device=DEVICE)
    for window in (SeenKeys(pool, some_rows(1, 40, 9), nothing), SeenKeys(pool, some_rows(1, 0, 9), None)):
        absent = SeenKeys(pool, torch.full((2, 34), -1, device=DEVICE), None)
        for compressed in (None, absent):
            out = torch.full_like(q, torch.nan)
            attend.attend(q, window, compressed, sinks(4), no_faults(DEVICE), turns(2), out, cut)
            assert not out.any()


def test_ranges_are_cut_to_columns_that_are() -> None:
    q, pool, rows = queries(1, 1, 4, torch.bfloat16), pool_of(30, torch.bfloat16), some_rows(1, 50, 30)
    outs = []
    for seen in ([-9, 40], [0, 40], [20, 99], [20, 30], [60, 9], [0, -5], [0, 0]):
        window = SeenKeys(pool, rows[:, :50], torch.tensor([seen], dtype=torch.int32, device=DEVICE))
        outs.append(attend.attend(q, window, None, sinks(4), no_faults(DEVICE), shape=WHOLE))
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[2], outs[3])
    assert not torch.stack(outs[4:]).any()


def test_without_queries() -> None:
    q, pool = queries(0, 1, 4, torch.bfloat16), pool_of(9, torch.bfloat16)
    window = SeenKeys(pool, some_rows(0, 40, 9), None)
    assert attend.attend(q, window, None, sinks(4), no_faults(DEVICE)).shape == (0, 1, 4, 512)


@pytest.mark.parametrize("cut", [WHOLE, PARTS])
def test_a_query_does_not_depend_on_others(cut: AttendShape) -> None:
    """Verified third in a block whose row list begins earlier, or decoded alone: the same bits."""
    dtype = torch.bfloat16
    q, pool, rows = queries(1, 3, 4, dtype), pool_of(60, dtype), some_rows(1, 43, 60)
    seen = torch.tensor([[1, 30], [2, 30], [3, 40]], dtype=torch.int32, device=DEVICE)
    many = SeenKeys(pool, torch.roll(some_rows(1, 90, 60), 5, 1), torch.full_like(seen, 40))
    both = attend.attend(q, SeenKeys(pool, rows, seen), many, sinks(4), no_faults(DEVICE), shape=cut)
    own = torch.tensor([[0, 40]], dtype=torch.int32, device=DEVICE)
    alone, few = SeenKeys(pool, rows[:, 3:], own), SeenKeys(pool, many.rows[:, 40:], own)
    out = attend.attend(q[:, 2:], alone, few, sinks(4), no_faults(DEVICE), shape=cut)
    assert torch.equal(out, both[:, 2:])


@pytest.mark.parametrize("row", [30, -2, 1 << 40])
def test_a_row_outside_the_pool_is_unseen_and_told(row: int) -> None:
    q, pool, faults = queries(1, 1, 4, torch.bfloat16), pool_of(30, torch.bfloat16), no_faults(DEVICE)
    rows = some_rows(1, 20, 30)
    rows[0, 17] = row
    bad, good = SeenKeys(pool, rows, None), SeenKeys(pool, rows.clone(), None)
    good.rows[0, 17] = 0
    out = attend.attend(q, bad, None, sinks(4), faults, shape=WHOLE)
    assert faults.item() == Fault.KEY_ROW
    assert torch.equal(out, attend.attend(q, good, None, sinks(4), no_faults(DEVICE), shape=WHOLE))


def test_strided_queries_and_a_given_result() -> None:
    whole, pool = queries(2, 1, 9, torch.bfloat16), pool_of(30, torch.bfloat16)
    window, q = SeenKeys(pool, some_rows(2, 20, 30).int(), None), whole[:, :, 2:6]
    out = torch.full((2, 1, 4, 512), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    attend.attend(q, window, None, sinks(4), no_faults(DEVICE), None, out, WHOLE)
    same = attend.attend(q.contiguous(), window, None, sinks(4), no_faults(DEVICE), shape=WHOLE)
    assert torch.equal(out, same)


@pytest.mark.parametrize(("asked", "heads", "columns"), [(1, 64, 640), (128, 64, 640), (3, 128, 9000)])
def test_cuts_fit(asked: int, heads: int, columns: int) -> None:
    assert attend.shape_for(128, 64, 640, torch.uint8, 132, True) == attend.APART
    cut = attend.shape_for(asked, heads, columns, torch.uint8, 132)
    assert cut.heads in (16, 64)
    assert cut.keys * max(1, cut.tiles) <= columns + cut.keys
    assert -(-columns // cut.keys) <= 64 * (cut.tiles or columns)


def test_shapes_are_checked() -> None:
    q, pool, rows = queries(1, 1, 4, torch.bfloat16), pool_of(9, torch.bfloat16), some_rows(1, 5, 9)
    wrong = (
        SeenKeys(pool.float(), rows, None),
        SeenKeys(pool[:, :256], rows, None),
        SeenKeys(pool, some_rows(3, 5, 9), None),
        SeenKeys(pool, rows, torch.zeros(2, 2, dtype=torch.int32, device=DEVICE)),
        Keys(pool, rows, torch.zeros(1, 1, 4, device=DEVICE)),
    )
    for window in wrong:
        with pytest.raises(ShapeMismatch):
            attend.attend(q, window, None, sinks(4), no_faults(DEVICE))
    with pytest.raises(ShapeMismatch, match="sink"):
        attend.attend(q, SeenKeys(pool, rows, None), None, sinks(5), no_faults(DEVICE))
