"""The decoding row groups of a step: which there are, how far each may go, and the rows that they run."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.actors.round import Round
from engine.errors import PageAccounting, ShapeMismatch
from engine.memory.pools import KVState
from engine.messages import RunStep
from engine.runner.columns import Int, Upload
from engine.runner.plan import PlannedStep
from engine.runner.stages import Decoding, Laid, StepColumns
from engine.runner.taps import ragged


def read_columns(job: RunStep, rank: int) -> StepColumns:
    """raises ShapeMismatch for columns that disagree"""
    slots, generations, starts, counts, tokens = (
        np.frombuffer(column, np.int32)
        for column in (job.slots, job.generations, job.starts, job.counts, job.tokens)
    )
    verify = np.frombuffer(job.verify or bytes(slots.size), np.uint8).astype(np.int64)
    decodes = verify > 0
    sizes = {slots.size, generations.size, starts.size, counts.size, len(job.samples), verify.size}
    if len(sizes) != 1 or counts.sum() != tokens.size or (counts[decodes] > 1).any():
        raise ShapeMismatch(
            f"step {job.epoch}: columns hold {sorted(sizes)} entries, {tokens.size} tokens stand against "
            f"counts {counts.tolist()} and verify {verify.tolist()}"
        )
    chunks = np.where(decodes, 0, counts).astype(np.int64)
    agreed = job.ranks[rank][1] if job.ranks else tokens.size + sum(job.verify)
    return StepColumns(slots, generations, starts, counts, tokens, decodes, chunks, verify, agreed)


def decoding_groups(columns: StepColumns, round_: Round) -> Decoding:
    """The groups that verify at least their anchor, of a step that the round has begun.

    raises  PageAccounting where a slot is longer than the step's upper bound, or a chunk doesn't follow it
    """
    held = round_.lengths[columns.slots]
    wrong = np.where(columns.decodes, held > columns.starts, held != columns.starts)
    if wrong.any():
        group = int(np.flatnonzero(wrong)[0])
        raise PageAccounting(
            f"slot {columns.slots[group]} has {held[group]} committed tokens, the step starts it at "
            f"{columns.starts[group]}"
        )
    groups = np.flatnonzero(round_.caps)
    return Decoding(groups, columns.slots[groups].astype(np.int64), held[groups], round_.caps[groups])


def anchors_of(columns: StepColumns, decoding: Decoding, state: KVState, to: Upload) -> Tensor:
    """The token at each group's committed length, int64 [n]: relayed, or told by the step."""
    given = columns.tokens[(np.cumsum(columns.counts) - columns.counts)[decoding.groups]]
    relayed = state.relay.index_select(0, to.int64(decoding.slots))
    if (given < 0).all():
        return relayed
    told = to.int64(given)
    return torch.where(told < 0, relayed, told)


def check_agreed(epoch: int, columns: StepColumns, laid: Laid) -> None:
    """raises ShapeMismatch where the step has more rows than its peers make room for"""
    rows = int(columns.chunks.sum() + laid.rows.sum())
    if rows > columns.agreed:
        raise ShapeMismatch(f"step {epoch} has {rows} rows, but the ranks agreed on {columns.agreed}")


def laid_step(job: RunStep, columns: StepColumns, decoding: Decoding, laid: Laid) -> tuple[RunStep, Int]:
    """The step with the rows that it really runs, and the old number of each of its groups, int64.

    Groups that are judged aren't sampled. Drafted rows have token 0 until `write_drafts`.
    """
    starts = columns.starts.copy()
    starts[decoding.groups] = decoding.lengths
    samples = np.frombuffer(job.samples, np.uint8)
    if laid.drafts is not None:
        samples = np.where(columns.decodes, 0, samples).astype(np.uint8)
    counts = columns.chunks.copy()
    counts[decoding.groups] = laid.rows
    if (counts == columns.counts).all():
        same = msgspec.structs.replace(job, starts=starts.tobytes(), samples=samples.tobytes())
        return same, np.arange(counts.size)
    kept = np.flatnonzero(counts)
    group, place = ragged(counts)
    given = place < columns.counts[group]
    source = np.where(given, (np.cumsum(columns.counts) - columns.counts)[group] + place, 0)
    tokens = np.where(given, columns.tokens[source], 0) if columns.tokens.size else source
    own = msgspec.structs.replace(
        job,
        slots=columns.slots[kept].tobytes(),
        generations=columns.generations[kept].tobytes(),
        starts=starts[kept].tobytes(),
        counts=_int32(counts[kept]),
        tokens=_int32(tokens),
        samples=samples[kept].tobytes(),
    )
    return own, kept


def write_drafts(plan: PlannedStep, first_rows: Int, rows: Int, ids: Tensor, to: Upload) -> None:
    """Puts drafted tokens behind the anchors of n groups, on the device.

    first_rows, rows  int64 [n], each group's first step row, and how many it has
    ids               int64 [n, gamma]
    """
    group, place = ragged(rows - 1)
    where = to.int64(np.stack([first_rows[group] + 1 + place, group * ids.shape[1] + place]))
    plan.token_ids.index_copy_(0, where[0], ids.flatten().index_select(0, where[1]))


def drafted_columns(columns: StepColumns, decoding: Decoding, laid: Laid, round_: Round) -> dict[str, bytes]:
    """Columns of StepDone that steps with `verify` have; groups that drafted nothing have survival 0."""
    groups = columns.slots.size
    verified = np.zeros(groups, np.uint8)
    verified[decoding.groups] = laid.lens
    survival = b""
    if laid.drafts is not None:
        scores = np.zeros((groups, laid.drafts.survival.shape[1]), np.float32)
        scores[decoding.groups] = laid.drafts.survival.numpy()
        survival = scores.tobytes()
    lengths = _int32(round_.lengths[columns.slots])
    return {"verified": verified.tobytes(), "survival": survival, "lengths": lengths}


def _int32(column: npt.NDArray[np.integer]) -> bytes:
    return column.astype(np.int32).tobytes()
