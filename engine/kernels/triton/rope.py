"""RMSNorm of heads and rotary embedding, in place or of chosen rows.

Pairs (2i, 2i + 1) of the last channels turn by unit complex numbers. Each vector is wholly loaded before its
first store, so that input and output may be one. Norm and rotation each round to x's type, as the oracle
(`TorchOps.rms_norm`, then `rotate`) does.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.errors import ShapeMismatch
from engine.kernels.triton.formats import convert
from engine.kernels.triton.launch import ahead, await_previous

ELEMENTS = 4096
"""Values of a program, in as many whole vectors as fit."""


@dataclass(frozen=True)
class Heads:
    """What `q_norm_rope` takes beside queries: turns complex64 [T, 1, r / 2], and eps."""

    turns: Tensor
    eps: float


@triton.jit
def turn_pairs(turns, first, rotary, held, N: tl.constexpr, WIDE: tl.constexpr):
    """Cosine and sine of each pair of N rows [N, WIDE / 2], float32: 1 and 0 of the channels that stay.

    turns   [N, 1] pointers to each row's (cosine, sine) pairs, `rotary` float32 values
    first   even: the first channel that turns; the `rotary` channels from there do
    held    [N] bool: rows that have turns
    """
    channel = tl.arange(0, WIDE)[None, :]
    within = (channel >= first) & (channel < first + rotary) & held[:, None]
    # Laid out as the values are, whose halves then stand beside their cosines: nothing moves between threads.
    by = tl.load(turns + (channel - first), mask=within, other=(1 - channel % 2).to(tl.float32))
    return tl.split(tl.reshape(by, (N, WIDE // 2, 2)))


@triton.jit
def turned_by(value, cosine, sine):
    """value [N, WIDE] float32, its channel pairs rotated by `turn_pairs`."""
    wide: tl.constexpr = value.shape[1]
    rows: tl.constexpr = value.shape[0]
    even, odd = tl.split(tl.reshape(value, (rows, wide // 2, 2)))
    out = tl.join(even * cosine - odd * sine, even * sine + odd * cosine)
    return tl.reshape(out, (rows, wide))


@triton.jit
def turned(value, turns, first, rotary, held, WIDE: tl.constexpr):
    """value [N, WIDE] float32 with the channel pairs from `first` on rotated; the rest as of `turn_pairs`."""
    cosine, sine = turn_pairs(turns, first, rotary, held, value.shape[0], WIDE)
    return turned_by(value, cosine, sine)


@triton.jit(do_not_specialize=["rows"])
def _rotate(
    x, turns, taken, out, rows, heads, first, rotary, columns, eps, token_stride, head_stride, turn_stride,
    ROWS: tl.constexpr, WIDE: tl.constexpr, NORMED: tl.constexpr, TAKEN: tl.constexpr,
):  # fmt: skip
    # Without a norm a program touches the channels that turn, and no others.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token, head = row // heads, row % heads
    channel = tl.arange(0, WIDE)
    held = row < rows
    await_previous()
    if TAKEN:
        token = tl.load(taken + token, mask=held, other=0)
    place = x + (token * token_stride + head * head_stride)[:, None] + channel[None, :]
    inside = held[:, None] & (channel < columns)[None, :]
    # Turns are on their way while heads are summed.
    cosine, sine = turn_pairs(turns + (token * turn_stride)[:, None], first, rotary, held, ROWS, WIDE)
    value = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    if NORMED:
        value = value * tl.rsqrt(tl.sum(value * value, 1) / columns + eps)[:, None]
        value = convert(value, x.dtype.element_ty).to(tl.float32)
    value = turned_by(value, cosine, sine)
    if TAKEN:
        place = out + (row * columns)[:, None] + channel[None, :]
    tl.store(place, convert(value, x.dtype.element_ty), mask=inside)


def rotate(x: Tensor, turns: Tensor) -> None:
    """Rotates in place the pairs (2i, 2i + 1) of the last r channels of each head.

    x       [T, heads, D] bfloat16 or float32, channels contiguous, other strides free
    turns   [T, 1, r / 2] complex64; those of `Turns.plain_back` undo those of `Turns.plain`
    raises  ShapeMismatch
    """
    rotary = 2 * turns.shape[-1]
    _run(x[..., x.shape[-1] - rotary :], _pairs(x, turns), 0, rotary, None, None)


def q_norm_rope(q: Tensor, turns: Tensor, eps: float, rows: Tensor | None = None) -> Tensor:
    """RMSNorm of each head, without weight, then the rotation of its last r channels.

    q        [T, heads, D] bfloat16 or float32, channels contiguous, other strides free
    turns    [T, 1, r / 2] complex64
    rows     [n] int64, below T
    returns  these rows [n, heads, D]; without rows, q, which it was made in
    raises   ShapeMismatch
    """
    rotary = 2 * turns.shape[-1]
    return _run(q, _pairs(q, turns), q.shape[-1] - rotary, rotary, eps, rows)


def _run(
    x: Tensor, pairs: Tensor, first: int, rotary: int, eps: float | None, taken: Tensor | None
) -> Tensor:
    tokens, heads, columns = x.shape if taken is None else (len(taken), *x.shape[1:])
    out = x if taken is None else x.new_empty(tokens, heads, columns)
    wide = triton.next_power_of_2(columns)
    block = max(1, ELEMENTS // wide)
    rows = tokens * heads
    if rows:
        _rotate[(triton.cdiv(rows, block),)](
            x, pairs, taken, out, rows, heads, first, rotary, columns, eps or 0.0, x.stride(0), x.stride(1),
            pairs.stride(0), block, wide, eps is not None, taken is not None, num_warps=4, **ahead(tokens),
        )  # fmt: skip
    return out


def _pairs(x: Tensor, turns: Tensor) -> Tensor:
    """turns as float32 [T, r / 2, 2]. raises ShapeMismatch where x doesn't fit."""
    if (
        x.dim() != 3
        or x.stride(2) != 1
        or x.shape[2] % 2
        or tuple(turns.shape[:-1]) != (x.shape[0], 1)
        or 2 * turns.shape[-1] > x.shape[2]
        or turns.dtype != torch.complex64
    ):
        raise ShapeMismatch(
            f"x is {tuple(x.shape)}, strides {x.stride()}; turns are {turns.dtype} {tuple(turns.shape)}; "
            "takes [T, heads, D] with D even and contiguous, and complex64 [T, 1, at most D / 2]"
        )
    return torch.view_as_real(turns.squeeze(1).contiguous())
