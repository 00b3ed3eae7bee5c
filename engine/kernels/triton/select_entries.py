"""The entries with the largest scores, exactly, in ascending order; of equal scores the earlier entry.

A program holds its part of a row in registers, as integers that are ordered as the scores are, and halves the
interval that the last chosen score lies in until as many scores stand above it as are wanted, or it holds one
score alone. Two prefix sums then give each chosen entry its place. Rows longer than a program's part are
selected from in parts first, and from the parts' choices then: those stand in the order of their entries, so
equal scores are still told apart by place. Source: `TorchOps.select_in_order`.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.errors import ShapeMismatch

PART = 16384
"""Scores that a program holds at most: 32 registers of each of 512 lanes."""
UNSEEN = tl.constexpr(-2139095041)
"""Minus infinity as an ordered integer."""


@triton.jit
def _ordered(score):
    """float32 as int32 of the same order; zeros are equal, and any NaN stands above infinity."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return tl.where(score != score, 0x7FC00000, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def _score(key):
    """The score of an ordered integer."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _least_chosen(key, seen, wanted):
    """An interval [low, high) of keys: all from `high` on are chosen, of those from `low` the first few.

    wanted   how many, at most as many as are seen, above zero
    returns  low, high, and how many keys are from `low` on, and from `high` on
    """
    low = tl.min(tl.where(seen, key, 0x7FFFFFFF), 0).to(tl.int64)
    high = tl.max(key, 0).to(tl.int64) + 1
    above = tl.sum(seen.to(tl.int32), 0)
    beyond = wanted * 0
    while (high - low > 1) & (above > wanted):
        middle = (low + high) // 2
        count = tl.sum((seen & (key >= middle.to(tl.int32))).to(tl.int32), 0)
        enough = count >= wanted
        low, above = tl.where(enough, middle, low), tl.where(enough, count, above)
        high, beyond = tl.where(enough, high, middle), tl.where(enough, beyond, count)
    return low, high, above, beyond


@triton.jit
def _select(
    scores, entries, out, chosen_scores, columns, wanted, last,
    WIDE: tl.constexpr, FROM: tl.constexpr, SCORED: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = part * WIDE + tl.arange(0, WIDE)
    held = column < columns
    key = _ordered(tl.load(scores + row * columns + column, mask=held, other=float("-inf")))
    seen = held & (key > UNSEEN)
    count = tl.minimum(tl.sum(seen.to(tl.int32), 0), wanted)
    chosen = seen
    if count > 0:
        low, high, above, beyond = _least_chosen(key, seen, count)
        chosen = seen & (key >= low.to(tl.int32))
        if above > count:
            # Too many are equal: the earlier ones of them.
            equal = (chosen & (key < high.to(tl.int32))).to(tl.int32)
            chosen = chosen & ((equal == 0) | (tl.cumsum(equal, 0) <= count - beyond))
    place = (row * tl.num_programs(1) + part) * wanted
    entry = column
    if FROM:
        entry = tl.load(entries + row * columns + column, mask=chosen, other=0)
    rank = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(out + place + rank, entry, mask=chosen)
    free = tl.arange(0, WIDE)
    rest = (free >= count) & (free < wanted)
    tl.store(out + place + free, tl.zeros((WIDE,), tl.int32) + last, mask=rest)
    if SCORED:
        tl.store(chosen_scores + place + rank, _score(key), mask=chosen)
        tl.store(chosen_scores + place + free, tl.full((WIDE,), float("-inf"), tl.float32), mask=rest)


def select_in_order(scores: Tensor, count: int, part: int = PART) -> Tensor:
    """Entries of the `count` largest scores of each row, as `TorchOps.select_in_order` gives them.

    scores   [..., N] float32; minus infinity is never chosen: N - 1 stands last for each one missing
    part     scores of a program, a power of two; longer rows take two passes
    returns  [..., count] int64, ascending
    raises   ShapeMismatch
    """
    columns = scores.shape[-1]
    if not 0 <= count <= min(columns, part // 2 if columns > part else part):
        raise ShapeMismatch(f"{count} of {columns} entries, in parts of {part}")
    if scores.dtype != torch.float32 or not scores.is_contiguous() or part & (part - 1):
        raise ShapeMismatch(f"scores {scores.dtype} {tuple(scores.shape)} in parts of {part}")
    flat = scores.view(-1, columns)
    out = torch.empty(*scores.shape[:-1], count, dtype=torch.int64, device=scores.device)
    if not out.numel():
        return out
    entries, last = None, columns - 1
    while flat.shape[1] > part:
        parts = triton.cdiv(flat.shape[1], part)
        chosen = torch.empty(flat.shape[0], parts * count, dtype=torch.int32, device=flat.device)
        best = torch.empty(chosen.shape, dtype=torch.float32, device=flat.device)
        _run(flat, entries, chosen, best, count, last, part)
        flat, entries = best, chosen
    _run(flat, entries, out, None, count, last, min(part, max(16, triton.next_power_of_2(flat.shape[1]))))
    return out


def _run(
    scores: Tensor, entries: Tensor | None, out: Tensor, chosen_scores: Tensor | None, count: int, last: int,
    wide: int,
) -> None:  # fmt: skip
    rows, columns = scores.shape
    _select[(rows, triton.cdiv(columns, wide))](
        scores, entries, out, chosen_scores, columns, count, last, wide, entries is not None,
        chosen_scores is not None, num_warps=max(1, min(16, wide // 512)),
    )  # fmt: skip
