"""The decoding row groups of a step: which there are, how far each may go, and the rows that they run."""

from __future__ import annotations

from dataclasses import dataclass

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
from engine.runner.plan import Plan, check_generations
from engine.runner.speculative import Drafts
from engine.runner.taps import ragged


@dataclass(frozen=True, slots=True)
class StepColumns:
    """A RunStep's columns, int64 [B], tokens int64 [T]; decodes bool [B].

    chunks  counts of chunks, 0 for groups that decode
    """

    slots: Int
    starts: Int
    counts: Int
    chunks: Int
    samples: npt.NDArray[np.uint8]
    verify: Int
    tokens: Int
    decodes: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Decoding:
    """The n row groups that verify something; those that had ended are left out.

    groups          int64 [n], number in the RunStep
    slots, lengths  int64 [n], committed length before the step
    caps            int64 [n], most rows that each may verify, at least 1
    anchors         int64 [n] on the device
    """

    groups: Int
    slots: Int
    lengths: Int
    caps: Int
    anchors: Tensor


@dataclass(frozen=True, slots=True)
class Laid:
    """What a step runs.

    drafts  None where nothing was drafted
    rows    int64 [n], rows that each decoding group runs
    lens    int64 [n], how many of them are verified
    """

    drafts: Drafts | None
    rows: Int
    lens: Int


def read_columns(job: RunStep, state: KVState) -> StepColumns:
    """raises ShapeMismatch for columns that disagree, PageAccounting for a stale generation"""
    slots, starts, counts, tokens = (
        np.frombuffer(column, np.int32).astype(np.int64)
        for column in (job.slots, job.starts, job.counts, job.tokens)
    )
    samples = np.frombuffer(job.samples, np.uint8)
    verify = np.frombuffer(job.verify or bytes(slots.size), np.uint8).astype(np.int64)
    decodes = verify > 0
    sizes = {slots.size, starts.size, counts.size, samples.size, verify.size}
    if len(sizes) != 1 or counts.sum() != tokens.size or (counts[decodes] != 1).any():
        raise ShapeMismatch(
            f"step {job.epoch}: columns hold {sorted(sizes)} entries, {tokens.size} tokens stand against "
            f"counts {counts.tolist()} and verify {verify.tolist()}"
        )
    check_generations(state, np.frombuffer(job.slots, np.int32), np.frombuffer(job.generations, np.int32))
    return StepColumns(slots, starts, counts, np.where(decodes, 0, counts), samples, verify, tokens, decodes)


def decoding_groups(columns: StepColumns, round_: Round, state: KVState) -> Decoding:
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
    slots = columns.slots[groups]
    given = columns.tokens[(np.cumsum(columns.counts) - columns.counts)[groups]]
    to = Upload(state.device)
    anchors = state.relay.index_select(0, to.int64(slots))
    if (given >= 0).any():
        known = to.int64(given)
        anchors = torch.where(known < 0, anchors, known)
    return Decoding(groups, slots, held[groups], round_.caps[groups], anchors)


def laid_step(job: RunStep, columns: StepColumns, decoding: Decoding, rows: Int) -> tuple[RunStep, Int]:
    """The step with the rows that it really runs, and the old number of each of its groups, int64.

    Drafted rows have token 0 until `write_drafts`.
    """
    counts = columns.chunks.copy()
    counts[decoding.groups] = rows
    starts = columns.starts.copy()
    starts[decoding.groups] = decoding.lengths
    kept = np.flatnonzero(counts)
    group, place = ragged(counts)
    given = place < columns.counts[group]
    source = np.where(given, (np.cumsum(columns.counts) - columns.counts)[group] + place, 0)
    tokens = np.where(given, columns.tokens[source], 0) if columns.tokens.size else source
    laid = msgspec.structs.replace(
        job,
        slots=_int32(columns.slots[kept]),
        generations=_int32(np.frombuffer(job.generations, np.int32)[kept]),
        starts=_int32(starts[kept]),
        counts=_int32(counts[kept]),
        tokens=_int32(tokens),
        samples=np.where(columns.decodes, 0, columns.samples)[kept].astype(np.uint8).tobytes(),
        verify=columns.verify[kept].astype(np.uint8).tobytes(),
    )
    return laid, kept


def write_drafts(plan: Plan, first_rows: Int, laid: Laid, to: Upload) -> None:
    """Puts the drafted tokens into the plan's rows, on the device; first_rows int64 [n] of the groups."""
    if laid.drafts is None:
        return
    group, place = ragged(laid.rows - 1)
    where = to.int64(np.stack([first_rows[group] + 1 + place, group * laid.drafts.ids.shape[1] + place]))
    plan.token_ids.index_copy_(0, where[0], laid.drafts.ids.flatten().index_select(0, where[1]))


def drafted_columns(columns: StepColumns, decoding: Decoding, laid: Laid, round_: Round) -> dict[str, bytes]:
    """Columns of StepDone that steps with `verify` have; groups that drafted nothing have survival 0."""
    groups = columns.slots.size
    verified = np.zeros(groups, np.uint8)
    verified[decoding.groups] = laid.lens
    survival = np.zeros((0, 0), np.float32)
    if laid.drafts is not None:
        survival = np.zeros((groups, laid.drafts.survival.shape[1]), np.float32)
        survival[decoding.groups] = laid.drafts.survival.numpy()
    return {
        "verified": verified.tobytes(),
        "survival": survival.tobytes(),
        "lengths": _int32(round_.lengths[columns.slots]),
    }


def _int32(column: npt.NDArray[np.integer]) -> bytes:
    return column.astype(np.int32).tobytes()
