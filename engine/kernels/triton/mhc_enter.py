"""The beginning of a sub-block: from products of streams to weights, collapsed and normalised rows.

One kernel has programs of two kinds, which don't wait for each other: some collapse a row, others run
Sinkhorn's rounds, whose weights are wanted at the sub-block's end alone. Of many rows each kind has a launch
of its own, and as many warps as suit it.
Source: DeepSeek-V4's reference formulas, which `TorchOps.mhc_pre` and `collapse` state.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.triton.coded import coded
from engine.kernels.triton.formats import INTERPRETED, convert, sigmoid
from engine.kernels.triton.launch import await_previous

BOTH, GATE, COLLAPSE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Kinds of programs that a launch has."""


@triton.jit
def _pick(values, lane, i):
    """Column i of values [R, 32]."""
    return tl.sum(tl.where(lane == i, values, 0.0), 1)


@triton.jit
def _inverse(x):
    """1 / x of a normal x far from the ends of float32, to the last bit: a division looks for those first."""
    if INTERPRETED:
        out = 1.0 / x
    else:
        out = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return out


@triton.jit
def _softmax(a, b, c, d, eps):
    top = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    a, b, c, d = tl.exp(a - top), tl.exp(b - top), tl.exp(c - top), tl.exp(d - top)
    turn = _inverse(a + b + c + d)
    return a * turn + eps, b * turn + eps, c * turn + eps, d * turn + eps


@triton.jit
def _unit(a, b, c, d, eps):
    turn = _inverse((a + b) + (c + d) + eps)
    return a * turn, b * turn, c * turn, d * turn


@triton.jit
def _store(at, a, b, c, d, held):
    tl.store(at, a, mask=held)
    tl.store(at + 1, b, mask=held)
    tl.store(at + 2, c, mask=held)
    tl.store(at + 3, d, mask=held)


@triton.jit
def _gates(
    mixed, squares, scale, base, post, comb, rows, hidden, eps, hc_eps, row,
    ITERATIONS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Stores both weights of the rows [R]."""
    held = row < rows
    lane = tl.arange(0, 32)
    part = tl.arange(0, SPLIT).to(tl.int64)[:, None] * rows + row[None, :]
    at = part[:, :, None] * 32 + lane[None, None, :]
    used = (lane >= 4) & (lane < 24)
    factor = tl.load(scale + lane, mask=used, other=0.0)[None, :]
    shift = tl.load(base + lane, mask=used, other=0.0)[None, :]
    await_previous()
    square = tl.sum(tl.load(squares + part, mask=held[None, :], other=0.0), 0)
    mix = tl.sum(tl.load(mixed + at, mask=held[None, :, None] & used[None, None, :], other=0.0), 0)
    mix = mix * tl.rsqrt(square / (4 * hidden) + eps)[:, None]
    mix = mix * factor + shift
    place = post + row[:, None] * 4 + lane[None, :] - 4
    tl.store(place, 2.0 * sigmoid(mix), mask=held[:, None] & (used & (lane < 8))[None, :])
    # One value a register: sums of four need no exchange between lanes.
    lane = lane[None, :]
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
    _store(out, a0, a1, a2, a3, held)
    _store(out + 4, b0, b1, b2, b3, held)
    _store(out + 8, c0, c1, c2, c3, held)
    _store(out + 12, d0, d1, d2, d3, held)


@triton.jit
def collapsed(
    x, mixed, squares, scale, base, norm, rows, hidden, eps, hc_eps, row,
    SPLIT: tl.constexpr, WIDE: tl.constexpr, NORMED: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """A row's streams as one, normalised if so wanted, in x's type [WIDE].

    SCALES  1: scale has an entry for each stream; 0: one for all
    """
    channel = tl.arange(0, WIDE)
    held = channel < hidden
    lane = tl.arange(0, 4)
    # Weights wait for no kernel.
    factor, shift = tl.load(scale + lane * SCALES), tl.load(base + lane)
    if NORMED:
        weight = tl.load(norm + channel, mask=held, other=0.0)
    await_previous()
    at = x + row * 4 * hidden + channel
    # Streams don't depend on what they will be multiplied by: they are on their way meanwhile.
    s0 = tl.load(at, mask=held, other=0.0)
    s1 = tl.load(at + hidden, mask=held, other=0.0)
    s2 = tl.load(at + 2 * hidden, mask=held, other=0.0)
    s3 = tl.load(at + 3 * hidden, mask=held, other=0.0)
    part = tl.arange(0, SPLIT).to(tl.int64) * rows + row
    turn = tl.rsqrt(tl.sum(tl.load(squares + part), 0) / (4 * hidden) + eps)
    pre = tl.sum(tl.load(mixed + part[:, None] * 32 + lane[None, :]), 0) * turn
    pre = sigmoid(pre * factor + shift) + hc_eps
    u = tl.sum(tl.where(lane == 0, pre, 0.0), 0) * s0.to(tl.float32)
    u += tl.sum(tl.where(lane == 1, pre, 0.0), 0) * s1.to(tl.float32)
    u += tl.sum(tl.where(lane == 2, pre, 0.0), 0) * s2.to(tl.float32)
    u += tl.sum(tl.where(lane == 3, pre, 0.0), 0) * s3.to(tl.float32)
    u = convert(u, x.dtype.element_ty)
    if NORMED:
        wide = u.to(tl.float32)
        wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / hidden + eps)
        u = convert(wide * weight, x.dtype.element_ty)
    return u


@triton.jit
def _entered(
    x, mixed, squares, scale, base, norm, out, codes, scales, rows, hidden, eps, hc_eps, row,
    SPLIT: tl.constexpr, WIDE: tl.constexpr, CODED: tl.constexpr, SIZE: tl.constexpr, FLOOR: tl.constexpr,
):  # fmt: skip
    """Stores a row's normalised input, and its codes if so wanted."""
    u = collapsed(x, mixed, squares, scale, base, norm, rows, hidden, eps, hc_eps, row, SPLIT, WIDE, True, 1)
    channel = tl.arange(0, WIDE)
    tl.store(out + row * hidden + channel, u, mask=channel < hidden)
    if CODED:
        code, powers = coded(u, WIDE, SIZE, FLOOR)
        tl.store(codes + row * hidden + channel, code, mask=channel < hidden)
        group, groups = tl.arange(0, WIDE // SIZE), hidden // SIZE
        tl.store(scales + row * groups + group, powers, mask=group < groups)


@triton.jit
def _enter(
    x, mixed, squares, scale, base, norm, out, codes, scales, post, comb, rows, hidden, eps, hc_eps,
    ITERATIONS: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
    CODED: tl.constexpr, SIZE: tl.constexpr, FLOOR: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    # Sinkhorn's programs take longest: they come first.
    gating = tl.cdiv(rows, ROWS)
    first = program * ROWS + tl.arange(0, ROWS)
    if KIND == GATE:
        _gates(
            mixed, squares, scale, base, post, comb, rows, hidden, eps, hc_eps, first, ITERATIONS, SPLIT
        )  # fmt: skip
    elif KIND == COLLAPSE:
        _entered(
            x, mixed, squares, scale, base, norm, out, codes, scales, rows, hidden, eps, hc_eps, program,
            SPLIT, WIDE, CODED, SIZE, FLOOR,
        )  # fmt: skip
    elif program < gating:
        _gates(
            mixed, squares, scale, base, post, comb, rows, hidden, eps, hc_eps, first, ITERATIONS, SPLIT
        )  # fmt: skip
    else:
        _entered(
            x, mixed, squares, scale, base, norm, out, codes, scales, rows, hidden, eps, hc_eps,
            program - gating, SPLIT, WIDE, CODED, SIZE, FLOOR,
        )  # fmt: skip
