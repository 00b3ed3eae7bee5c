"""Lossless verification of drafts: which are accepted, and the token behind them; nothing waits for the host.

Every verified row is first drawn from as plain decoding would (`draws.draw`). What a row of a greedy or a
repeating request draws is the only draft it accepts; for the others odds decide, and the row behind the last
accepted draft gives its own token, or at a rejection one from what p has more than q. Three launches behind
the draws: the tests, the mass of each group of tokens at rejections, the draws there.

Source: engine/runner/acceptance.py and acceptance_odds.py, whose rules these are.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.errors import ShapeMismatch
from engine.kernels.triton.accept_odds import draft_odds, target_odds
from engine.kernels.triton.accept_residual import Rejections, replace_rejected
from engine.kernels.triton.accept_rows import lanes_of, length_and_first, spread
from engine.kernels.triton.draws import Drawn, draw
from engine.kernels.triton.draws_numbers import ACCEPT, uniform
from engine.kernels.triton.logits import group_stats
from engine.model.group_stats import GroupStats


@dataclass(frozen=True)
class Drafts:
    """What B groups verify.

    slots      int64 [B], negative for padding
    positions  int64 [B], where the first token that each emits will stand
    lens       int64 [B], rows of each, anchor included: 0 .. gamma + 1; a group of 0 emits nothing
    ids        int64 [B, gamma]
    logits     float32 [B, gamma, V], what each draft was drawn from at its request's temperature, in one
               piece, or gamma pieces of all groups; None: a draft is the one token that could come
    stats      of those logits at these temperatures, rows as they lie in memory; None: they are computed here
    """

    slots: Tensor
    positions: Tensor
    lens: Tensor
    ids: Tensor
    logits: Tensor | None
    stats: GroupStats | None = None


@dataclass(frozen=True)
class Verdicts:
    """Of B groups.

    tokens  int64 [B, gamma + 1], what each emits, then zeros
    counts  int64 [B], accepted drafts and one more; 0 without rows, and where the group failed
    valid   bool [B]; False where a row holds NaN or infinity, or the last row allows nothing
    """

    tokens: Tensor
    counts: Tensor
    valid: Tensor


@triton.jit
def _emit(tokens, counts, valid, group, gamma, lane, at_end, accepted, draft, choice, best, own):
    """Writes what a group emits, the last token as its row's own draw; returns how many."""
    # A row that allows nothing accepts nothing, and a group that ends there fails.
    reached = tl.max(tl.where(at_end, best, float("-inf")), 0)
    sound = (tl.max(best, 0) < float("inf")) & (reached > float("-inf"))
    count = tl.where(sound & (own > 0), accepted + 1, 0)
    told = tl.where(lane < count, tl.where(lane < accepted, draft, choice), 0)
    tl.store(tokens + group * (gamma + 1) + lane, told, mask=lane <= gamma)
    tl.store(counts + group, count.to(tl.int64))
    tl.store(valid + group, sound.to(tl.int8))
    return count


@triton.jit(
    do_not_specialize=["groups", "across", "along", "id_across", "id_along"],
    do_not_specialize_on_alignment=["slots", "positions"],
)
def _judge(
    logits, ids, draft_logits, slots, positions, lens, floats, ints, repeats, choices, bests, totals, floors,
    lasts, draft_tops, draft_sums, tokens, counts, valid, rows, drafted, q_best, q_total,
    stride, across, along, id_across, id_along, columns, places, groups, gamma, fields, numbers,
    GROUPS: tl.constexpr, LANES: tl.constexpr, PLACES: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    own, first = length_and_first(lens, slots, group, groups, GROUPS)
    lane = tl.arange(0, LANES)
    row, judges = first + lane, lane < own - 1
    best = tl.load(bests + row, mask=lane < own, other=0.0)
    choice = tl.load(choices + row, mask=lane < own, other=0)
    draft = tl.load(ids + group * id_across + lane * id_along, mask=judges, other=-1)
    passed = (choice == draft).to(tl.int32)
    slot = tl.maximum(tl.load(slots + group).to(tl.int64), 0)
    temperature, top_k = tl.load(floats + slot * fields), tl.load(ints + slot * numbers + 1)
    by_odds = (own > 0) & (temperature > 0) & (top_k != 1) & (tl.load(repeats + slot) == 0)
    fit = tl.zeros((LANES,), tl.int32)
    least, mass = tl.zeros((LANES,), tl.float32), tl.full((LANES,), 1.0, tl.float64)
    if by_odds:
        tested = judges & (draft >= 0) & (draft < columns)
        cell = tl.where(tested, draft, 0)
        p = target_odds(logits, bests, totals, floors, lasts, row, cell, tested, stride, temperature)
        q = tl.full((LANES,), 1.0, tl.float64)
        if DENSE:
            least, mass, heavy = draft_odds(
                draft_logits, draft_tops, draft_sums, group * across + lane * along, cell, judges, columns,
                places, temperature, LANES, PLACES,
            )  # fmt: skip
            q = heavy.to(tl.float64) / mass
        fit = (tested & (q > 0)).to(tl.int32)
        key = tl.load(ints + slot * numbers) + tl.zeros_like(lane)
        passed = fit * (uniform(key, tl.load(positions + group) + lane, ACCEPT) * q < p).to(tl.int32)
    accepted = tl.min(tl.where(judges & (passed > 0) & (best > float("-inf")), LANES, lane), 0)
    at_end = lane == accepted
    count = _emit(tokens, counts, valid, group, gamma, lane, at_end, accepted, draft, choice, best, own)
    tl.store(rows + group, tl.where(by_odds & (count > 0) & (accepted + 1 < own), first + accepted, -1))
    tl.store(drafted + group, tl.max(tl.where(at_end & (fit > 0), draft, -1), 0).to(tl.int32))
    tl.store(q_best + group, tl.sum(tl.where(at_end, least, 0.0), 0))
    tl.store(q_total + group, tl.sum(tl.where(at_end, mass, 0.0), 0))


def accept(
    logits: Tensor, drafts: Drafts, floats: Tensor, ints: Tensor, repeats: Tensor, rows: Drawn | None = None
) -> Verdicts:
    """Judges all groups; no count grows.

    logits   float32 [M, V], edited, group by group; rows behind the last group's are padding
    floats   float32 [S, 6], ints int64 [S, 2], of SlotParameters;  repeats  uint8 [S], Features.repeats
    rows     what plain decoding draws from these rows (`draws.draw`); None: it is drawn here
    raises   ShapeMismatch
    """
    groups, gamma = drafts.ids.shape
    columns = logits.shape[1]
    across, along = _draft_rows(drafts, columns)
    rows = rows or _drawn(logits, drafts, floats, ints)
    new = logits.new_empty
    out = Verdicts(
        new(groups, gamma + 1, dtype=torch.int64),
        new(groups, dtype=torch.int64),
        new(groups, dtype=torch.bool),
    )
    if not groups:
        return out
    q = drafts.stats
    if q is None and drafts.logits is not None:
        q = draft_stats(drafts.logits, drafts.slots, floats)
    rejections = Rejections(*(new(groups, dtype=t) for t in (torch.int32, torch.int32, None, torch.float64)))
    places, known = (1, (None, None)) if q is None else (q.tops.shape[1], (q.tops, q.sums))
    _judge[(groups,)](
        logits, drafts.ids, drafts.logits, drafts.slots, drafts.positions, drafts.lens, floats, ints, repeats,
        rows.tokens, rows.best, rows.totals, rows.floors, rows.lasts, *known, out.tokens, out.counts,
        out.valid.view(torch.int8), rejections.rows, rejections.drafted, rejections.q_best,
        rejections.q_total, logits.stride(0), across, along, *drafts.ids.stride(), columns, places, groups,
        gamma, floats.stride(0), ints.stride(0), lanes_of(groups),
        triton.next_power_of_2(gamma + 1), triton.next_power_of_2(places), drafts.logits is not None,
        num_warps=1 if q is None else 8,
    )  # fmt: skip
    table = (drafts.slots, drafts.positions, floats, ints)
    replace_rejected(logits, drafts.logits, (across, along), table, rows, rejections, out.counts, out.tokens)
    return out


def _drawn(logits: Tensor, drafts: Drafts, floats: Tensor, ints: Tensor) -> Drawn:
    """What plain decoding draws from each row."""
    width = drafts.ids.shape[1] + 1
    laid = spread(drafts.slots, drafts.positions, drafts.lens, width, logits.shape[0])
    stats = group_stats(logits, laid.slots, floats)
    return draw(logits, stats, laid.slots, laid.positions, floats, ints)


def _draft_rows(drafts: Drafts, columns: int) -> tuple[int, int]:
    """How many rows of the draft logits lie between groups, and between one group's drafts."""
    groups, gamma = drafts.ids.shape
    if drafts.logits is None:
        return gamma, 1
    piece, pieces = (gamma * columns, columns, 1), (columns, groups * columns, 1)
    fits = drafts.logits.stride() in (piece, pieces) or not drafts.logits.numel()
    if drafts.logits.shape != (groups, gamma, columns) or not fits:
        raise ShapeMismatch(
            f"draft logits are {tuple(drafts.logits.shape)} with strides {drafts.logits.stride()}, not "
            f"{(groups, gamma, columns)} in one piece or {gamma}"
        )
    return (gamma, 1) if drafts.logits.stride() == piece else (1, groups)


def draft_stats(logits: Tensor, slots: Tensor, floats: Tensor) -> GroupStats:
    """Statistics of draft logits float32 [B, gamma, V], as `Drafts` takes them; slots int64 [B]."""
    gamma = logits.shape[1]
    if logits.is_contiguous():
        return group_stats(logits.flatten(0, 1), slots, floats, width=gamma)
    return group_stats(logits.transpose(0, 1).flatten(0, 1), slots.repeat(gamma), floats)
