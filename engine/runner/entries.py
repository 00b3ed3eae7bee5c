"""The compressed entries that close in a step, and where their tokens' raw rows are."""

from __future__ import annotations

import numpy as np

from engine.memory.pools import KVState
from engine.model.config import C4, C128, PAGE_TOKENS
from engine.model.step import C4Entries, C128Entries
from engine.runner.columns import Int, RowColumns, Upload, by_width


def closing(columns: RowColumns, ratio: int) -> tuple[Int, Int]:
    """(request, window) of every window of `ratio` tokens that closes in the step."""
    first = columns.starts // ratio
    closes = (columns.starts + columns.counts) // ratio - first
    request = np.repeat(np.arange(closes.size), closes)
    window = np.arange(request.size) - (np.cumsum(closes) - closes - first)[request]
    return request, window


def entry_rows(state: KVState, slots: Int, window: Int, ratio: int) -> Int:
    """Flat pool rows of compressed entries."""
    rows = PAGE_TOKENS // ratio
    return state.full_table[slots, window // rows].astype(np.int64) * rows + window % rows


def plan_c4(state: KVState, columns: RowColumns, to: Upload) -> C4Entries | None:
    """Sources of the c4 entries that close; None where there are none."""
    request, window = closing(columns, C4)
    if not request.size or not state.specs["c4"].layers:
        return None
    item = np.arange(2 * C4)
    position = window[:, None] * C4 - C4 + item
    start, count = columns.starts[request, None], columns.slots.size * 2 * C4
    in_ring = request[:, None] * 2 * C4 + position % (2 * C4)
    in_step = count + columns.first_rows[request, None] + position - start
    halves = 2 * np.where(position < start, in_ring, in_step) + (item >= C4)
    absent = position < 0
    # An absent item reads the window's own first one: stale ring rows may hold another request's numbers.
    halves = np.where(absent, halves[:, C4 : C4 + 1], halves)
    slots = columns.slots[request]
    bias = np.where(absent, -np.inf, 0.0).astype(np.float32)[:, :, None]
    ring = (columns.slots[:, None] * 2 * C4 + item).ravel()
    return C4Entries(
        to.int64(ring),
        to.int64(halves),
        to.tensor(bias),
        to.int64(window * C4),
        to.int64(entry_rows(state, slots, window, C4)),
    )


def plan_c128(state: KVState, columns: RowColumns, whole: bool, to: Upload) -> tuple[C128Entries, ...]:
    """Sources of the c128 entries that close: one element a width class, or `whole` for all of them."""
    request, window = closing(columns, C128)
    if not request.size or not state.specs["c128"].layers:
        return ()
    begin = np.maximum(window * C128, columns.starts[request])
    taken = (window + 1) * C128 - begin
    slots = columns.slots[request]
    first = columns.first_rows[request] + begin - columns.starts[request]
    out_rows = entry_rows(state, slots, window, C128)
    classes = [(np.arange(request.size), int(taken.max()))] if whole else by_width(taken)
    out = []
    for chosen, width in classes:
        sent = np.stack([column[chosen] for column in (slots, first, taken, out_rows, window * C128)])
        own, firsts, counts, into, positions = to.int64(sent).unbind(0)
        fresh = to.tensor(taken[chosen] == C128)
        out.append(C128Entries(own, fresh, firsts, counts, into, positions, width))
    return tuple(out)
