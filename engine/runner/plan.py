"""Host planning: from a ForwardBatch and the page tables to the tensors that a forward reads.

Integer arithmetic on numpy columns, and for kernel sets that are `ranged` a kernel that makes rows of page
numbers; nothing reads the device. A plan stays valid while the
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
from engine.model.ops import TorchOps
from engine.model.step import CommitGroup, CommitRows, StepRows
from engine.runner.batch import ForwardBatch, Int32, build_batch
from engine.runner.blocks import plan_blocks
from engine.runner.columns import Int, RowColumns, Upload, by_width, unroll
from engine.runner.entries import plan_c4, plan_c128

# Row of the sink page that padding writes.
SINK_ROW = 1


@dataclass(frozen=True, kw_only=True)
class PlannedStep:
    """One step, ready to run in one way or the other.

    token_ids   [T] int64; a negative one stands for the relay token of the row's slot
    row_slots   [T] int64; None where no token is relayed
    logit_rows  [R] int64
    """

    batch: ForwardBatch
    token_ids: Tensor
    row_slots: Tensor | None
    logit_rows: Tensor
    commit: CommitRows


@dataclass(frozen=True, kw_only=True)
class Plan(PlannedStep):
    """A step that runs eagerly."""

    rows: StepRows


def plan_step(
    state: KVState, step: RunStep, model: DeepseekV4, *, every_logit: bool = False, taps: tuple[int, ...] = ()
) -> Plan:
    """Plans a step that runs eagerly.

    model   decides on padding and on how queries share keys
    raises  PageAccounting for a stale generation or an unmapped page; ShapeMismatch for unequal columns
    """
    batch = build_batch(
        step, rank=model.groups.dp.rank, row_tile=model.row_tile, idle_runs=model.needs_every_rank,
        every_logit=every_logit, taps=taps, graph_key="", tbo_boundary=-1, cp_segments=(),
    )  # fmt: skip
    return plan_batch(state, batch, single_rows=model.single_rows, ops=model.ops)


def plan_batch(state: KVState, batch: ForwardBatch, *, single_rows: bool, ops: TorchOps) -> Plan:
    """The plan of a batch. single_rows: every query is a block of its own; ops: what will run it."""
    columns, to = unroll(batch), Upload(state.device)
    latent_rows = written_rows(state, batch, columns)
    rows = np.zeros((6, latent_rows.size), dtype=np.int64)
    rows[0, : batch.tokens.size] = batch.tokens
    rows[1] = columns.position
    rows[2] = latent_rows
    rows[3] = columns.position % C4
    rows[4] = columns.position % C128
    relays = bool((batch.tokens < 0).any())
    if relays:
        rows[5] = columns.row_slots
    token_ids, position, latents, phase4, phase128, row_slots = to.int64(rows).unbind(0)
    blocks, unblock = plan_blocks(state, columns, single_rows, ops, to)
    padding = columns.request < 0
    return Plan(
        batch=batch,
        rows=StepRows(
            position,
            latents,
            phase4,
            phase128,
            blocks,
            None if unblock is None else to.int64(unblock),
            plan_c4(state, columns, to),
            plan_c128(state, columns, ops.ranged, to),
            to.tensor(padding) if padding.any() else None,
            batch.agreed_rows,
            batch.agreed_logits,
        ),
        token_ids=token_ids,
        row_slots=row_slots if relays else None,
        logit_rows=to.int64(batch.logit_rows),
        commit=plan_commit(columns, to),
    )


def written_rows(state: KVState, batch: ForwardBatch, columns: RowColumns) -> Int:
    """Flat window-pool rows [T] that the step's latents go to; padding goes to the sink.

    raises  PageAccounting where a generation is stale or a page that the step writes isn't mapped
    """
    check_generations(state, batch.slots, batch.generations)
    last = int((columns.starts + columns.counts).max(initial=1)) - 1
    logical, offset = np.divmod(columns.position, PAGE_TOKENS)
    reach = state.full_table.shape[1]
    if last >= reach * PAGE_TOKENS:
        raise PageAccounting(f"position {last} is past the page table's {reach * PAGE_TOKENS}")
    slots = columns.row_slots
    page = state.window_table[slots, logical].astype(np.int64)
    own = columns.request >= 0
    # A full page is needed too: entries of an unmapped one would overwrite the sink's zero row.
    missing = own & ((page == 0) | (state.full_table[slots, logical] == 0))
    if missing.any():
        row = int(np.flatnonzero(missing)[0])
        raise PageAccounting(f"position {columns.position[row]} of slot {slots[row]} has no page")
    return np.where(own, page * PAGE_TOKENS + offset, SINK_ROW)


def check_generations(state: KVState, slots: Int32, generations: Int32) -> None:
    """raises PageAccounting where a slot [B] is at another generation [B]: the step means a former request"""
    stale = state.generations[slots] != generations
    if stale.any():
        slot = int(slots[stale][0])
        raise PageAccounting(f"slot {slot} is at generation {state.generations[slot]}, not the step's")


def plan_commit(columns: RowColumns, to: Upload) -> CommitRows:
    """The part of the plan that `commit` reads."""
    groups = tuple(CommitGroup(to.int64(chosen), width) for chosen, width in by_width(columns.counts))
    most = int(columns.counts.max(initial=0))
    stacked = np.stack([columns.slots, columns.starts, columns.first_rows, columns.counts])
    slots, starts, first_rows, counts = to.int64(stacked).unbind(0)
    return CommitRows(slots, starts, first_rows, counts, most, groups)
