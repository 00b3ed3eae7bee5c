"""The token of each row: the largest logit, or a draw from the tempered distribution, whole or cut.

Three launches for any number of rows, and nothing that the host must know of them: statistics of groups
(`logits.group_stats`), then one program a row, then a search of the rows that need one. Source:
engine/runner/sampling.py and filters.py.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.errors import ShapeMismatch
from engine.kernels.triton.draws_numbers import (
    DRAFT,
    GROUP,
    SAMPLE,
    key_of,
    pick_group,
    pick_inside,
    uniform,
    weight,
)
from engine.kernels.triton.filters import CANDIDATES, LISTED, SEARCHED, filtered, searched
from engine.kernels.triton.logits import group_stats
from engine.model.group_stats import GroupStats


@dataclass(frozen=True)
class Drawn:
    """Of R rows.

    tokens  int64 [R]; 0 where the row isn't valid
    valid   bool [R]; False where the logits hold NaN or infinity, nothing is allowed, or the slot is padding
    best    float32 [R], the largest logit; infinity where one is NaN
    totals  float64 [R], floors and lasts int32 [R]: tokens that stay have a key above the floor, or the floor
            itself and an id of at most the last; the total is the sum of their weights. Of sampled rows.
    """

    tokens: Tensor
    valid: Tensor
    best: Tensor
    totals: Tensor
    floors: Tensor
    lasts: Tensor


@triton.jit
def drawn_plain(row, top, sums, best, temperature, u, columns, PLACES: tl.constexpr, SIZE: tl.constexpr):
    """(Token drawn from the whole row, mass of the row), int32 and float64.

    top   float32 [PLACES], minus infinity beyond the row;  sums  float64 [PLACES], 0 beyond
    """
    mass = sums * weight(top, best, temperature).to(tl.float64)
    group, share = pick_group(mass, u, PLACES)
    token = group * SIZE + tl.arange(0, SIZE)
    value = tl.load(row + token, mask=token < columns, other=float("-inf"))
    inside = pick_inside(weight(value, best, temperature).to(tl.float64), share, SIZE)
    return tl.minimum(group * SIZE + inside, columns - 1), tl.sum(mass, 0)


@triton.jit
def drawn_for(ints, positions, repeats, row, slot, numbers, step, DRAFTS: tl.constexpr):
    """The number of a row, float64, and whether the draw is from the whole row whatever its filters."""
    key, position = tl.load(ints + slot * numbers), tl.load(positions + row)
    whole = tl.full((), 0, tl.int32)
    word = tl.full((), SAMPLE, tl.int64)
    if DRAFTS:
        # A draft of a request that repeats is the token that plain decoding draws at its position.
        whole = (tl.load(repeats + slot) == 0).to(tl.int32)
        word = tl.where(whole > 0, DRAFT + ((tl.zeros_like(position) + step) << 8), SAMPLE)
        position += tl.where(whole > 0, 0, step)
    return uniform(key, position, word), whole


@triton.jit
def leader(tops, args, row, slot, groups, columns, PLACES: tl.constexpr):
    """A row's groups (places, and which are there), their largest logits, the largest and its first token.

    The last value is whether that logit is a number. A row without a slot has no groups.
    """
    place = tl.arange(0, PLACES)
    held = place < tl.where(slot >= 0, groups, 0)
    top = tl.load(tops + row * groups + place, mask=held, other=float("-inf"))
    best = tl.max(top, 0)
    arg = tl.load(args + row * groups + place, mask=held, other=0)
    token = tl.min(tl.where(held & (top == best), arg, columns - 1), 0)
    return place, held, top, best, token, (best < float("inf")) & (best > float("-inf"))


@triton.jit(do_not_specialize=["step"], do_not_specialize_on_alignment=["slots", "positions"])
def _draw(
    logits, slots, positions, floats, ints, tops, args, sums, listed, ids, weights, repeats, step,
    tokens, valid, bests, totals, floors, lasts, stride, columns, groups, fields, numbers,
    PLACES: tl.constexpr, SIZE: tl.constexpr, MOST: tl.constexpr, LONG: tl.constexpr, DRAFTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    place, held, top, best, token, sane = leader(tops, args, row, slot, groups, columns, PLACES)
    tl.store(bests + row, best)
    tl.store(valid + row, sane.to(tl.int8))
    if sane:
        floor, last, total = tl.full((), -1, tl.int32), columns - 1, tl.zeros((), tl.float64)
        temperature = tl.load(floats + slot * fields)
        top_k = tl.load(ints + slot * numbers + 1).to(tl.int32)
        if (temperature > 0) & (top_k != 1):
            u, whole = drawn_for(ints, positions, repeats, row, slot, numbers, step, DRAFTS)
            top_p, min_p = tl.load(floats + slot * fields + 1), tl.load(floats + slot * fields + 2)
            mass = tl.load(sums + row * groups + place, mask=held, other=0.0)
            own = logits + row * stride
            if (whole > 0) | ((top_k == 0) & (top_p >= 1.0) & (min_p <= 0)):
                token, total = drawn_plain(own, top, mass, best, temperature, u, columns, PLACES, SIZE)
            else:
                heads = weight(top, best, temperature)
                total = tl.sum(mass * heads.to(tl.float64), 0)
                floor, last, total, token = filtered(
                    own, tl.where(held, key_of(heads), -1), listed + row * PLACES, ids + row * LONG,
                    weights + row * LONG, columns, best, temperature, top_k, top_p, min_p, total, u, groups,
                    PLACES, SIZE, MOST,
                )  # fmt: skip
        tl.store(totals + row, total)
        tl.store(floors + row, floor)
        tl.store(lasts + row, last)
    tl.store(tokens + row, tl.where(sane, token, 0).to(tl.int64))


@triton.jit(do_not_specialize=["step"], do_not_specialize_on_alignment=["slots", "positions"])
def _search(
    logits, slots, positions, floats, ints, tops, listed, ids, weights, step, tokens, valid, bests, totals,
    floors, lasts, stride, columns, groups, fields, numbers,
    PLACES: tl.constexpr, SIZE: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    # Floors of rows that aren't valid are anything.
    if (tl.load(valid + row) > 0) & (tl.load(floors + row) == SEARCHED):
        u = uniform(tl.load(ints + slot * numbers), tl.load(positions + row) + step, SAMPLE)
        best, temperature = tl.load(bests + row), tl.load(floats + slot * fields)
        place = tl.arange(0, PLACES)
        top = tl.load(tops + row * groups + place, mask=place < groups, other=float("-inf"))
        heads = tl.where(place < groups, key_of(weight(top, best, temperature)), -1)
        floor, last, mass, token = searched(
            logits + row * stride, heads, listed + row * PLACES, ids + row * MOST, weights + row * MOST,
            columns, best, temperature, tl.load(ints + slot * numbers + 1).to(tl.int32),
            tl.load(floats + slot * fields + 1), tl.load(floats + slot * fields + 2), tl.load(totals + row),
            u, groups, PLACES, SIZE, MOST,
        )  # fmt: skip
        tl.store(totals + row, mass)
        tl.store(floors + row, floor)
        tl.store(lasts + row, last)
        tl.store(tokens + row, token.to(tl.int64))


def draw(
    logits: Tensor, stats: GroupStats, slots: Tensor, positions: Tensor, floats: Tensor, ints: Tensor
) -> Drawn:
    """One token a row of edited logits, as plain decoding draws it; no count grows.

    logits     float32 [R, V]; stats are theirs, at these slots' temperatures
    slots      int64 [R], negative for padding;  positions  int64 [R], where each token will stand
    floats     float32 [S, 6] and ints int64 [S, 2], of SlotParameters
    raises     ShapeMismatch
    """
    return _launch(logits, stats, (slots, positions, floats, ints), 0, None)


def draw_drafts(
    logits: Tensor,
    stats: GroupStats,
    slots: Tensor,
    positions: Tensor,
    floats: Tensor,
    ints: Tensor,
    step: int,
    repeats: Tensor,
) -> Tensor:
    """Draft `step` (from 0) of each row, int64 [R]: no filter, but where the request repeats.

    positions  int64 [R], of each row's first draft;  repeats  uint8 [S], Features.repeats
    Other arguments and errors as of `draw`.
    """
    return _launch(logits, stats, (slots, positions, floats, ints), step, repeats).tokens


def _launch(
    logits: Tensor, stats: GroupStats, columns: tuple[Tensor, ...], step: int, repeats: Tensor | None
) -> Drawn:
    rows, size = logits.shape
    slots, positions, floats, ints = columns
    if slots.shape != (rows,) or positions.shape != (rows,) or stats.tops.shape[0] != rows:
        raise ShapeMismatch(f"{rows} rows, {slots.shape} slots, {positions.shape} positions")
    groups = stats.tops.shape[1]
    places, most = triton.next_power_of_2(groups), LISTED.value
    empty = logits.new_empty
    scratch = (*(empty(rows, n, dtype=torch.int32) for n in (places, most)), empty(rows, most))
    out = Drawn(
        empty(rows, dtype=torch.int64), empty(rows, dtype=torch.bool), empty(rows),
        empty(rows, dtype=torch.float64), empty(rows, dtype=torch.int32), empty(rows, dtype=torch.int32),
    )  # fmt: skip
    if rows:
        outs = (out.tokens, out.valid.view(torch.int8), out.best, out.totals, out.floors, out.lasts)
        sizes = (logits.stride(0), size, groups, floats.stride(0), ints.stride(0), places, GROUP)
        _draw[(rows,)](
            logits, *columns, stats.tops, stats.args, stats.sums, *scratch, repeats, step, *outs, *sizes,
            CANDIDATES.value, most, repeats is not None, num_warps=8,
        )  # fmt: skip
        _search[(rows,)](logits, *columns, stats.tops, *scratch, step, *outs, *sizes, most, num_warps=8)
    return out


def sample(logits: Tensor, slots: Tensor, positions: Tensor, floats: Tensor, ints: Tensor) -> Drawn:
    """`group_stats` and `draw`."""
    return draw(logits, group_stats(logits, slots, floats), slots, positions, floats, ints)
