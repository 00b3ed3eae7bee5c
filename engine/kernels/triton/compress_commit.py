"""Folding committed rows into the slots' state, in place: c128 states and c4 rings, of all layers at once.

Any number of a request's rows may be committed, none included. Source: `engine.memory.commit` states both.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from engine.errors import ShapeMismatch
from engine.kernels.triton.compress_c128 import begun, folded
from engine.kernels.triton.faults import LENGTH, SLOT, STEP_ROW, flag, report
from engine.model.compressor import EMPTY_MAX

RING, WINDOW, CHANNELS = 8, 128, 512
COLUMNS = ["slots", "starts", "firsts", "counts", "lens"]
ROWS = 8
"""Step rows that are folded at once, as in `compress_c128`: as many as a verified draft has."""


@dataclass(frozen=True)
class Committed:
    """What a step commits of each request; int32 or int64 [B], on the device, no two of the same slot.

    slots   request slots; -1 is padding
    starts  the position of each request's first row in the step, and firsts its step row
    counts  rows that the request has in the step; lens: how many of them, from the first, are committed
    """

    slots: Tensor
    starts: Tensor
    firsts: Tensor
    counts: Tensor
    lens: Tensor


@triton.jit
def _request(slots, starts, firsts, counts, lens, faults, request, slot_count, step_rows):
    """Slot, start, first step row and committed length of a request; length -1: nothing to do."""
    slot = tl.load(slots + request).to(tl.int64)
    start = tl.load(starts + request).to(tl.int64)
    first = tl.load(firsts + request).to(tl.int64)
    length = tl.load(lens + request).to(tl.int32)
    bits = flag((slot < 0) | (slot >= slot_count), SLOT)
    bits |= flag((first < 0) | (first + length > step_rows), STEP_ROW)
    bits |= flag((start < 0) | (length < 0) | (length > tl.load(counts + request)), LENGTH)
    bits = tl.where(slot == -1, 0, bits)
    report(faults, bits)
    return slot, start, first, tl.where((slot == -1) | (bits != 0), -1, length)


@triton.jit(do_not_specialize=["step_rows"], do_not_specialize_on_alignment=COLUMNS)
def _commit_c128(
    states, pending, slots, starts, firsts, counts, lens, faults, slot_count, step_rows, width,
    WIDE: tl.constexpr, ROWS: tl.constexpr, WINDOW: tl.constexpr, EMPTY: tl.constexpr,
):  # fmt: skip
    layer = tl.program_id(1).to(tl.int64)
    slot, start, first, length = _request(
        slots, starts, firsts, counts, lens, faults, tl.program_id(0), slot_count, step_rows
    )
    if length < 0:
        return
    opened = (start + length) // WINDOW * WINDOW
    begin = tl.maximum(opened - start, 0).to(tl.int32)
    fresh = opened >= start
    if (begin == length) & (fresh == 0):
        return
    channel = tl.program_id(2) * WIDE + tl.arange(0, WIDE)
    at = states + (layer * slot_count + slot) * 3 * width
    top, total, value = begun(at, fresh.to(tl.int32), channel, width, EMPTY)
    rows = pending + layer * step_rows * 2 * width
    top, total, value = folded(top, total, value, rows, first + begin, length - begin, channel, width, ROWS)
    held = channel < width
    tl.store(at + channel, top, mask=held)
    tl.store(at + width + channel, total, mask=held)
    tl.store(at + 2 * width + channel, value, mask=held)


@triton.jit(do_not_specialize=["step_rows"], do_not_specialize_on_alignment=COLUMNS)
def _commit_c4(
    ring, pending, slots, starts, firsts, counts, lens, faults, slot_count, step_rows, width,
    WIDE: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    layer = tl.program_id(1).to(tl.int64)
    request, item = tl.program_id(0) // RING, tl.program_id(0) % RING
    slot, start, first, length = _request(
        slots, starts, firsts, counts, lens, faults, request, slot_count, step_rows
    )
    # The last rows of the request, at most as many as the ring holds.
    step = length - RING + item
    if step < 0:
        return
    channel = tl.program_id(2) * WIDE + tl.arange(0, WIDE)
    held = channel < width
    row = tl.load(pending + (layer * step_rows + first + step) * width + channel, mask=held)
    place = slot * RING + (start + step) % RING
    tl.store(ring + (layer * slot_count * RING + place) * width + channel, row, mask=held)


def commit_c128(
    states: Tensor, pending: Tensor, step: Committed, faults: Tensor, together: int = ROWS
) -> None:
    """Folds the committed rows of each request's open window into its state, in place.

    states   [L, S, 3, D] float32: running maximum, sum of weights, weighted latent
    pending  [L, T, 2 D] float32: latent, then score
    faults   int32 [1]: SLOT, STEP_ROW and LENGTH are added; a request with a fault changes nothing
    together step rows that are folded at once, a power of two
    raises   ShapeMismatch
    """
    layers, slot_count, _, width = states.shape
    if tuple(pending.shape[::2]) != (layers, 2 * width) or states.shape[2] != 3:
        raise ShapeMismatch(f"states {tuple(states.shape)}, pending {tuple(pending.shape)}")
    _check(states, pending, step)
    if layers and step.slots.shape[0]:
        wide = min(CHANNELS, triton.next_power_of_2(width))
        _commit_c128[(step.slots.shape[0], layers, triton.cdiv(width, wide))](
            states, pending, step.slots, step.starts, step.firsts, step.counts, step.lens, faults, slot_count,
            pending.shape[1], width, wide, together, WINDOW, EMPTY_MAX,
        )  # fmt: skip


def commit_c4(ring: Tensor, pending: Tensor, step: Committed, faults: Tensor) -> None:
    """Writes the last (at most eight) committed rows of each request to their position mod 8.

    ring     [L, S 8, C] float32; pending [L, T, C] float32
    faults   int32 [1]: SLOT, STEP_ROW and LENGTH are added; a request with a fault changes nothing
    raises   ShapeMismatch
    """
    layers, rows, width = ring.shape
    if tuple(pending.shape[::2]) != (layers, width) or rows % RING:
        raise ShapeMismatch(f"ring {tuple(ring.shape)}, pending {tuple(pending.shape)}")
    _check(ring, pending, step)
    if layers and step.slots.shape[0]:
        wide = min(2 * CHANNELS, triton.next_power_of_2(width))
        _commit_c4[(step.slots.shape[0] * RING, layers, triton.cdiv(width, wide))](
            ring, pending, step.slots, step.starts, step.firsts, step.counts, step.lens, faults, rows // RING,
            pending.shape[1], width, wide, RING,
        )  # fmt: skip


def _check(state: Tensor, pending: Tensor, step: Committed) -> None:
    columns = (step.slots, step.starts, step.firsts, step.counts, step.lens)
    if len({column.shape for column in columns}) != 1 or any(
        not column.is_contiguous() for column in columns
    ):
        raise ShapeMismatch(f"columns of {[tuple(column.shape) for column in columns]}")
    if not (state.is_contiguous() and pending.is_contiguous()):
        raise ShapeMismatch("states and pending must be contiguous")
