"""Draws at rejected drafts: from max(p - q, 0), or from p where that has no mass or q can't have drafted it.

Source: engine/runner/acceptance_odds.py (`replace`).
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.draws import Drawn
from engine.kernels.triton.draws_numbers import (
    GROUP,
    RESIDUAL,
    key_of,
    pick_group,
    pick_inside,
    uniform,
    weight,
)

LEAST = tl.constexpr(1e-8)
"""A smaller share of p above q is rounding."""


@dataclass(frozen=True)
class Rejections:
    """Of B groups, what the tests found.

    rows      int32 [B], the row that judges the first rejected draft; -1: none is, or no odds decided
    drafted   int32 [B], that draft, where q can have made it; else -1
    q_best    float32 [B] and q_total float64 [B], the largest logit and the mass of what it was drawn from
    """

    rows: Tensor
    drafted: Tensor
    q_best: Tensor
    q_total: Tensor


@triton.jit
def _excess(
    target, proposed, token, columns, best, total, floor, last, q_best, q_total, drafted, temperature,
    DENSE: tl.constexpr,
):  # fmt: skip
    """What p has of each token more than q, and p; float32, up to one factor. 0 behind the vocabulary."""
    held = token < columns
    own = weight(tl.load(target + token, mask=held, other=float("-inf")), best, temperature)
    kept = (key_of(own) > floor) | ((key_of(own) == floor) & (token <= last))
    p = tl.where(kept, own, 0.0)
    if DENSE:
        p = (p.to(tl.float64) * (1.0 / total)).to(tl.float32)
        other = weight(tl.load(proposed + token, mask=held, other=float("-inf")), q_best, temperature)
        more = tl.maximum(p - (other.to(tl.float64) * (1.0 / q_total)).to(tl.float32), 0.0)
    else:
        more = tl.where(token == drafted, 0.0, p)
    return more, p


@triton.jit
def _removed(target, drafted, best, total, floor, last, temperature):
    """The draft, if p has mass without it; else -1."""
    own = weight(tl.load(target + tl.maximum(drafted, 0)), best, temperature)
    kept = (key_of(own) > floor) | ((key_of(own) == floor) & (drafted <= last))
    own = tl.where(kept, own, 0.0).to(tl.float64)
    return tl.where(total - own > LEAST * total, drafted, -1)


@triton.jit(do_not_specialize=["across", "along"], do_not_specialize_on_alignment=["slots"])
def _sums(
    logits, draft_logits, slots, floats, bests, totals, floors, lasts, rows, drafted, q_best, q_total, counts,
    more_sums, p_sums, stride, across, along, columns, places, fields,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    row = tl.load(rows + group).to(tl.int64)
    if row >= 0:
        place = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
        token = place[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
        temperature = tl.load(floats + tl.load(slots + group) * fields)
        best, total = tl.load(bests + row), tl.load(totals + row)
        floor, last = tl.load(floors + row), tl.load(lasts + row)
        target, draft = logits + row * stride, tl.load(drafted + group)
        at = group.to(tl.int64) * across + (tl.load(counts + group) - 1) * along
        if not DENSE:
            draft = _removed(target, draft, best, total, floor, last, temperature)
        more, p = _excess(
            target, draft_logits + at * columns, token, columns, best, total, floor, last,
            tl.load(q_best + group), tl.load(q_total + group), draft, temperature, DENSE,
        )  # fmt: skip
        into = group.to(tl.int64) * places + place
        tl.store(more_sums + into, tl.sum(more.to(tl.float64), 1), mask=place < places)
        if DENSE:
            tl.store(p_sums + into, tl.sum(p.to(tl.float64), 1), mask=place < places)


@triton.jit(do_not_specialize=["across", "along"], do_not_specialize_on_alignment=["slots", "positions"])
def _replace(
    logits, draft_logits, slots, positions, floats, ints, bests, totals, floors, lasts, rows, drafted, q_best,
    q_total, counts, more_sums, p_sums, tokens, stride, across, along, columns, places, gamma, fields,
    numbers,
    PLACES: tl.constexpr, SIZE: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    row = tl.load(rows + group).to(tl.int64)
    if row >= 0:
        slot, accepted = tl.load(slots + group), tl.load(counts + group) - 1
        temperature = tl.load(floats + slot * fields)
        best, total = tl.load(bests + row), tl.load(totals + row)
        floor, last = tl.load(floors + row), tl.load(lasts + row)
        target, draft = logits + row * stride, tl.load(drafted + group)
        place = tl.arange(0, PLACES)
        at = group.to(tl.int64) * places + place
        mass = tl.load(more_sums + at, mask=place < places, other=0.0)
        fits = (draft >= 0) & (tl.sum(mass, 0) > LEAST)
        if DENSE:
            mass = tl.where(fits, mass, tl.load(p_sums + at, mask=place < places, other=0.0))
        else:
            draft = _removed(target, draft, best, total, floor, last, temperature)
        position = tl.load(positions + group) + accepted
        picked, share = pick_group(mass, uniform(tl.load(ints + slot * numbers), position, RESIDUAL), PLACES)
        token = picked * SIZE + tl.arange(0, SIZE)
        at = group.to(tl.int64) * across + accepted * along
        more, p = _excess(
            target, draft_logits + at * columns, token, columns, best, total, floor, last,
            tl.load(q_best + group), tl.load(q_total + group), draft, temperature, DENSE,
        )  # fmt: skip
        if DENSE:
            more = tl.where(fits, more, p)
        found = picked * SIZE + pick_inside(more.to(tl.float64), share, SIZE)
        tl.store(tokens + group * (gamma + 1) + accepted, tl.minimum(found, columns - 1).to(tl.int64))


def replace_rejected(
    logits: Tensor,
    draft_logits: Tensor | None,
    draft_rows: tuple[int, int],
    columns: tuple[Tensor, Tensor, Tensor, Tensor],
    rows: Drawn,
    rejections: Rejections,
    counts: Tensor,
    tokens: Tensor,
) -> None:
    """Writes the token that comes instead of each rejected draft behind the accepted ones in `tokens`.

    logits        float32 [M, V];  draft_logits float32 [B, gamma, V], or none
    draft_rows    rows of the draft logits between groups, and between one group's drafts
    columns       slots and positions int64 [B], floats float32 [S, 6] and ints int64 [S, 2]
    counts        int64 [B], accepted drafts and one more;  tokens int64 [B, gamma + 1]
    """
    slots, positions, floats, ints = columns
    groups, size = slots.numel(), logits.shape[1]
    places, gamma, dense = triton.cdiv(size, GROUP), tokens.shape[1] - 1, draft_logits is not None
    sums = [torch.empty(groups, places, dtype=torch.float64, device=logits.device) for _ in range(1 + dense)]
    proposed = draft_logits if draft_logits is not None else logits
    known = (rows.best, rows.totals, rows.floors, rows.lasts)
    found = (rejections.rows, rejections.drafted, rejections.q_best, rejections.q_total, counts)
    _sums[(groups, triton.cdiv(places, 16))](
        logits, proposed, slots, floats, *known, *found, sums[0], sums[-1], logits.stride(0), *draft_rows,
        size, places, floats.stride(0), 16, GROUP, dense,
    )  # fmt: skip
    _replace[(groups,)](
        logits, proposed, slots, positions, floats, ints, *known, *found, sums[0], sums[-1], tokens,
        logits.stride(0), *draft_rows, size, places, gamma, floats.stride(0), ints.stride(0),
        triton.next_power_of_2(places), GROUP, dense,
    )  # fmt: skip
