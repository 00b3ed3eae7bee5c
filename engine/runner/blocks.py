"""Query blocks: which rows share gathered keys, and which keys each of them sees."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.memory.pools import KVState
from engine.model.config import C4, C128, PAGE_TOKENS
from engine.model.step import QueryBlocks
from engine.runner.columns import Int, RowColumns, Upload

# (Longest request in rows of the step, block width) of each class. A block of W rows gathers W + 127 window
# keys: 32 rows read 1.25 times the keys that they need, 128 rows would read twice.
CLASSES = ((1, 1), (8, 8), (1 << 31, 32))


def plan_blocks(
    state: KVState, columns: RowColumns, single_rows: bool, to: Upload
) -> tuple[tuple[QueryBlocks, ...], Int | None]:
    """The step's query blocks and the place of each row in them (None: in order)."""
    request, slot_of, position = columns.request, columns.row_slots, columns.position
    real = request >= 0
    if single_rows or request.size == columns.slots.size:
        return (_blocks(state, slot_of, position[:, None], real[:, None], None, to),), None
    # A padded row is a request of its own that sees nothing: blocks take whatever rows they get.
    counts = np.concatenate([columns.counts, np.ones(request.size - int(real.sum()), np.int64)])
    rows_of = [rows for longest, width in CLASSES if (rows := _rows_of_class(counts, longest, width)).size]
    in_order = len(rows_of) == 1 and rows_of[0].size == request.size
    blocks = []
    for rows in rows_of:
        chosen = None if in_order else to.int64(np.maximum(rows, 0).ravel())
        sees = (rows >= 0) & real[rows]
        blocks.append(_blocks(state, slot_of[rows[:, 0]], position[rows], sees, chosen, to))
    if in_order:
        return tuple(blocks), None
    places = np.concatenate([rows.ravel() for rows in rows_of])
    own = np.flatnonzero(places >= 0)
    place = np.empty(request.size, dtype=np.int64)
    place[places[own]] = own
    return tuple(blocks), place


def _rows_of_class(counts: Int, longest: int, width: int) -> Int:
    """Step rows [blocks, W] of the requests that belong to class (longest, width), -1 for padding."""
    shorter = max((reach for reach, _ in CLASSES if reach < longest), default=0)
    chosen = np.flatnonzero((counts > shorter) & (counts <= longest))
    pieces = -(-counts[chosen] // width)
    owner = np.repeat(chosen, pieces)
    piece = np.arange(owner.size) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    row = (piece * width)[:, None] + np.arange(width)
    firsts = np.cumsum(counts) - counts
    return np.where(row < counts[owner, None], firsts[owner, None] + row, -1)


def _blocks(
    state: KVState, slot: Int, at: Int, own: npt.NDArray[np.bool_], rows: Tensor | None, to: Upload
) -> QueryBlocks:
    """Blocks of one width.

    slot     int64 [blocks]
    at, own  positions [blocks, W], and which of them are rows rather than padding
    rows     what QueryBlocks.rows will be
    """
    ends = np.where(own, at + 1, 0)
    window_rows, window_bias = window_keys(state, slot, at, own)
    c4 = _entries(state, slot, ends // C4, C4, to)
    c128 = _entries(state, slot, ends // C128, C128, to)
    return QueryBlocks(rows, at.shape[1], to.int64(window_rows), to.tensor(window_bias), *c4, *c128)


def window_keys(
    state: KVState, slot: Int, at: Int, own: npt.NDArray[np.bool_]
) -> tuple[Int, npt.NDArray[np.float32]]:
    """Window keys of rows at positions `at` [blocks, W]: (rows [blocks, K], bias [blocks, W, K])."""
    reach = state.config.sliding_window
    width = at.shape[1]
    last = at.max(axis=1, where=own, initial=0)
    key = at[:, :1] - (reach - 1) + np.arange(width + reach - 1)
    real = (key >= 0) & (key <= last[:, None])
    safe = np.where(real, key, 0)
    page = state.window_table[slot[:, None], safe // PAGE_TOKENS].astype(np.int64)
    rows = np.where(real & own[:, :1], page * PAGE_TOKENS + safe % PAGE_TOKENS, 0)
    behind = np.arange(width)[:, None] + reach - 1 - np.arange(width + reach - 1)
    seen = (behind >= 0) & (behind < reach) & real[:, None, :] & own[:, :, None]
    return rows, np.where(seen, np.float32(0), np.float32(-np.inf))


def _entries(state: KVState, slot: Int, visible: Int, ratio: int, to: Upload) -> tuple[Tensor, Tensor]:
    """Compressed entries of blocks: (rows [blocks, N], bias [blocks, W, N]); visible [blocks, W] is a count.

    Unseen entries of the block read row 0: rows past a request's length may hold another request's numbers.
    """
    blocks, width = visible.shape
    most = int(visible.max(initial=0)) if state.specs[f"c{ratio}"].layers else 0
    if not most:
        return to.int64(np.empty((blocks, 0), np.int64)), to.tensor(np.empty((blocks, width, 0), np.float32))
    a_page = PAGE_TOKENS // ratio
    first = state.full_table[slot, : -(-most // a_page), None].astype(np.int64) * a_page
    rows = (first + np.arange(a_page)).reshape(blocks, -1)[:, :most]
    rows = np.where(np.arange(most) < visible.max(axis=1, keepdims=True), rows, 0)
    # On the device: a chunk of a long context has far more (query, entry) pairs than entries.
    seen = torch.arange(most, device=to.device) < to.int64(visible[:, :, None])
    return to.int64(rows), torch.where(seen, 0.0, -torch.inf)
