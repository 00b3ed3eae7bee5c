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
from engine.kernels.triton.formats import convert, sigmoid
from engine.kernels.triton.linear import multiprocessors
from engine.model.weights import MhcWeights

STREAMS = 4
MIX_ROWS, MIX_CHANNELS = 16, 128
MAX_SPLIT = 64


@triton.jit
def _mix(x, fn, mixed, squares, rows, columns, SPLIT: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr):
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(1)
    t_read = tl.where(t < rows, t, 0).to(tl.int64)
    output = tl.arange(0, 32)
    k = tl.arange(0, WIDE)
    steps = tl.cdiv(columns, WIDE)
    share = tl.cdiv(steps, SPLIT)
    total = tl.zeros((ROWS, 32), tl.float32)
    square = tl.zeros((ROWS,), tl.float32)
    for step in range(split * share, tl.minimum((split + 1) * share, steps)):
        channel = step * WIDE + k
        held = (channel < columns)[None, :]
        value = tl.load(x + t_read[:, None] * columns + channel[None, :], mask=held, other=0.0).to(tl.float32)
        weight = tl.load(fn + output[:, None] * columns + channel[None, :], mask=held & (output < 24)[:, None],
                         other=0.0)  # fmt: skip
        total = tl.dot(value, tl.trans(weight), total, input_precision="tf32x3")
        square += tl.sum(value * value, 1)
    at = split.to(tl.int64) * rows + t
    tl.store(mixed + at[:, None] * 32 + output[None, :], total, mask=(t < rows)[:, None])
    tl.store(squares + at, square, mask=t < rows)


@triton.jit
def _pre(
    x, mixed, squares, scale, base, norm, out, post, comb, rows, hidden, eps, hc_eps,
    ITERATIONS: tl.constexpr, SPLIT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    four = tl.arange(0, 4)
    at = tl.arange(0, SPLIT).to(tl.int64) * rows + row
    turn = tl.rsqrt(tl.sum(tl.load(squares + at), 0) / (4 * hidden) + eps)
    first = tl.sum(tl.load(mixed + at[:, None] * 32 + four[None, :]), 0) * turn
    second = tl.sum(tl.load(mixed + at[:, None] * 32 + 4 + four[None, :]), 0) * turn
    cell = 8 + four[:, None] * 4 + four[None, :]
    third = tl.sum(tl.load(mixed + at[:, None, None] * 32 + cell[None, :, :]), 0) * turn
    pre = sigmoid(first * tl.load(scale + four) + tl.load(base + four)) + hc_eps
    gate = 2.0 * sigmoid(second * tl.load(scale + 4 + four) + tl.load(base + 4 + four))
    tl.store(post + row * 4 + four, gate)
    c = third * tl.load(scale + cell) + tl.load(base + cell)
    c = tl.exp(c - tl.max(c, 1)[:, None])
    c = c / tl.sum(c, 1)[:, None] + hc_eps
    c = c / (tl.sum(c, 0)[None, :] + hc_eps)
    for _ in range(ITERATIONS - 1):
        c = c / (tl.sum(c, 1)[:, None] + hc_eps)
        c = c / (tl.sum(c, 0)[None, :] + hc_eps)
    tl.store(comb + row * 16 + four[:, None] * 4 + four[None, :], c)
    channel = tl.arange(0, WIDE)
    held = channel < hidden
    streams = tl.load(x + row * 4 * hidden + four[:, None] * hidden + channel[None, :], mask=held[None, :],
                      other=0.0).to(tl.float32)  # fmt: skip
    u = convert(tl.sum(streams * pre[:, None], 0), out.dtype.element_ty).to(tl.float32)
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


def mhc_pre(
    streams: Tensor, mhc: MhcWeights, iterations: int, hc_eps: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Mixing weights of a sub-block and its normalised input, in two kernels.

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
    blocks = triton.cdiv(rows, MIX_ROWS)
    split = 1
    while split < MAX_SPLIT and blocks * split < multiprocessors(device):
        split *= 2
    mixed = torch.empty(split, rows, 32, device=device)
    squares = torch.empty(split, rows, device=device)
    _mix[(blocks, split)](
        streams, mhc.fn, mixed, squares, rows, 4 * hidden, split, MIX_ROWS, MIX_CHANNELS, num_stages=3
    )
    _pre[(rows,)](
        streams, mixed, squares, mhc.scale, mhc.base, mhc.norm, out, post, comb, rows, hidden, eps, hc_eps,
        iterations, split, triton.next_power_of_2(hidden), num_warps=8,
    )  # fmt: skip
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
