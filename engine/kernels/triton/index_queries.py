"""The indexer's queries on their way to scoring: rotation, Hadamard transform and rounding in one pass.

Keys get the same where they are stored (`compress_entry.store_key`): a transform of both changes no product.
Source: DeepSeek-V4's indexer; `TorchOps.rotate` and `Rounding.index` state it, FP8 codes aside.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.errors import ShapeMismatch
from engine.kernels.triton.compress_entry import FLOOR, KEY_GROUP, e2m1_rounded
from engine.kernels.triton.formats import convert, product, to_e4m3
from engine.kernels.triton.launch import ahead, await_previous
from engine.kernels.triton.rope import turned

ROWS = 64
"""Vectors of a program: the matrix unit's side."""


@triton.jit
def _signs(WIDE: tl.constexpr):
    """The Hadamard matrix [WIDE, WIDE] of ones and minus ones, bfloat16; WIDE at most 256."""
    lane = tl.arange(0, WIDE)
    both = lane[:, None] & lane[None, :]
    both = both ^ (both >> 4)
    both = both ^ (both >> 2)
    both = both ^ (both >> 1)
    return (1 - 2 * (both & 1)).to(tl.float32).to(tl.bfloat16)


@triton.jit(do_not_specialize=["rows"])
def _round_queries(
    q, turns, weights, taken, out, scaled, rows, heads, first, rotary, turn_stride, weight_stride, factor,
    ROWS: tl.constexpr, WIDE: tl.constexpr, GROUP: tl.constexpr, CODED: tl.constexpr, TAKEN: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    held = row < rows
    channel = tl.arange(0, WIDE)[None, :]
    at = row[:, None] * WIDE + channel
    token, source = row // heads, row
    await_previous()
    if TAKEN:
        token = tl.load(taken + token, mask=held, other=0)
        source = token * heads + row % heads
    value = tl.load(q + source[:, None] * WIDE + channel, mask=held[:, None], other=0.0).to(tl.float32)
    value = turned(value, turns + (token * turn_stride)[:, None], first, rotary, held, WIDE)
    value = product(convert(value, tl.bfloat16), _signs(WIDE), None) * factor
    value = convert(value, tl.bfloat16).to(tl.float32)
    if CODED:
        scale = tl.maximum(tl.max(tl.abs(value), 1), FLOOR) / 448.0
        codes = to_e4m3(value / scale[:, None], tl.zeros((1, 1), tl.int32))
        tl.store(out + at, codes, mask=held[:, None])
        weight = tl.load(weights + source, mask=held, other=0.0)
        for part in tl.static_range(1, PARTS):
            weight += tl.load(weights + part * weight_stride + source, mask=held, other=0.0)
        tl.store(scaled + row, weight * scale, mask=held)
    else:
        value = e2m1_rounded(tl.reshape(value, (ROWS * WIDE,)), ROWS * WIDE, GROUP)
        near = tl.reshape(convert(value, tl.bfloat16), (ROWS, WIDE))
        tl.store(out + at, near, mask=held[:, None])


def round_queries(q: Tensor, turns: Tensor, rows: Tensor | None = None) -> Tensor:
    """Rotated and transformed queries as FP4 with a power-of-two scale for 32 channels would give them back.

    q        bfloat16 [T, heads, Di], Di a power of two from 32 to 256
    turns    complex64 [T, 1, r / 2]
    rows     [n] int64, below T: the result has these rows; None: all
    returns  bfloat16 [n, heads, Di]
    raises   ShapeMismatch
    """
    out = q.new_empty(len(q if rows is None else rows), *q.shape[1:])
    _run(q, turns, None, rows, out, None)
    return out


def code_queries(
    q: Tensor, turns: Tensor, weights: Tensor, rows: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Rotated and transformed queries in FP8, and weights of heads that their scales are folded into.

    q, turns and rows  as `round_queries` takes them
    weights            float32 [T, heads], or in parts [P, T, heads] to be added up
    returns            float8_e4m3fn [n, heads, Di], float32 [n, heads]: what `index_scores` takes with keys
                       that are coded
    raises             ShapeMismatch
    """
    count = len(q if rows is None else rows)
    out = q.new_empty(count, *q.shape[1:], dtype=torch.float8_e4m3fn)
    scaled = weights.new_empty(count, weights.shape[-1])
    _run(q, turns, weights if weights.dim() == 3 else weights.unsqueeze(0), rows, out, scaled)
    return out, scaled


def _run(
    q: Tensor, turns: Tensor, weights: Tensor | None, taken: Tensor | None, out: Tensor, scaled: Tensor | None
) -> None:
    tokens, heads, wide = q.shape
    rotary = 2 * turns.shape[-1]
    fits = weights is None or (tuple(weights.shape[1:]) == (tokens, heads) and weights.is_contiguous())
    if (
        wide % KEY_GROUP or wide & (wide - 1) or wide > 256 or q.dtype != torch.bfloat16 or rotary > wide
        or not q.is_contiguous() or tuple(turns.shape[:-1]) != (tokens, 1) or not fits
    ):  # fmt: skip
        raise ShapeMismatch(f"q {q.dtype} {tuple(q.shape)}, turns {tuple(turns.shape)}")
    rows = len(out) * heads
    if not rows:
        return
    pairs = torch.view_as_real(turns.squeeze(1).contiguous())
    _round_queries[(triton.cdiv(rows, ROWS),)](
        q, pairs, weights, taken, out, scaled, rows, heads, wide - rotary, rotary, pairs.stride(0),
        tokens * heads, wide**-0.5, ROWS, wide, KEY_GROUP, weights is not None, taken is not None,
        1 if weights is None else len(weights), **ahead(len(out)),
    )  # fmt: skip
