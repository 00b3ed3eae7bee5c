"""The c4 and index entries that close in a step: pooled, normalised, rotated, rounded, stored; one kernel.

Source: DeepSeek-V4's overlapping compressor; `engine.model.compressor.close_c4` states it.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.errors import ShapeMismatch
from engine.kernels.triton.compress_entry import (
    CODED,
    KEY_GROUP,
    IndexPool,
    latent_rows,
    normed,
    rotated,
    store_key,
    store_latent,
    turn_pairs,
)
from engine.kernels.triton.faults import HALF, OUT_ROW, RING_ROW, any_of, flag, report
from engine.kernels.triton.launch import ahead, await_previous
from engine.model.step import C4Entries

ITEMS = 8
LISTS = ["ring_rows", "halves", "bias", "out_rows"]
"""Of a step: they begin where their upload put them."""


@triton.jit
def _pool(ring, pending, ring_at, step_at, in_ring, bias, first, width, both, WIDE: tl.constexpr):
    """Channels from `first` of a window, each its softmax over the items; [WIDE], zero beyond width."""
    channel = tl.arange(0, WIDE)
    held = (channel < width)[None, :]
    ours, theirs = in_ring[:, None] & held, (in_ring == 0)[:, None] & held
    from_ring = ring + ring_at[:, None] + (first + channel)[None, :]
    from_step = pending + step_at[:, None] + (first + channel)[None, :]
    # One of the two addends is zero: a row is in the ring or in the step.
    score = tl.load(from_ring + both, mask=ours, other=0.0) + tl.load(
        from_step + both, mask=theirs, other=0.0
    )
    latent = tl.load(from_ring, mask=ours, other=0.0) + tl.load(from_step, mask=theirs, other=0.0)
    score += bias[:, None]
    weight = tl.exp(score - tl.max(score, 0)[None, :])
    return tl.sum(weight * latent, 0) / tl.sum(weight, 0)


@triton.jit(do_not_specialize=["gathered", "step_rows"], do_not_specialize_on_alignment=LISTS)
def _close_c4(
    ring, ring_rows, pending, halves, bias, turns, out_rows, norm, index_norm, faults,
    pool, keys, key_scales, ring_total, gathered, step_rows, pool_rows,
    width, nope, key_width, half, row_size, scales_at, eps, factor,
    FORM: tl.constexpr, KEY_FORM: tl.constexpr, ITEMS: tl.constexpr, WIDE: tl.constexpr,
    KEY_WIDE: tl.constexpr, STAGES: tl.constexpr, KEY_GROUP: tl.constexpr,
):  # fmt: skip
    await_previous()
    entry = tl.program_id(0).to(tl.int64)
    out_row = tl.load(out_rows + entry).to(tl.int64)
    if (out_row == 0) | (out_row == -1):
        return
    item = tl.arange(0, ITEMS)
    place = tl.load(halves + entry * ITEMS + item).to(tl.int64)
    row, side = place >> 1, place & 1
    known = (row >= 0) & (row < gathered + step_rows)
    in_ring = row < gathered
    source = tl.load(ring_rows + row, mask=known & in_ring, other=0).to(tl.int64)
    bits = flag(any_of(known == 0), HALF) | flag(any_of((source < 0) | (source >= ring_total)), RING_ROW)
    bits |= flag((out_row < 0) | (out_row >= pool_rows), OUT_ROW)
    report(faults, bits)
    if bits != 0:
        return
    both = width + key_width
    ring_at = (2 * source + side) * (2 * both)
    step_at = (2 * (row - gathered) + side) * (2 * both)
    own_bias = tl.load(bias + entry * ITEMS + item)
    own_turns = turns + entry * (2 * half)
    if tl.program_id(1) == 0:
        DTYPE: tl.constexpr = tl.bfloat16 if FORM == CODED else pool.dtype.element_ty
        value = _pool(ring, pending, ring_at, step_at, in_ring, own_bias, 0, width, both, WIDE)
        value = rotated(normed(value, norm, width, eps, DTYPE, WIDE), own_turns, width, half, DTYPE, WIDE)
        store_latent(value, pool, out_row, width, nope, row_size, scales_at, FORM, WIDE)
    else:
        KEY: tl.constexpr = tl.bfloat16 if KEY_FORM == CODED else keys.dtype.element_ty
        key = _pool(ring, pending, ring_at, step_at, in_ring, own_bias, width, key_width, both, KEY_WIDE)
        key = normed(key, index_norm, key_width, eps, KEY, KEY_WIDE)
        key = rotated(key, own_turns, key_width, half, KEY, KEY_WIDE)
        store_key(key, keys, key_scales, out_row, key_width, factor, KEY_FORM, KEY_WIDE, KEY_GROUP, STAGES)


def close_c4(
    ring: Tensor, pending: Tensor, entries: C4Entries, turns: Tensor, norm: Tensor, index_norm: Tensor,
    eps: float, pool: Tensor, keys: IndexPool, faults: Tensor, simulated: bool,
) -> None:  # fmt: skip
    """Writes the c4 and index entries of windows that close in the step to their pools.

    ring     [S 8, 4 (D + Di)] float32; pending [T, 4 (D + Di)] float32
    entries  an out_row of 0 or -1 is padding: nothing is read or written for it
    turns    complex64 [E, 1, r / 2], at the entries' positions
    norm     [D] float32; index_norm [Di]
    pool     as `latent_rows` takes it, with `simulated`; as many rows as the index pool
    faults   int32 [1]: HALF, RING_ROW and OUT_ROW are added; an entry with a fault isn't written
    raises   ShapeMismatch
    """
    count, half = entries.out_rows.shape[0], turns.shape[-1]
    width, key_width = norm.shape[0], index_norm.shape[0]
    both = width + key_width
    items = ITEMS * count
    found = (ring.shape[1], pending.shape[1], entries.halves.numel(), entries.bias.numel(), len(turns))
    if found != (4 * both, 4 * both, items, items, count) or len(keys.values) != len(pool):
        raise ShapeMismatch(f"{count} entries of {width} and {key_width} channels: got {found}")
    if not (ring.is_contiguous() and pending.is_contiguous() and entries.halves.is_contiguous()):
        raise ShapeMismatch("ring, pending and halves must be contiguous")
    way = latent_rows(pool, width, width - 2 * half, simulated)
    keys.check(key_width)
    if not count:
        return
    key_wide = triton.next_power_of_2(key_width)
    _close_c4[(count, 2)](
        ring, entries.ring_rows, pending, entries.halves, entries.bias, turn_pairs(turns), entries.out_rows,
        norm, index_norm, faults, pool, keys.values, keys.values if keys.scales is None else keys.scales,
        ring.shape[0], entries.ring_rows.shape[0], pending.shape[0], pool.shape[0],
        width, width - 2 * half, key_width, half, way.row_size, way.scales_at, eps, key_width**-0.5,
        way.form, keys.form, ITEMS, way.wide, key_wide, key_wide.bit_length() - 1, min(KEY_GROUP, key_wide),
        **ahead(count),
    )  # fmt: skip
