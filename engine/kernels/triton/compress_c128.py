"""The c128 entries that close in a step: pooled, normalised, rotated, rounded and stored, in one kernel.

One form for windows whose 128 rows are all in the step and for those that a slot's running state began: a
softmax whose maximum, sum and weighted latent are carried on from rows to rows, as `TorchOps.fold` does.
Source: DeepSeek-V4's non-overlapping compressor; `engine.model.compressor.close_c128` states it.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.errors import ShapeMismatch
from engine.kernels.triton.compress_entry import (
    CODED,
    latent_rows,
    normed,
    rotated,
    store_latent,
    turn_pairs,
)
from engine.kernels.triton.faults import LENGTH, OUT_ROW, SLOT, STEP_ROW, flag, report
from engine.kernels.triton.launch import ahead, await_previous
from engine.model.compressor import EMPTY_MAX
from engine.model.step import C128Entries

ROWS = 16
"""Step rows that are folded at once. One at a time: how a window was cut into steps changes no bit."""
LISTS = ["slots", "fresh", "firsts", "counts", "out_rows"]
"""Of a step: they begin where their upload put them."""


@triton.jit
def folded(
    top, total, value, pending, first, count, channel, width, ROWS: tl.constexpr
):  # fmt: skip
    """Running maximum, sum and weighted latent [C] after step rows first..first + count - 1."""
    held = (channel < width)[None, :]
    for begin in range(0, count, ROWS):
        lane = begin + tl.arange(0, ROWS)
        live = (lane < count)[:, None] & held
        at = pending + (first + lane)[:, None] * (2 * width) + channel[None, :]
        score = tl.load(at + width, mask=live, other=float("-inf"))
        latent = tl.load(at, mask=live, other=0.0)
        higher = tl.maximum(top, tl.max(score, 0))
        kept = tl.exp(top - higher)
        weight = tl.exp(score - higher[None, :])
        total = total * kept + tl.sum(weight, 0)
        value = value * kept + tl.sum(weight * latent, 0)
        top = higher
    return top, total, value


@triton.jit
def begun(states, fresh, channel, width, EMPTY: tl.constexpr):
    """Maximum, sum and weighted latent [C] of the state at `states`; of an empty one where it is `fresh`."""
    held = channel < tl.where(fresh != 0, 0, width)
    top = tl.load(states + channel, mask=held, other=EMPTY)
    total = tl.load(states + width + channel, mask=held, other=0.0)
    value = tl.load(states + 2 * width + channel, mask=held, other=0.0)
    return top, total, value


@triton.jit(do_not_specialize=["step_rows"], do_not_specialize_on_alignment=LISTS)
def _close_c128(
    states, pending, slots, fresh, firsts, counts, out_rows, turns, norm, faults, pool,
    slot_count, step_rows, pool_rows, width, nope, half, row_size, scales_at, eps,
    FORM: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, WINDOW: tl.constexpr, EMPTY: tl.constexpr,
):  # fmt: skip
    await_previous()
    entry = tl.program_id(0).to(tl.int64)
    out_row = tl.load(out_rows + entry).to(tl.int64)
    if (out_row == 0) | (out_row == -1):
        return
    slot = tl.load(slots + entry).to(tl.int64)
    first = tl.load(firsts + entry).to(tl.int64)
    count = tl.load(counts + entry).to(tl.int32)
    bits = flag((slot < 0) | (slot >= slot_count), SLOT) | flag((count < 1) | (count > WINDOW), LENGTH)
    bits |= flag((first < 0) | (first + count > step_rows), STEP_ROW)
    bits |= flag((out_row < 0) | (out_row >= pool_rows), OUT_ROW)
    report(faults, bits)
    if bits != 0:
        return
    DTYPE: tl.constexpr = tl.bfloat16 if FORM == CODED else pool.dtype.element_ty
    channel = tl.arange(0, WIDE)
    top, total, value = begun(
        states + slot * 3 * width, tl.load(fresh + entry).to(tl.int32), channel, width, EMPTY
    )
    top, total, value = folded(top, total, value, pending, first, count, channel, width, ROWS)
    value = value / tl.where(channel < width, total, 1.0)
    value = normed(value, norm, width, eps, DTYPE, WIDE)
    value = rotated(value, turns + entry * (2 * half), width, half, DTYPE, WIDE)
    store_latent(value, pool, out_row, width, nope, row_size, scales_at, FORM, WIDE)


def close_c128(
    states: Tensor, pending: Tensor, entries: C128Entries, turns: Tensor, norm: Tensor, eps: float,
    pool: Tensor, faults: Tensor, simulated: bool, together: int = ROWS,
) -> None:  # fmt: skip
    """Writes the c128 entries of windows that close in the step to their pool; states stay as they are.

    states   [S, 3, D] float32: running maximum, sum of weights, weighted latent
    pending  [T, 2 D] float32: latent, then score
    entries  columns int32 or int64; an out_row of 0 or -1 is padding: nothing is read or written for it
    turns    complex64 [E, 1, r / 2], at the entries' positions
    norm     [D] float32
    pool     as `latent_rows` takes it, with `simulated`
    faults   int32 [1]: SLOT, STEP_ROW, LENGTH and OUT_ROW are added; an entry with a fault isn't written
    together step rows that are folded at once, a power of two
    raises   ShapeMismatch
    """
    count, half, width = entries.out_rows.shape[0], turns.shape[-1], norm.shape[0]
    if tuple(states.shape[1:]) != (3, width) or pending.shape[1] != 2 * width or turns.shape[0] != count:
        raise ShapeMismatch(f"states {tuple(states.shape)}, pending {tuple(pending.shape)}, {width} channels")
    if not (states.is_contiguous() and pending.is_contiguous()):
        raise ShapeMismatch("states and pending must be contiguous")
    way = latent_rows(pool, width, width - 2 * half, simulated)
    if not count:
        return
    _close_c128[(count,)](
        states, pending, entries.slots, entries.fresh.view(torch.uint8), entries.firsts, entries.counts,
        entries.out_rows, turn_pairs(turns), norm, faults, pool, states.shape[0], pending.shape[0],
        pool.shape[0], width, width - 2 * half, half, way.row_size, way.scales_at, eps, way.form, way.wide,
        together, 128, EMPTY_MAX, num_warps=8, **ahead(count),
    )  # fmt: skip
