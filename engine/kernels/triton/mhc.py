"""Manifold-constrained hyper-connections: mixing weights, Sinkhorn, collapse and norm; and the way back.

Source: DeepSeek-V4's reference formulas, which `TorchOps.mhc_pre` and `mhc_post` state.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.errors import ShapeMismatch
from engine.kernels.triton.formats import convert, product, sigmoid
from engine.kernels.triton.linear import multiprocessors
from engine.model.weights import MhcWeights

STREAMS = 4
MIX_ROWS, MIX_CHANNELS = 16, 64
MAX_SPLIT = 64


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
def _pick(values, lane, i):
    return tl.sum(tl.where(lane == i, values, 0.0), 0)


@triton.jit
def _softmax(a, b, c, d, eps):
    top = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    a, b, c, d = tl.exp(a - top), tl.exp(b - top), tl.exp(c - top), tl.exp(d - top)
    total = a + b + c + d
    return a / total + eps, b / total + eps, c / total + eps, d / total + eps


@triton.jit
def _unit(a, b, c, d, eps):
    turn = 1.0 / (a + b + c + d + eps)
    return a * turn, b * turn, c * turn, d * turn


@triton.jit
def _gates(
    mixed, squares, scale, base, pre, post, comb, rows, hidden, eps, hc_eps,
    ITERATIONS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, 32)
    at = tl.arange(0, SPLIT).to(tl.int64) * rows + row
    turn = tl.rsqrt(tl.sum(tl.load(squares + at), 0) / (4 * hidden) + eps)
    mix = tl.sum(tl.load(mixed + at[:, None] * 32 + lane[None, :]), 0) * turn
    used = lane < 24
    mix = mix * tl.load(scale + lane, mask=used, other=0.0) + tl.load(base + lane, mask=used, other=0.0)
    gate = sigmoid(mix)
    tl.store(pre + row * 4 + lane, gate + hc_eps, mask=lane < 4)
    tl.store(post + row * 4 + lane - 4, 2.0 * gate, mask=(lane >= 4) & (lane < 8))
    # One value a register: sixteen of them need no exchange between lanes.
    a0, a1, a2, a3 = _pick(mix, lane, 8), _pick(mix, lane, 9), _pick(mix, lane, 10), _pick(mix, lane, 11)
    b0, b1, b2, b3 = _pick(mix, lane, 12), _pick(mix, lane, 13), _pick(mix, lane, 14), _pick(mix, lane, 15)
    c0, c1, c2, c3 = _pick(mix, lane, 16), _pick(mix, lane, 17), _pick(mix, lane, 18), _pick(mix, lane, 19)
    d0, d1, d2, d3 = _pick(mix, lane, 20), _pick(mix, lane, 21), _pick(mix, lane, 22), _pick(mix, lane, 23)
    a0, a1, a2, a3 = _softmax(a0, a1, a2, a3, hc_eps)
    b0, b1, b2, b3 = _softmax(b0, b1, b2, b3, hc_eps)
    c0, c1, c2, c3 = _softmax(c0, c1, c2, c3, hc_eps)
    d0, d1, d2, d3 = _softmax(d0, d1, d2, d3, hc_eps)
    a0, b0, c0, d0 = _unit(a0, b0, c0, d0, hc_eps)
    a1, b1, c1, d1 = _unit(a1, b1, c1, d1, hc_eps)
    a2, b2, c2, d2 = _unit(a2, b2, c2, d2, hc_eps)
    a3, b3, c3, d3 = _unit(a3, b3, c3, d3, hc_eps)
    for _ in range(ITERATIONS - 1):
        a0, a1, a2, a3 = _unit(a0, a1, a2, a3, hc_eps)
        b0, b1, b2, b3 = _unit(b0, b1, b2, b3, hc_eps)
        c0, c1, c2, c3 = _unit(c0, c1, c2, c3, hc_eps)
        d0, d1, d2, d3 = _unit(d0, d1, d2, d3, hc_eps)
        a0, b0, c0, d0 = _unit(a0, b0, c0, d0, hc_eps)
        a1, b1, c1, d1 = _unit(a1, b1, c1, d1, hc_eps)
        a2, b2, c2, d2 = _unit(a2, b2, c2, d2, hc_eps)
        a3, b3, c3, d3 = _unit(a3, b3, c3, d3, hc_eps)
    out = comb + row * 16
    _store(out, a0, a1, a2, a3)
    _store(out + 4, b0, b1, b2, b3)
    _store(out + 8, c0, c1, c2, c3)
    _store(out + 12, d0, d1, d2, d3)


@triton.jit
def _store(at, a, b, c, d):
    tl.store(at, a)
    tl.store(at + 1, b)
    tl.store(at + 2, c)
    tl.store(at + 3, d)


@triton.jit
def _collapse(x, pre, norm, out, hidden, eps, WIDE: tl.constexpr, NORMED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, WIDE)
    held = channel < hidden
    u = tl.zeros((WIDE,), tl.float32)
    for j in tl.static_range(4):
        stream = tl.load(x + (row * 4 + j) * hidden + channel, mask=held, other=0.0).to(tl.float32)
        u += tl.load(pre + row * 4 + j) * stream
    u = convert(u, out.dtype.element_ty).to(tl.float32)
    if NORMED:
        u = u * tl.rsqrt(tl.sum(u * u, 0) / hidden + eps)
        u = u * tl.load(norm + channel, mask=held, other=0.0)
    tl.store(out + row * hidden + channel, convert(u, out.dtype.element_ty), mask=held)


@triton.jit
def _post(y, x, post, comb, out, hidden, WIDE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    held = channel < hidden
    own = tl.load(y + row * hidden + channel, mask=held, other=0.0).to(tl.float32)
    at = row * 4 * hidden + channel
    s0 = tl.load(x + at, mask=held, other=0.0).to(tl.float32)
    s1 = tl.load(x + at + hidden, mask=held, other=0.0).to(tl.float32)
    s2 = tl.load(x + at + 2 * hidden, mask=held, other=0.0).to(tl.float32)
    s3 = tl.load(x + at + 3 * hidden, mask=held, other=0.0).to(tl.float32)
    for k in tl.static_range(4):
        c = comb + row * 16 + k
        value = tl.load(post + row * 4 + k) * own
        value += tl.load(c) * s0 + tl.load(c + 4) * s1 + tl.load(c + 8) * s2 + tl.load(c + 12) * s3
        tl.store(out + at + k * hidden, convert(value, out.dtype.element_ty), mask=held)


def mix(streams: Tensor, fn: Tensor) -> tuple[Tensor, Tensor]:
    """Products of streams [T, 4, H] with fn [n <= 32, 4 H] and sums of squares, in parts to be added.

    returns  [parts, T, 32], of which the first n are filled, and [parts, T], float32
    """
    rows, device = streams.shape[0], streams.device
    block = MIX_ROWS if rows <= 64 else 4 * MIX_ROWS
    blocks, split = triton.cdiv(rows, block), 1
    while split < MAX_SPLIT and blocks * split < multiprocessors(device):
        split *= 2
    mixed = torch.empty(split, rows, 32, device=device)
    squares = torch.empty(split, rows, device=device)
    outputs, columns = fn.shape
    _mix[(blocks, split)](
        streams, fn, mixed, squares, rows, columns, split, block, MIX_CHANNELS, outputs, num_stages=3
    )
    return mixed, squares


def mhc_pre(
    streams: Tensor, mhc: MhcWeights, iterations: int, hc_eps: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Mixing weights of a sub-block and its normalised input, in three kernels.

    streams  [T, 4, H] bfloat16 or float32, contiguous
    mhc      fn [24, 4 H], base and scale [24], norm [H], float32
    returns  (RMSNorm of the collapsed input [T, H] in streams' type, post [T, 4], comb [T, 4, 4] float32)
    raises   ShapeMismatch
    """
    rows, hc, hidden = streams.shape
    if hc != STREAMS or not streams.is_contiguous() or tuple(mhc.fn.shape) != (24, 4 * hidden):
        raise ShapeMismatch(f"streams {tuple(streams.shape)}, fn {tuple(mhc.fn.shape)}; the kernel takes 4")
    device = streams.device
    out = torch.empty(rows, hidden, dtype=streams.dtype, device=device)
    post, comb = torch.empty(rows, 4, device=device), torch.empty(rows, 4, 4, device=device)
    if rows == 0:
        return out, post, comb
    mixed, squares = mix(streams, mhc.fn)
    pre = torch.empty(rows, 4, device=device)
    _gates[(rows,)](
        mixed, squares, mhc.scale, mhc.base, pre, post, comb, rows, hidden, eps, hc_eps, iterations,
        len(mixed), num_warps=1,
    )  # fmt: skip
    wide = triton.next_power_of_2(hidden)
    _collapse[(rows,)](streams, pre, mhc.norm, out, hidden, eps, wide, True, num_warps=8)
    return out, post, comb


def mhc_post(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """post[k] y + sum over j of comb[j, k] streams[j]; [T, 4, H] in streams' type.

    y        [T, H]; streams [T, 4, H]; post [T, 4], comb [T, 4, 4] float32; all contiguous
    raises   ShapeMismatch
    """
    rows, hc, hidden = streams.shape
    if (
        hc != STREAMS
        or tuple(y.shape) != (rows, hidden)
        or not (y.is_contiguous() and streams.is_contiguous())
    ):
        raise ShapeMismatch(f"y {tuple(y.shape)}, streams {tuple(streams.shape)}; the kernel takes 4")
    out = torch.empty_like(streams)
    if rows:
        wide = min(1024, triton.next_power_of_2(hidden))
        _post[(rows, triton.cdiv(hidden, wide))](y, streams, post, comb, out, hidden, wide)
    return out
