"""Sparse attention over rows of a pool: one softmax over window, compressed keys and a sink; values are keys.

No key is gathered in memory: programs read pool rows by their numbers. Which keys a query sees is told in one
of two forms. `Keys` has a dense bias [blocks, W, K]. `SeenKeys` has two numbers a query: its keys are a range
of its row list, and tiles begin at the range's first column, so that a query's bits are the same whether it
is decoded, verified beside others, or prefilled. `engine.runner.blocks` plans them once a step for all
layers; selected entries are a list of their own for each query, which sees all of it.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from engine.errors import ShapeMismatch
from engine.kernels.triton.attend_coded import _attend_coded
from engine.kernels.triton.attend_kernels import LOG2_E, _attend, _combine_parts
from engine.kernels.triton.formats import INTERPRETED
from engine.kernels.triton.launch import ahead
from engine.kernels.triton.linear import multiprocessors
from engine.kernels.triton.rope import Heads
from engine.model.keys import AnyKeys, Keys, SeenKeys
from engine.model.row_layout import V4_ROW

WIDE = V4_ROW.nope + V4_ROW.rotary
COMBINED = 8
"""Parts that are added up at once."""
MOST_SPLITS = 64


@dataclass(frozen=True)
class AttendShape:
    """How attention is cut. A query's bits depend on it, never on other queries.

    heads  of a program, a power of two from 16 to 64
    keys   of a tile, a power of two from 16
    tiles  of a program, the others being parts that a second kernel adds up; 0: all of them
    apart  FP8 rows are copied, decoded and multiplied each by warps of their own (`attend_coded`): where
           `runs_apart` says so, 64 heads by 64 keys
    """

    heads: int
    keys: int
    tiles: int
    warps: int
    stages: int
    apart: bool = False


COMPARED = AttendShape(16, 32, 0, 8, 2)
APART = AttendShape(64, 64, 0, 8, 2, apart=True)
MANY = {
    torch.bfloat16: AttendShape(64, 32, 0, 8, 5),
    torch.uint8: AttendShape(64, 32, 0, 8, 3),
    torch.float32: COMPARED,
}
FEW = {
    torch.bfloat16: AttendShape(16, 32, 0, 8, 5),
    torch.uint8: AttendShape(16, 32, 0, 8, 3),
    torch.float32: COMPARED,
}
"""By the pool's type, what was fastest on an H200. 2,048 queries of 64 heads and 640 keys take 1,288 us over
bfloat16 rows, 1,609 over FP8 rows, 664 over those by APART; 128 queries 86, 112 and 48; one query 9.9 over
bfloat16, 11.9 over FP8. float32 is for comparisons, and spills whatever the cut."""


def shape_for(
    queries: int, heads: int, columns: int, kept: torch.dtype, processors: int, apart: bool = False
) -> AttendShape:
    """A cut for so many queries that see up to `columns` keys each, of a pool of type `kept`.

    Where queries fill the device, a program has as many heads as fill the matrix unit, and all keys; by APART
    where it runs. Where they don't, the keys are parted; where they are very few, heads are too.
    Deterministic modes pass one fixed cut for all steps instead, such as MANY's.
    """
    few = queries * triton.cdiv(heads, 16) * 4 <= processors or heads <= 16
    cut = FEW[kept] if few else APART if apart else MANY[kept]
    programs = queries * triton.cdiv(heads, cut.heads)
    tiles = triton.cdiv(columns, cut.keys)
    splits = max(1, min(MOST_SPLITS, tiles, processors // programs))
    share = triton.cdiv(tiles, splits)
    return cut if share >= tiles else replace(cut, tiles=share)


@cache
def runs_apart(device: torch.device) -> bool:
    """Whether APART runs there: compute capability 9.0, and kernels aren't interpreted."""
    if INTERPRETED.value or device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device)[0] == 9


class _Segment(NamedTuple):
    """One pool's keys as the kernel takes them: `share` queries have one row list."""

    pool: Tensor
    rows: Tensor
    bias: Tensor
    seen: Tensor
    columns: int
    stride: int
    share: int
    size: int
    biased: bool
    ranged: bool


def attend(
    q: Tensor, window: AnyKeys, compressed: AnyKeys | None, sink: Tensor, faults: Tensor,
    turns: Tensor | None = None, out: Tensor | None = None, shape: AttendShape | None = None,
    before: Heads | None = None,
) -> Tensor:  # fmt: skip
    """As `TorchOps.attend`, in float32 but for products, whose operands have q's type.

    q        [blocks, W, heads, 512] bfloat16, or float32 with float32 pools; blocks and W lie evenly
    window, compressed  pools of one type; a query that sees no key gives zeros
    sink     [heads] float32, an unscaled logit without a value
    faults   [1] int32; gets Fault.KEY_ROW where a row is outside its pool; such a key counts as unseen
    turns    [blocks W, 1, 32] complex64, by which the last 64 channels of the result turn; None: they don't
    out      [blocks, W, heads, 512] in q's type, contiguous, takes the result; None: a new tensor
    before   each program prepares its heads by it, which pays where programs are few; not by APART
    returns  out
    raises   ShapeMismatch
    """
    heads = q.shape[2]
    near = _segment(window, q, sink)
    # No columns of the same form, rather than a form of its own: a kernel less to compile.
    far = _segment(compressed, q, sink) if compressed else near._replace(columns=0)
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    flat = q.flatten(0, 1)
    _check(flat, near, far, sink, out)
    pairs = None if turns is None else _pairs(turns, flat)
    kept = near.pool.dtype
    if flat.shape[0]:
        columns, processors = near.columns + far.columns, multiprocessors(q.device)
        apart = before is None and _takes_apart(flat, near, far)
        cut = shape or shape_for(flat.shape[0], heads, columns, kept, processors, apart)
        _run(flat, near, far, sink, faults, pairs, out, cut, before)
    return out


def _run(
    q: Tensor, near: _Segment, far: _Segment, sink: Tensor, faults: Tensor, pairs: Tensor | None, out: Tensor,
    cut: AttendShape, before: Heads | None,
) -> None:  # fmt: skip
    """q [queries, heads, 512]; pairs [queries, 32, 2]."""
    queries, heads = q.shape[:2]
    tiles = triton.cdiv(near.columns, cut.keys) + triton.cdiv(far.columns, cut.keys)
    splits = max(1, triton.cdiv(tiles, cut.tiles)) if cut.tiles else 1
    parts, totals = out, sink
    if splits > 1:
        parts = torch.empty(splits, queries, heads, WIDE, dtype=torch.float32, device=q.device)
        totals = torch.empty(splits, queries, heads, 2, dtype=torch.float32, device=q.device)
    own, stride = (sink, 0) if pairs is None else (pairs, pairs.stride(0))
    grid, scale = (queries * triton.cdiv(heads, cut.heads), splits), WIDE**-0.5 * LOG2_E.value
    if cut.apart:
        assert before is None
        _attend_coded[grid](
            q, sink, own, parts, totals, faults, near.pool, near.rows, near.seen, far.pool, far.rows,
            far.seen, queries, heads, q.stride(0), q.stride(1), stride, *near[4:8], *far[4:8], cut.tiles,
            scale, near.ranged, far.ranged, pairs is not None, splits > 1, num_warps=cut.warps,
        )  # fmt: skip
    else:
        given = None if before is None else _pairs(before.turns, q)
        _attend[grid](
            q, sink, sink if given is None else given, own, parts, totals, faults, *near[:4], *far[:4],
            queries, heads, q.stride(0), q.stride(1), 0 if given is None else given.stride(0), stride,
            *near[4:8], *far[4:8], cut.tiles, scale, before.eps if before else 0.0, cut.heads, cut.keys,
            near.pool.dtype == torch.uint8, near.biased, far.biased, near.ranged, far.ranged,
            given is not None, pairs is not None, splits > 1, cut.heads == 64 and q.dtype == torch.bfloat16,
            num_warps=cut.warps, num_stages=cut.stages, **ahead(queries),
        )  # fmt: skip
    if splits > 1:
        rows = queries * heads
        _combine_parts[(rows,)](
            parts, totals, own, out, rows, heads, splits, stride, COMBINED, pairs is not None, num_warps=4,
            **ahead(queries),
        )  # fmt: skip


def _segment(keys: AnyKeys, q: Tensor, nothing: Tensor) -> _Segment:
    """`nothing` [any] float32 stands for what there isn't, and is never read.

    raises  ShapeMismatch where the row list, the bias or the ranges don't fit q
    """
    blocks, width = q.shape[:2]
    pool, rows, queries = keys.pool, keys.rows, blocks * width
    lists, columns = rows.shape
    wide = V4_ROW.row_bytes if pool.dtype == torch.uint8 else WIDE
    fits = pool.dim() == 2 and pool.shape[1] == wide and pool.is_contiguous() and len(pool) > 0
    fits &= lists in (blocks, queries) and (columns < 2 or rows.stride(1) == 1)
    bias = keys.bias if isinstance(keys, Keys) else None
    seen = keys.seen if isinstance(keys, SeenKeys) else None
    if bias is not None:
        fits &= tuple(bias.shape) == (blocks, width, columns) and bias.is_contiguous()
        fits &= bias.dtype == torch.float32
    if seen is not None:
        fits &= tuple(seen.shape) == (queries, 2) and seen.is_contiguous() and seen.dtype == torch.int32
    if not fits:
        told = bias if bias is not None else seen
        raise ShapeMismatch(
            f"pool {pool.dtype} {tuple(pool.shape)}, rows {tuple(rows.shape)}, bias or ranges "
            f"{None if told is None else tuple(told.shape)} for {blocks} blocks of {width} queries"
        )
    share = width if lists == blocks else 1
    return _Segment(
        pool, rows, nothing if bias is None else bias, nothing if seen is None else seen, columns,
        rows.stride(0), share, pool.shape[0], bias is not None, seen is not None,
    )  # fmt: skip


def _takes_apart(q: Tensor, near: _Segment, far: _Segment) -> bool:
    """Whether APART takes these: FP8 rows, keys by ranges, heads that are copied by 16 bytes."""
    aligned = q.data_ptr() % 16 == 0 and q.stride(0) % 16 == 0 and q.stride(1) % 16 == 0
    ranged = near.pool.dtype == torch.uint8 and not near.biased and not far.biased
    return aligned and ranged and runs_apart(q.device)


def _check(q: Tensor, near: _Segment, far: _Segment, sink: Tensor, out: Tensor) -> None:
    """raises ShapeMismatch where types or shapes aren't what the kernel takes; q is [queries, heads, D]."""
    kinds = {torch.bfloat16: (torch.bfloat16, torch.uint8), torch.float32: (torch.float32,)}
    heads, kept = q.shape[1], near.pool.dtype
    if kept not in kinds.get(q.dtype, ()) or far.pool.dtype != kept:
        raise ShapeMismatch(f"q is {q.dtype}, the pools {kept} and {far.pool.dtype}")
    if q.shape[2] != WIDE or q.stride(2) != 1 or tuple(sink.shape) != (heads,) or sink.dtype != torch.float32:
        raise ShapeMismatch(
            f"q is {tuple(q.shape)}, strides {q.stride()}, sink {sink.dtype} {tuple(sink.shape)}; heads have "
            f"{WIDE} contiguous channels"
        )
    if out.numel() != q.numel() or out.dtype != q.dtype or not out.is_contiguous():
        raise ShapeMismatch(f"out is {out.dtype} {tuple(out.shape)} for queries {q.dtype} {tuple(q.shape)}")


def _pairs(turns: Tensor, q: Tensor) -> Tensor:
    """float32 [queries, 32, 2]. raises ShapeMismatch."""
    if tuple(turns.shape) != (q.shape[0], 1, V4_ROW.rotary // 2) or turns.dtype != torch.complex64:
        raise ShapeMismatch(f"turns are {turns.dtype} {tuple(turns.shape)} for {q.shape[0]} queries")
    return torch.view_as_real(turns.squeeze(1).contiguous())
