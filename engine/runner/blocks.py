"""Query blocks: which rows share keys, and which keys each of them sees.

Two forms, by the kernel set. Biases: a float for each pair of a query and a key. Ranges: two numbers a query,
the first column of its row list and how many it sees; and of the requests' pages the numbers alone go to the
device, which makes rows of them. Either is made once a step, for all layers.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.memory.pools import KVState
from engine.model.config import C4, C128, PAGE_TOKENS
from engine.model.ops import TorchOps
from engine.model.step import QueryBlocks
from engine.runner.batch import Int32
from engine.runner.columns import Int, RowColumns, Upload

# (Longest request in rows of the step, block width) of each class. A block of W rows gathers W + 127 window
# keys: 32 rows read 1.25 times the keys that they need, 128 rows would read twice.
CLASSES = ((1, 1), (8, 8), (1 << 31, 32))


def plan_blocks(
    state: KVState, columns: RowColumns, single_rows: bool, ops: TorchOps, to: Upload
) -> tuple[tuple[QueryBlocks, ...], Int | None]:
    """The step's query blocks and the place of each row in them (None: in order)."""
    request, slot_of, position = columns.request, columns.row_slots, columns.position
    real = request >= 0
    if single_rows or request.size == columns.slots.size:
        return (_blocks(state, slot_of, position[:, None], real[:, None], None, ops, to),), None
    # A padded row is a request of its own that sees nothing: blocks take whatever rows they get.
    counts = np.concatenate([columns.counts, np.ones(request.size - int(real.sum()), np.int64)])
    rows_of = [rows for longest, width in CLASSES if (rows := _rows_of_class(counts, longest, width)).size]
    in_order = len(rows_of) == 1 and rows_of[0].size == request.size
    blocks = []
    for rows in rows_of:
        chosen = None if in_order else to.int64(np.maximum(rows, 0).ravel())
        sees = (rows >= 0) & real[rows]
        blocks.append(_blocks(state, slot_of[rows[:, 0]], position[rows], sees, chosen, ops, to))
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
    state: KVState,
    slot: Int,
    at: Int,
    own: npt.NDArray[np.bool_],
    rows: Tensor | None,
    ops: TorchOps,
    to: Upload,
) -> QueryBlocks:
    """Blocks of rows at positions `at` [blocks, W] of the requests in `slot` [blocks].

    own      rows that belong to the request; the others see nothing
    rows     what QueryBlocks.rows will be
    """
    reach, near = state.config.sliding_window, window_rows(state, slot, at, own)
    visible = np.where(own, at + 1, 0)
    chosen = None
    if ops.ranged:
        # Of the entries' type: a kernel then reads either list by the same load.
        window, seen = to.tensor(near.astype(np.int32)), to.tensor(window_ranges(at, own, reach))
        c4, c128 = _listed(state, slot, visible, ops, to)
        # Absent ones stand last.
        chosen = c4[1].clamp_max(state.config.index_topk)
    else:
        window, seen = to.int64(near), to.tensor(_window_bias(at, own, reach))
        c4 = _biased(state, slot, visible // C4, C4, to)
        c128 = _biased(state, slot, visible // C128, C128, to)
    return QueryBlocks(rows, at.shape[1], window, seen, *c4, *c128, chosen)


def window_rows(state: KVState, slot: Int, at: Int, own: npt.NDArray[np.bool_]) -> Int:
    """Pool rows [blocks, K] of the window keys of rows at positions `at` [blocks, W]; 0: no key.

    Columns are positions in order; the last one that a block's first row sees is column window - 1.
    """
    reach, width = state.config.sliding_window, at.shape[1]
    last = at.max(axis=1, where=own, initial=0)
    key = at[:, :1] - (reach - 1) + np.arange(width + reach - 1)
    real = (key >= 0) & (key <= last[:, None])
    safe = np.where(real, key, 0)
    page = state.window_table[slot[:, None], safe // PAGE_TOKENS].astype(np.int64)
    return np.where(real & own[:, :1], page * PAGE_TOKENS + safe % PAGE_TOKENS, 0)


def window_ranges(at: Int, own: npt.NDArray[np.bool_], reach: int) -> Int32:
    """First column of `window_rows` that each row sees, and how many; [blocks W, 2]."""
    first = np.maximum(at - at[:, :1], reach - 1 - at[:, :1])
    count = np.minimum(at + 1, reach)
    return np.where(own[..., None], np.stack([first, count], axis=2), 0).reshape(-1, 2).astype(np.int32)


def _window_bias(at: Int, own: npt.NDArray[np.bool_], reach: int) -> npt.NDArray[np.float32]:
    """[blocks, W, K]: which columns of `window_rows` each row sees."""
    width = at.shape[1]
    column = np.arange(width + reach - 1)
    behind = np.arange(width)[:, None] + reach - 1 - column
    real = at[:, :1] - (reach - 1) + column >= 0
    seen = (behind >= 0) & (behind < reach) & real[:, None, :] & own[:, :, None]
    return np.where(seen, np.float32(0), np.float32(-np.inf))


def _listed(
    state: KVState, slot: Int, visible: Int, ops: TorchOps, to: Upload
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Rows and ranges of c4 and c128 entries; visible [blocks, W] tokens. One page list serves both."""
    most = {ratio: _most(state, visible // ratio, ratio) for ratio in (C4, C128)}
    needed = max(-(-count * ratio // PAGE_TOKENS) for ratio, count in most.items())
    pages = to.tensor(np.ascontiguousarray(state.full_table[slot, :needed]))
    c4, c128 = (
        listed_entries(pages, to.tensor((visible // ratio).astype(np.int32)), most[ratio], ratio, state, ops)
        for ratio in (C4, C128)
    )
    return c4, c128


def listed_entries(
    pages: Tensor, visible: Tensor, entries: int, ratio: int, state: KVState, ops: TorchOps
) -> tuple[Tensor, Tensor]:
    """Compressed entries of blocks on the device: (rows [blocks, N] int32, ranges [blocks W, 2] int32).

    pages    [blocks, M] full pages of each block's request, in order
    visible  [blocks, W] entries that each query sees
    entries  N
    """
    # One query a block is its own largest: no kernel to find it.
    most = visible[:, 0] if visible.shape[1] == 1 else visible.amax(1)
    rows = ops.entry_rows(pages, most, entries, PAGE_TOKENS // ratio, state.full_pages)
    seen = visible.new_zeros(visible.numel(), 2, dtype=torch.int32)
    seen[:, 1] = visible.flatten()
    return rows, seen


def _most(state: KVState, visible: Int, ratio: int) -> int:
    """Entries of the block with the most, of `visible` of each query; 0 where no layer has any."""
    return int(visible.max(initial=0)) if state.specs[f"c{ratio}"].layers else 0


def _biased(state: KVState, slot: Int, visible: Int, ratio: int, to: Upload) -> tuple[Tensor, Tensor]:
    """Compressed entries of blocks: (rows [blocks, N], bias [blocks, W, N]); visible [blocks, W] is a count.

    Unseen entries of the block read row 0: rows past a request's length may hold another request's numbers.
    """
    blocks, width = visible.shape
    most = _most(state, visible, ratio)
    if not most:
        return to.int64(np.empty((blocks, 0), np.int64)), to.tensor(np.empty((blocks, width, 0), np.float32))
    a_page = PAGE_TOKENS // ratio
    first = state.full_table[slot, : -(-most // a_page), None].astype(np.int64) * a_page
    rows = (first + np.arange(a_page)).reshape(blocks, -1)[:, :most]
    rows = np.where(np.arange(most) < visible.max(axis=1, keepdims=True), rows, 0)
    # On the device: a chunk of a long context has far more (query, entry) pairs than entries.
    seen = torch.arange(most, device=to.device) < to.int64(visible[:, :, None])
    return to.int64(rows), torch.where(seen, 0.0, -torch.inf)
