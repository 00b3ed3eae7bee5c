"""Host planning: from a ForwardBatch and the page tables to the tensors that a forward reads.

Everything here is integer arithmetic on numpy columns; nothing reads the device. A plan stays valid while the
step runs; it names pool rows, so page tables may change afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from engine.errors import PageAccounting
from engine.memory.pools import KVState
from engine.messages import RunStep
from engine.model.config import C4, C128, PAGE_TOKENS
from engine.model.model import DeepseekV4
from engine.model.step import CommitGroup, CommitRows, StepRows
from engine.runner.batch import ForwardBatch, build_batch
from engine.runner.blocks import plan_blocks
from engine.runner.columns import RowColumns, Upload, by_width, unroll
from engine.runner.entries import plan_c4, plan_c128

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


def plan_step(
    state: KVState, step: RunStep, model: DeepseekV4, *, every_logit: bool = False, taps: tuple[int, ...] = ()
) -> Plan:
    """Plans a step of a single rank that runs eagerly.

    model   decides on padding and on how queries share keys
    raises  PageAccounting for a stale generation or an unmapped page; ShapeMismatch for unequal columns
    """
    batch = build_batch(
        step, rank=0, peers=(), row_tile=model.row_tile, every_logit=every_logit, taps=taps,
        graph_key="", tbo_boundary=-1, cp_segments=(),
    )  # fmt: skip
    return plan_batch(state, batch, single_rows=model.single_rows)


def plan_batch(state: KVState, batch: ForwardBatch, *, single_rows: bool) -> Plan:
    """The plan of a batch. single_rows: every query is a block of its own."""
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


def check_slots(state: KVState, batch: ForwardBatch, columns: RowColumns) -> None:
    """raises PageAccounting where a generation is stale or a page that the step writes isn't mapped."""
    stale = state.generations[columns.slots] != batch.generations
    if stale.any():
        slot = int(columns.slots[stale][0])
        raise PageAccounting(f"slot {slot} is at generation {state.generations[slot]}, not the step's")
    ends = columns.starts + columns.counts
    reach = state.full_table.shape[1] * PAGE_TOKENS
    if ends.size and ends.max() > reach:
        raise PageAccounting(f"position {ends.max() - 1} is past the page table's {reach}")
    own = columns.request >= 0
    page = state.window_table[columns.slots[columns.request[own]], columns.position[own] // PAGE_TOKENS]
    if (page == 0).any():
        row = int(np.flatnonzero(page == 0)[0])
        slot = columns.slots[columns.request[row]]
        raise PageAccounting(f"position {columns.position[row]} of slot {slot} has no page")


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


def plan_commit(columns: RowColumns, to: Upload) -> CommitRows:
    """The part of the plan that `commit` reads."""
    groups = tuple(CommitGroup(to.int64(chosen), width) for chosen, width in by_width(columns.counts))
    most = int(columns.counts.max(initial=0))
    return CommitRows(
        to.int64(columns.slots),
        to.int64(columns.starts),
        to.int64(columns.first_rows),
        to.int64(columns.counts),
        most,
        groups,
    )
