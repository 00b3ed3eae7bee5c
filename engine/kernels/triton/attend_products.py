"""Products of `attend_coded`: scores, softmax and values of tiles that others lay in shared memory.

Two groups of four warps each have all 64 heads; of scores, half of the keys, of values, half of the channels.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, attr-defined"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from engine.kernels.triton.attend_kernels import LOG2_E, NO_MAXIMUM, NOTHING
from engine.kernels.triton.attend_tiles import KEYS
from engine.kernels.triton.gluon_names import barrier

HEADS = gl.constexpr(64)
SCORE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]))
VALUE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 128, 16]))
HALF = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 64, 16]))
"""Of [HEADS, KEYS], of 256 channels, and of 128."""
ROW = gl.constexpr(gl.SliceLayout(1, SCORE.value))
COLUMN = gl.constexpr(gl.SliceLayout(0, SCORE.value))


@gluon.jit
def _begun(sink, held):
    """Maximum [HEADS] and sums [HEADS, KEYS] before any key: what is held of the sinks, in one column."""
    sunk = gl.load(sink, mask=held, other=float("-inf")) * LOG2_E
    top = gl.maximum(sunk, NO_MAXIMUM)
    first = gl.arange(0, KEYS, layout=COLUMN) == 0
    return top, gl.where(first[None, :], gl.exp2(sunk - top)[:, None], 0.0)


@gluon.jit
def _scores(q, k0, k1, k2):
    """Begins q keys^T, float32 [HEADS, KEYS]."""
    score = gl.zeros([HEADS, KEYS], gl.float32, layout=SCORE)
    score = warpgroup_mma(q.slice(0, 256, dim=1), k0.permute([1, 0]), score, use_acc=False, is_async=True)
    score = warpgroup_mma(q.slice(256, 128, dim=1), k1.permute([1, 0]), score, is_async=True)
    return warpgroup_mma(q.slice(384, 128, dim=1), k2.permute([1, 0]), score, is_async=True)


@gluon.jit
def _fold(score, there, scale, top, total, shares, v0, v1, v2):
    """The tile's shares, in shared memory; maximum, sums, and values as they are below the new maximum."""
    score = score * scale + gl.where(there > 0, 0.0, float("-inf"))[None, :]
    higher = gl.maximum(top, gl.max(score, 1))
    kept = gl.exp2(top - higher)
    share = gl.exp2(score - higher[:, None])
    # Each thread adds up its own columns; they are put together at the end.
    total = total * kept[:, None] + share
    shares.store(share.to(gl.bfloat16))
    v0 = v0 * gl.convert_layout(kept, gl.SliceLayout(1, VALUE))[:, None]
    by = gl.convert_layout(kept, gl.SliceLayout(1, HALF))[:, None]
    fence_async_shared()
    barrier()
    return higher, total, v0, v1 * by, v2 * by


@gluon.jit
def _turned(value, turns):
    """value [HEADS, 128] float32 with its last 64 channels turned, pair by pair, by (cosine, sine) pairs."""
    even, odd = gl.split(gl.reshape(value, [HEADS, 64, 2]))
    pair = gl.arange(0, 64, layout=gl.SliceLayout(0, even.type.layout))
    at = turns + 2 * (pair - 32)
    cosine = gl.load(at, mask=pair >= 32, other=1.0)[None, :]
    sine = gl.load(at + 1, mask=pair >= 32, other=0.0)[None, :]
    both = gl.join(even * cosine - odd * sine, even * sine + odd * cosine)
    return gl.convert_layout(gl.reshape(both, [HEADS, 128]), HALF)


@gluon.jit
def _store(out, value, held, FIRST: gl.constexpr):
    """value [HEADS, C] float32 at channel FIRST of rows at pointers out [HEADS], as threads hold it."""
    layout: gl.constexpr = value.type.layout
    at = gl.convert_layout(out, gl.SliceLayout(1, layout))
    here = gl.convert_layout(held, gl.SliceLayout(1, layout))
    channel = FIRST + gl.arange(0, value.shape[1], layout=gl.SliceLayout(0, layout))
    gl.store(at[:, None] + channel[None, :], value, mask=here[:, None])


@gluon.jit
def _store_rounded(out, memory, value, held, FIRST: gl.constexpr, WIDE: gl.constexpr):
    """The same in bfloat16 by way of shared memory: each thread stores 16 bytes, beside its neighbours'."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDE, WIDE // 8], [8, 1], [1, 0])
    memory.store(value.to(gl.bfloat16))
    barrier()
    at = gl.convert_layout(out, gl.SliceLayout(1, layout))
    here = gl.convert_layout(held, gl.SliceLayout(1, layout))
    channel = FIRST + gl.arange(0, WIDE, layout=gl.SliceLayout(0, layout))
    gl.store(at[:, None] + channel[None, :], memory.load(layout), mask=here[:, None])


@gluon.jit
def _finish(out, turns, k0, k1, whole, v0, v1, v2, held, TURNED: gl.constexpr):
    """The result of all keys, whose sums are `whole` [HEADS]; the tiles' memory is free by now."""
    by = 1.0 / gl.maximum(whole, NOTHING)
    half = gl.convert_layout(by, gl.SliceLayout(1, HALF))[:, None]
    v0, v2 = v0 * gl.convert_layout(by, gl.SliceLayout(1, VALUE))[:, None], v2 * half
    if TURNED:
        v2 = _turned(v2, turns)
    _store_rounded(out, k0.index(0), v0, held, 0, 256)
    _store_rounded(out, k1.index(0), v1 * half, held, 256, 128)
    _store_rounded(out, k1.index(1), v2, held, 384, 128)


@gluon.jit
def multiply(
    sink, turns, out, totals, place, head, scale, heads, begin, last, q, k0, k1, k2, shares, rows, standing,
    used, third_used, TURNED: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Attention of one query's heads over tiles [begin, last). place, head: [HEADS] in ROW"""
    # The sink is a key of the first part, without a value.
    top, total = _begun(sink + head, head < gl.where(begin == 0, heads, 0))
    v0 = gl.zeros([HEADS, 256], gl.float32, layout=VALUE)
    v1 = gl.zeros([HEADS, 128], gl.float32, layout=HALF)
    v2 = gl.zeros([HEADS, 128], gl.float32, layout=HALF)
    async_copy.wait_group(0)
    fence_async_shared()
    barrier()
    for tile in range(begin, last):
        j = tile - begin
        now = j & 1
        mbarrier.wait(standing.index(now), (j >> 1) & 1)
        score = _scores(q, k0.index(now), k1.index(now), k2)
        there = rows.index(j & 3).load(COLUMN)
        score = warpgroup_mma_wait(0, deps=[score])
        top, total, v0, v1, v2 = _fold(score, there, scale, top, total, shares, v0, v1, v2)
        v2 = warpgroup_mma(shares, k2, v2, is_async=True)
        v0 = warpgroup_mma(shares, k0.index(now), v0, is_async=True)
        v1 = warpgroup_mma(shares, k1.index(now), v1, is_async=True)
        v2 = warpgroup_mma_wait(2, deps=[v2])
        barrier()
        mbarrier.arrive(third_used.index(0), count=1)
        v0, v1 = warpgroup_mma_wait(0, deps=[v0, v1])
        barrier()
        mbarrier.arrive(used.index(now), count=1)
    whole, held = gl.sum(total, 1), head < heads
    if SPLIT:
        gl.store(totals + place * 2, top, mask=held)
        gl.store(totals + place * 2 + 1, whole, mask=held)
        # The first part stores even where only the sink is in it.
        held = head < gl.where((last > begin) | (begin == 0), heads, 0)
        _store(out + place * 512, v0, held, 0)
        _store(out + place * 512, v1, held, 256)
        _store(out + place * 512, v2, held, 384)
    else:
        _finish(out + place * 512, turns, k0, k1, whole, v0, v1, v2, held, TURNED)
