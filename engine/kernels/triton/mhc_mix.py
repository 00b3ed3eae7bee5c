"""The products of hyper-connections: of streams as they are, or of few as a sub-block's result leaves them.

Few streams that a sub-block's end makes are stored and multiplied by the next one's weights at once.
Source: DeepSeek-V4's reference formulas, which `TorchOps.mhc_pre` and `mhc_post` state.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.formats import convert, product
from engine.kernels.triton.launch import ahead, await_previous
from engine.kernels.triton.linear import multiprocessors

MIX_ROWS, MIX_CHANNELS, MAX_SPLIT = 16, 64, 64
ALONE_ROWS, ALONE_CHANNELS = 16, 64
"""Up to so many rows each has programs of its own: what is read again of weights is in the caches."""


@dataclass(frozen=True)
class MixShape:
    """How the products are cut: rows of a program, channels of a step, parts, warps, pipeline."""

    rows: int
    wide: int
    split: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Result:
    """What a sub-block gave: y [T, H], and its weights post [T, 4] and comb [T, 4, 4], float32."""

    y: Tensor
    post: Tensor
    comb: Tensor


@triton.jit
def _times(value, weight, total):
    """total + value weight^T as float32 gives it; value [R, K], weight float32 [N, K]."""
    if value.dtype == tl.bfloat16:
        # Three bfloat16 hold a float32; products of bfloat16 are exact.
        high = weight.to(tl.bfloat16)
        weight -= high.to(tl.float32)
        middle = weight.to(tl.bfloat16)
        weight -= middle.to(tl.float32)
        total = product(value, tl.trans(weight.to(tl.bfloat16)), total)
        total = product(value, tl.trans(middle), total)
        total = product(value, tl.trans(high), total)
    else:
        total = tl.dot(value, tl.trans(weight), total, input_precision="tf32x3")
    return total


@triton.jit
def way(post, comb, row, K: tl.constexpr):
    """What stream K takes of a sub-block's result and of the four streams; row [...], five of [..., 1]."""
    c0, c1 = tl.load(comb + row * 16 + K), tl.load(comb + row * 16 + 4 + K)
    c2, c3 = tl.load(comb + row * 16 + 8 + K), tl.load(comb + row * 16 + 12 + K)
    p = tl.load(post + row * 4 + K)
    return p[:, None], c0[:, None], c1[:, None], c2[:, None], c3[:, None]


@triton.jit
def left(own, s0, s1, s2, s3, p, c0, c1, c2, c3, DTYPE: tl.constexpr):
    """A stream after a sub-block in DTYPE, from the result `own` and the streams before it, all [R, C]."""
    value = p * own.to(tl.float32)
    value += c0 * s0.to(tl.float32) + c1 * s1.to(tl.float32) + c2 * s2.to(tl.float32) + c3 * s3.to(tl.float32)
    return convert(value, DTYPE)


@triton.jit
def _mix(
    x, fn, mixed, squares, rows, columns,
    SPLIT: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(1)
    t_read = tl.where(t < rows, t, 0).to(tl.int64)
    output = tl.arange(0, 32)
    k = tl.arange(0, WIDE)
    steps = tl.cdiv(columns, WIDE)
    share = tl.cdiv(steps, SPLIT)
    await_previous()
    total = tl.zeros((ROWS, 32), tl.float32)
    square = tl.zeros((ROWS, WIDE), tl.float32)
    for step in range(split * share, tl.minimum((split + 1) * share, steps)):
        channel = step * WIDE + k
        held = (channel < columns)[None, :]
        value = tl.load(x + t_read[:, None] * columns + channel[None, :], mask=held, other=0.0)
        rest = held & (output < OUTPUTS)[:, None]
        weight = tl.load(fn + output[:, None] * columns + channel[None, :], mask=rest, other=0.0)
        total = _times(value, weight, total)
        value = value.to(tl.float32)
        square += value * value
    at = split.to(tl.int64) * rows + t
    tl.store(mixed + at[:, None] * 32 + output[None, :], total, mask=(t < rows)[:, None])
    tl.store(squares + at, tl.sum(square, 1), mask=t < rows)


@triton.jit
def _mix_row(
    x, fn, y, post, comb, out, mixed, squares, rows, hidden,
    WIDE: tl.constexpr, OUTPUTS: tl.constexpr, LEFT: tl.constexpr,
):  # fmt: skip
    """As `_mix` of one row, on which a sub-block's result may be spent first: without the matrix unit nothing
    passes through shared memory."""
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    split = tl.program_id(1)
    output = tl.arange(0, 32)[:, None]
    channel = split * WIDE + tl.arange(0, WIDE)[None, :]
    held = channel < hidden
    at = row[:, None] * 4 * hidden + channel
    rest = held & (output < OUTPUTS)
    w_at = fn + output * 4 * hidden + channel
    w0 = tl.load(w_at, mask=rest, other=0.0)
    w1 = tl.load(w_at + hidden, mask=rest, other=0.0)
    w2 = tl.load(w_at + 2 * hidden, mask=rest, other=0.0)
    w3 = tl.load(w_at + 3 * hidden, mask=rest, other=0.0)
    await_previous()
    s0 = tl.load(x + at, mask=held, other=0.0)
    s1 = tl.load(x + at + hidden, mask=held, other=0.0)
    s2 = tl.load(x + at + 2 * hidden, mask=held, other=0.0)
    s3 = tl.load(x + at + 3 * hidden, mask=held, other=0.0)
    if LEFT:
        own = tl.load(y + row[:, None] * hidden + channel, mask=held, other=0.0)
        p0, a0, b0, c0, d0 = way(post, comb, row, 0)
        p1, a1, b1, c1, d1 = way(post, comb, row, 1)
        p2, a2, b2, c2, d2 = way(post, comb, row, 2)
        p3, a3, b3, c3, d3 = way(post, comb, row, 3)
        n0 = left(own, s0, s1, s2, s3, p0, a0, b0, c0, d0, out.dtype.element_ty)
        n1 = left(own, s0, s1, s2, s3, p1, a1, b1, c1, d1, out.dtype.element_ty)
        n2 = left(own, s0, s1, s2, s3, p2, a2, b2, c2, d2, out.dtype.element_ty)
        n3 = left(own, s0, s1, s2, s3, p3, a3, b3, c3, d3, out.dtype.element_ty)
        s0, s1, s2, s3 = n0, n1, n2, n3
        tl.store(out + at, s0, mask=held)
        tl.store(out + at + hidden, s1, mask=held)
        tl.store(out + at + 2 * hidden, s2, mask=held)
        tl.store(out + at + 3 * hidden, s3, mask=held)
    f0, f1, f2, f3 = s0.to(tl.float32), s1.to(tl.float32), s2.to(tl.float32), s3.to(tl.float32)
    part = split.to(tl.int64) * rows + row
    total = tl.sum(w0 * f0 + w1 * f1 + w2 * f2 + w3 * f3, 1)
    tl.store(mixed + part * 32 + tl.arange(0, 32), total)
    tl.store(squares + part, tl.sum(f0 * f0 + f1 * f1 + f2 * f2 + f3 * f3, 1))


def mix_shape(rows: int, hidden: int, multiprocessors: int) -> MixShape:
    """A cut for so many rows: enough programs to fill the device, few enough to read the weights rarely."""
    if rows <= ALONE_ROWS:
        return MixShape(1, ALONE_CHANNELS, triton.cdiv(hidden, ALONE_CHANNELS), 4, 1)
    return block_shape(rows, multiprocessors)


def block_shape(rows: int, multiprocessors: int) -> MixShape:
    """As `mix_shape`, with rows in blocks for the matrix unit."""
    block = MIX_ROWS if rows <= 64 else 4 * MIX_ROWS
    blocks, split = triton.cdiv(rows, block), 1
    while split < MAX_SPLIT and blocks * split < multiprocessors:
        split *= 2
    return MixShape(block, MIX_CHANNELS, split, 4, 3)


def mix(
    streams: Tensor, fn: Tensor, result: Result | None = None, shape: MixShape | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Products of streams [T, 4, H] with fn [n <= 32, 4 H] and sums of squares, in parts to be added.

    result   of a sub-block, which enters the streams first; of a shape of one row alone
    returns  the streams then, [parts, T, 32], of which the first n are filled, and [parts, T], float32
    """
    (rows, _, hidden), device = streams.shape, streams.device
    cut = shape or mix_shape(rows, hidden, multiprocessors(device))
    # A program sums over parts that are a power of two.
    split = triton.next_power_of_2(cut.split)
    make = torch.empty if split == cut.split else torch.zeros
    mixed, squares = make(split, rows, 32, device=device), make(split, rows, device=device)
    out = streams if result is None else torch.empty_like(streams)
    if cut.rows == 1:
        y, post, comb = (streams,) * 3 if result is None else (result.y, result.post, result.comb)
        _mix_row[(rows, cut.split)](
            streams, fn, y, post, comb, out, mixed, squares, rows, hidden, cut.wide, len(fn),
            result is not None, num_warps=cut.warps, **ahead(rows),
        )  # fmt: skip
    else:
        assert result is None
        _mix[(triton.cdiv(rows, cut.rows), cut.split)](
            streams, fn, mixed, squares, rows, 4 * hidden, cut.split, cut.rows, cut.wide, len(fn),
            num_warps=cut.warps, num_stages=cut.stages, **ahead(rows),
        )  # fmt: skip
    return out, mixed, squares
