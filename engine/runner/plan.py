"""Host planning: from a ForwardBatch and the page tables to the tensors that a forward reads.

Everything here is integer arithmetic on numpy columns; nothing reads the device. A plan stays valid while the step
runs; it names pool rows, so page tables may change afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.errors import PageAccounting
from engine.memory.pools import KVState
from engine.messages import RunStep
from engine.model.config import C4, C128, PAGE_TOKENS
from engine.model.step import C4Entries, C128Entries, CommitGroup, CommitRows, StepRows
from engine.runner.batch import ForwardBatch, build_batch
from engine.runner.blocks import plan_blocks

Int = npt.NDArray[np.int64]

# Row counts that are processed together: single rows, verify rows, chunks.
WIDTHS = (1, 8, 128)
# Row of the sink page that padding writes.
SINK_ROW = 1


@dataclass(frozen=True)
class Plan:
    """One step, ready to run.

    token_ids   [T] int64; where `relayed` is set the relay token of `row_slots` is taken instead
    logit_rows  [R] int64
    """

    batch: ForwardBatch
    rows: StepRows
    token_ids: Tensor
    relayed: Tensor | None
    row_slots: Tensor | None
    logit_rows: Tensor
    commit: CommitRows


@dataclass(frozen=True)
class RowColumns:
    """A batch unrolled to rows, host side; all int64 [T] but the request columns [B].

    slots, starts, counts, first_rows  request columns
    request     the row's request; padded rows belong to request -1
    position    0 for padded rows
    """

    slots: Int
    starts: Int
    counts: Int
    first_rows: Int
    request: Int
    position: Int


def plan_step(
    state: KVState, step: RunStep, *, row_tile: int, every_logit: bool = False, taps: tuple[int, ...] = ()
) -> Plan:
    """Plans a step of a single rank that runs eagerly.

    row_tile  the model's `row_tile`: 1, or the fixed tile of deterministic mode, which also keeps one row a block
    raises    PageAccounting for a stale generation or an unmapped page; ShapeMismatch for columns that disagree
    """
    batch = build_batch(
        step, rank=0, peers=(), row_tile=row_tile, every_logit=every_logit, taps=taps,
        graph_key="", tbo_boundary=-1, cp_segments=(),
    )  # fmt: skip
    return plan_batch(state, batch, single_rows=row_tile > 1)


def plan_batch(state: KVState, batch: ForwardBatch, *, single_rows: bool) -> Plan:
    """The plan of a batch. single_rows: every query is a block of its own, whatever its request's row count."""
    columns = unroll(batch)
    check_slots(state, batch, columns)
    relayed = batch.tokens < 0
    tokens = np.zeros(batch.load.padded_tokens, dtype=np.int64)
    tokens[: batch.tokens.size] = np.maximum(batch.tokens, 0)
    to = Upload(state.device)
    has_relay = bool(relayed.any())
    padded = np.zeros(tokens.size, dtype=bool)
    padded[: relayed.size] = relayed
    return Plan(
        batch,
        plan_rows(state, columns, single_rows, to),
        to.int64(tokens),
        to.tensor(padded) if has_relay else None,
        to.int64(np.where(columns.request < 0, 0, columns.slots[columns.request])) if has_relay else None,
        to.int64(batch.logit_rows),
        plan_commit(columns, to),
    )


class Upload:
    """Moves host columns to the device without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def tensor(self, column: npt.NDArray[np.generic]) -> Tensor:
        """The column as it is; on the CPU it shares memory with `column`."""
        tensor = torch.from_numpy(np.ascontiguousarray(column))
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def int64(self, column: npt.NDArray[np.integer]) -> Tensor:
        """The column as int64."""
        return self.tensor(column.astype(np.int64, copy=False))


def unroll(batch: ForwardBatch) -> RowColumns:
    """Row columns of a batch, padded rows last."""
    counts = batch.counts.astype(np.int64)
    first_rows = np.cumsum(counts) - counts
    starts = batch.starts.astype(np.int64)
    padding = batch.load.padded_tokens - batch.load.live_tokens
    request = np.repeat(np.arange(counts.size), counts)
    position = np.arange(request.size) + (starts - first_rows)[request]
    return RowColumns(
        batch.slots.astype(np.int64),
        starts,
        counts,
        first_rows,
        np.concatenate([request, np.full(padding, -1)]),
        np.concatenate([position, np.zeros(padding, dtype=np.int64)]),
    )


def check_slots(state: KVState, batch: ForwardBatch, columns: RowColumns) -> None:
    """raises PageAccounting where a slot's generation is stale or a page that the step writes isn't mapped."""
    stale = state.generations[columns.slots] != batch.generations
    if stale.any():
        slot = int(columns.slots[stale][0])
        raise PageAccounting(
            f"slot {slot} is at generation {state.generations[slot]}, the step names another"
        )
    ends = columns.starts + columns.counts
    reach = state.full_table.shape[1] * PAGE_TOKENS
    if ends.size and ends.max() > reach:
        raise PageAccounting(f"position {ends.max() - 1} is past the page table's {reach}")
    own = columns.request >= 0
    page = state.window_table[columns.slots[columns.request[own]], columns.position[own] // PAGE_TOKENS]
    if (page == 0).any():
        row = int(np.flatnonzero(page == 0)[0])
        raise PageAccounting(
            f"position {columns.position[row]} of slot {columns.slots[columns.request[row]]} has no page"
        )


def plan_rows(state: KVState, columns: RowColumns, single_rows: bool, to: Upload) -> StepRows:
    """The layer-invariant metadata of a step."""
    own = columns.request >= 0
    page = state.window_table[columns.slots[columns.request], columns.position // PAGE_TOKENS].astype(
        np.int64
    )
    latent_rows = np.where(own, page * PAGE_TOKENS + columns.position % PAGE_TOKENS, SINK_ROW)
    blocks, unblock = plan_blocks(state, columns.slots, columns.request, columns.position, single_rows, to)
    return StepRows(
        to.int64(columns.position),
        to.int64(latent_rows),
        to.int64(columns.position % C4),
        to.int64(columns.position % C128),
        blocks,
        None if unblock is None else to.int64(unblock),
        plan_c4(state, columns, to),
        plan_c128(state, columns, to),
    )


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


def plan_c128(state: KVState, columns: RowColumns, to: Upload) -> tuple[C128Entries, ...]:
    """Sources of the c128 entries that close, one element a width class."""
    request, window = closing(columns, C128)
    if not request.size or not state.specs["c128"].layers:
        return ()
    begin = np.maximum(window * C128, columns.starts[request])
    taken = (window + 1) * C128 - begin
    first = columns.first_rows[request] + begin - columns.starts[request]
    out = []
    for chosen, width in by_width(taken):
        step = np.arange(width)
        valid = step < taken[chosen, None]
        slots = columns.slots[request[chosen]]
        out.append(
            C128Entries(
                to.int64(slots),
                to.tensor(taken[chosen] == C128),
                to.int64(np.where(valid, first[chosen, None] + step, 0)),
                to.tensor(valid),
                to.int64(window[chosen] * C128),
                to.int64(entry_rows(state, slots, window[chosen], C128)),
            )
        )
    return tuple(out)


def by_width(counts: Int) -> Sequence[tuple[Int, int]]:
    """Places of `counts` by width class, with the widest count of each class; counts above 128 are in the last."""
    low, out = 0, []
    for width in WIDTHS:
        chosen = np.flatnonzero((counts > low) & ((counts <= width) | (width == WIDTHS[-1])))
        if chosen.size:
            out.append((chosen, min(int(counts[chosen].max()), width)))
        low = width
    return out


def plan_commit(columns: RowColumns, to: Upload) -> CommitRows:
    """The part of the plan that `commit` reads."""
    groups = tuple(CommitGroup(to.int64(chosen), width) for chosen, width in by_width(columns.counts))
    most = int(columns.counts.max(initial=0))
    return CommitRows(
        to.int64(columns.slots), to.int64(columns.starts), to.int64(columns.first_rows), most, groups
    )
