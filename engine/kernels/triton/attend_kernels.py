"""Device code of sparse attention: one program a query, a block of its heads, and a part of its keys.

The keys are rows of the window's pool, then rows of the compressed pool, in tiles of whole rows that serve
both products. Scores live in base 2.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.triton.faults import KEY_ROW
from engine.kernels.triton.formats import INTERPRETED, convert
from engine.kernels.triton.latent_rows import load_v4_rows
from engine.kernels.triton.launch import await_previous
from engine.kernels.triton.rope import turn_pairs, turned, turned_by

LOG2_E = tl.constexpr(1.4426950408889634)
NO_MAXIMUM = tl.constexpr(-1e30)
"""The running maximum before any key: finite, so that no difference of maxima is a NaN."""
NOTHING = tl.constexpr(1e-30)
"""Far below any sum of shares, the largest of which is one: zeros over it are zeros."""
PLAIN_SIZES = [
    "queries", "w_columns", "w_stride", "w_share", "w_size", "c_columns", "c_stride", "c_share", "c_size",
    "tiles",
]  # fmt: skip
LISTS = ["w_rows", "w_bias", "w_seen", "c_rows", "c_bias", "c_seen"]
"""These differ from step to step. A kernel for each sort of them would be compiled amid serving."""


@triton.jit
def _product(a, b, total):
    """total + a b; float32 operands in three products of TF32, or as they are where interpreted."""
    if INTERPRETED and a.dtype == tl.bfloat16:
        total = tl.dot(a.to(tl.float32), b.to(tl.float32), total)
    else:
        total = tl.dot(a, b, total, input_precision="tf32x3")
    return total


@triton.jit
def _scores(q, keys, always, APART: tl.constexpr):
    """q keys^T, float32 [HEADS, KEYS].

    APART  `always`, which is true, stands between this product and the one that uses it. Of two products in
           one block Triton gives all warps rows of the first, to keep softmax within a warp; with 64 rows for
           eight warps, half of them would repeat the other half's work, and registers would spill.
    """
    if APART:
        score = tl.zeros((q.shape[0], keys.shape[0]), tl.float32)
        if always:
            score = _product(q, tl.trans(keys), None)
    else:
        score = _product(q, tl.trans(keys), None)
    return score


@triton.jit
def _shares(share, DTYPE: tl.constexpr, APART: tl.constexpr):
    """share as DTYPE. APART: in a way that is never done twice, or exponentials would be, in two layouts."""
    if APART and not INTERPRETED:
        share = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [share], dtype=tl.bfloat16, is_pure=False, pack=2
        )
    else:
        share = convert(share, DTYPE)
    return share


@triton.jit
def _range(seen, query, columns, RANGED: tl.constexpr):
    """The columns [first, end) of the row list that the query sees."""
    first, end = 0, columns
    if RANGED:
        first = tl.maximum(tl.load(seen + query * 2), 0)
        end = tl.minimum(first + tl.load(seen + query * 2 + 1), columns)
    return first, end


@triton.jit
def _tile_rows(w_rows, c_rows, near, column, end):
    """Row numbers [KEYS] int64 of the window's list where `near`, else of the other one; 0 from `end` on."""
    if w_rows.dtype == c_rows.dtype:
        row = tl.load(tl.where(near, w_rows, c_rows) + column, mask=column < end, other=0).to(tl.int64)
    else:
        # Pointers of two types can't be chosen from. One of two loads is masked off, and adds zero.
        row = tl.load(w_rows + column, mask=column < tl.where(near, end, 0), other=0).to(tl.int64)
        row += tl.load(c_rows + column, mask=column < tl.where(near, 0, end), other=0).to(tl.int64)
    return row


@triton.jit
def _visible(row, bias, faults, column, end, pool_rows, biased, BIASED: tl.constexpr):
    """Of a tile's rows [KEYS]: the same, 0 where unseen, and score offsets."""
    # Masked rather than branched over: the loop stays one block, and its loads stay ahead of it.
    tl.atomic_or(faults + column * 0, KEY_ROW, mask=(row < -1) | (row >= pool_rows), sem="relaxed")
    seen = (row > 0) & (row < pool_rows)
    offset = tl.where(seen, 0.0, float("-inf"))
    if BIASED:
        offset += tl.load(bias + column, mask=column < tl.where(biased, end, 0), other=0.0) * LOG2_E
    return tl.where(seen, row, 0), offset


@triton.jit
def _fold(q, keys, offset, scale, top, total, value, always, APART: tl.constexpr):
    """The running maximum and sum [HEADS] and value [HEADS, 512] after one more tile of keys."""
    score = _scores(q, keys, always, APART) * scale + offset[None, :]
    higher = tl.maximum(top, tl.max(score, 1))
    kept, share = tl.exp2(top - higher), tl.exp2(score - higher[:, None])
    total = total * kept + tl.sum(share, 1)
    return higher, total, _product(_shares(share, q.dtype, APART), keys, value * kept[:, None])


@triton.jit
def _turn_stored(out, turns, held):
    """Turns the last 64 channels of rows that this program has stored at pointers `out` [HEADS, 1].

    They are read again, by other threads: turning all channels in registers would spill half of them.
    """
    tl.debug_barrier()
    at = out + 448 + tl.arange(0, 64)[None, :]
    part = tl.load(at, mask=held[:, None], other=0.0).to(tl.float32)
    part = turned(part, turns + tl.zeros((out.shape[0], 1), tl.int32), 0, 64, held, 64)
    tl.debug_barrier()
    tl.store(at, convert(part, out.dtype.element_ty), mask=held[:, None])


@triton.jit
def _headed(own, cosine, sine, eps):
    """Heads [HEADS, 512] as `rope.q_norm_rope` leaves them: normalised, then turned, each rounded."""
    value = own.to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value, 1) / 512 + eps)[:, None]
    value = convert(value, own.dtype).to(tl.float32)
    return convert(turned_by(value, cosine, sine), own.dtype)


@triton.jit(do_not_specialize=PLAIN_SIZES, do_not_specialize_on_alignment=LISTS)
def _attend(
    q, sink, before, turns, out, totals, faults, w_pool, w_rows, w_bias, w_seen, c_pool, c_rows, c_bias,
    c_seen, queries, heads, q_stride, head_stride, before_stride, turn_stride, w_columns, w_stride, w_share,
    w_size, c_columns, c_stride, c_share, c_size, tiles, scale, eps,
    HEADS: tl.constexpr, KEYS: tl.constexpr, CODED: tl.constexpr,
    W_BIASED: tl.constexpr, C_BIASED: tl.constexpr, W_RANGED: tl.constexpr, C_RANGED: tl.constexpr,
    NORMED: tl.constexpr, TURNED: tl.constexpr, SPLIT: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(heads, HEADS)
    query = (tl.program_id(0) // blocks).to(tl.int64)
    head = tl.program_id(0) % blocks * HEADS + tl.arange(0, HEADS)
    held = head < heads
    await_previous()
    w_first, w_end = _range(w_seen, query, w_columns, W_RANGED)
    c_first, c_end = _range(c_seen, query, c_columns, C_RANGED)
    w_tiles = tl.cdiv(tl.maximum(w_end - w_first, 0), KEYS)
    last = w_tiles + tl.cdiv(tl.maximum(c_end - c_first, 0), KEYS)
    begin = tl.program_id(1) * tiles
    if SPLIT:
        last = tl.minimum(last, begin + tiles)
    channel = tl.arange(0, 512)[None, :]
    at = q + query * q_stride + head.to(tl.int64)[:, None] * head_stride
    own = tl.load(at + channel, mask=held[:, None], other=0.0)
    if NORMED:
        by = before + query * before_stride + tl.zeros((HEADS, 1), tl.int32)
        cosine, sine = turn_pairs(by, 448, 64, held, HEADS, 512)
        own = _headed(own, cosine, sine, eps)
    # The sink is a key of the first part, without a value.
    sunk = tl.load(sink + head, mask=head < tl.where(begin == 0, heads, 0), other=float("-inf")) * LOG2_E
    top = tl.maximum(sunk, NO_MAXIMUM)
    total = tl.exp2(sunk - top)
    value = tl.zeros((HEADS, 512), tl.float32)
    w_rows += query // w_share * w_stride
    c_rows += query // c_share * c_stride
    w_bias += query * w_columns
    c_bias += query * c_columns
    for tile in range(begin, last):
        near = tile < w_tiles
        column = tl.where(near, w_first + tile * KEYS, c_first + (tile - w_tiles) * KEYS) + tl.arange(0, KEYS)
        end = tl.where(near, w_end, c_end)
        row, offset = _visible(
            _tile_rows(w_rows, c_rows, near, column, end), tl.where(near, w_bias, c_bias), faults, column,
            end, tl.where(near, w_size, c_size), tl.where(near, W_BIASED, C_BIASED), W_BIASED or C_BIASED,
        )  # fmt: skip
        pool = tl.where(near, w_pool, c_pool)
        keys = load_v4_rows(pool, row) if CODED else tl.load((pool + row * 512)[:, None] + channel)
        top, total, value = _fold(own, keys, offset, scale, top, total, value, w_size > 0, APART)
    place = query * heads + head
    if SPLIT:
        place += tl.program_id(1).to(tl.int64) * queries * heads
        tl.store(totals + place * 2, top, mask=held)
        tl.store(totals + place * 2 + 1, total, mask=held)
        # The first part stores even where only the sink is in it.
        held = head < tl.where((last > begin) | (begin == 0), heads, 0)
    else:
        value *= (1.0 / tl.maximum(total, NOTHING))[:, None]
    tl.store(out + place[:, None] * 512 + channel, convert(value, out.dtype.element_ty), mask=held[:, None])
    if TURNED and not SPLIT:
        _turn_stored(out + place[:, None] * 512, turns + query * turn_stride, held)


@triton.jit(do_not_specialize=["rows", "splits"])
def _combine_parts(
    parts, totals, turns, out, rows, heads, splits, turn_stride, PARTS: tl.constexpr, TURNED: tl.constexpr
):
    """The parts of one (query, head), PARTS at a time in order: parts without keys weigh exactly nothing."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, 512)[None, :]
    await_previous()
    if TURNED:
        by = turns + (row // heads * turn_stride) + tl.zeros((1, 1), tl.int32)
        cosine, sine = turn_pairs(by, 448, 64, tl.full((1,), 1, tl.int1), 1, 512)
    top, total = tl.full((1,), NO_MAXIMUM, tl.float32), tl.zeros((1,), tl.float32)
    value = tl.zeros((512,), tl.float32)
    for first in range(0, splits, PARTS):
        split = first + tl.arange(0, PARTS)
        at = split.to(tl.int64) * rows + row
        own = tl.load(totals + at * 2, mask=split < splits, other=NO_MAXIMUM)
        more = tl.load(totals + at * 2 + 1, mask=split < splits, other=0.0)
        # A program without keys stored no values: anything may be there, which is read sooner than known.
        part = tl.load(parts + at[:, None] * 512 + channel, mask=(split < splits)[:, None], other=0.0)
        part = tl.where((more > 0)[:, None], part, 0.0)
        higher = tl.maximum(top, tl.max(own, 0))
        kept, weight = tl.exp2(top - higher), tl.exp2(own - higher)
        value = value * kept + tl.sum(part * weight[:, None], 0)
        top, total = higher, total * kept + tl.sum(more * weight, 0)
    value = (value * (1.0 / tl.maximum(total, NOTHING)))[None, :]
    if TURNED:
        value = turned_by(value, cosine, sine)
    tl.store(out + row * 512 + channel, convert(value, out.dtype.element_ty))
