"""The entries with the largest scores, exactly, in ascending order; of equal scores the earlier entry.

A program holds its part of a row in registers, as integers that are ordered as the scores are, and narrows
the interval that the last chosen score lies in until as many scores stand above it as are wanted, or it holds
one score alone. Prefix sums then give each chosen entry its place. Rows longer than a program's part are
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
from engine.kernels.triton.launch import ahead, await_previous
from engine.kernels.triton.linear import multiprocessors

PART = 16384
"""Scores that a program holds at most: 32 registers of each of 512 lanes."""
UNSEEN = tl.constexpr(-2139095041)
"""Minus infinity as an ordered integer."""


@triton.jit
def _ordered(score):
    """float32 as int32 of the same order; zeros are equal, and any NaN stands above infinity."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    return tl.where(score != score, 0x7FC00000, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def _score(key):
    """The score of an ordered integer."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _places(flags, WIDE: tl.constexpr):
    """How many of the lanes [WIDE] up to each one are flagged: within groups, and in the groups before."""
    if WIDE > 32:
        lanes = tl.reshape(flags.to(tl.int32), (WIDE // 32, 32))
        whole = tl.sum(lanes, 1)
        before = tl.cumsum(whole, 0) - whole
        place = tl.reshape(tl.cumsum(lanes, 1) + before[:, None], (WIDE,))
    else:
        place = tl.cumsum(flags.to(tl.int32), 0)
    return place


@triton.jit
def _pivot(low, high, up, down, turn):
    """A key within (low, high), by turns where a line of scores or one of keys meets the count wanted.

    up, down  how far from that count's logarithm those at `low` and at `high` are, positive
    """
    share = up / (up + down)
    # Ends beyond 2^126 take no part in a line of scores, or it would overflow.
    first = _score(tl.minimum(tl.maximum(low, -0x7E800001), 0x7E800000))
    last = _score(tl.minimum(tl.maximum(high, -0x7E800001), 0x7E800000))
    guess = _ordered(first + (last - first) * share)
    first, last = low.to(tl.float32), high.to(tl.float32)
    guess = tl.where(turn % 4 == 1, (first + (last - first) * share).to(tl.int32), guess)
    # Every fourth time, and where the line leads nowhere, the interval is halved: it ends with any scores.
    inside = (guess > low) & (guess < high) & (turn % 4 < 3)
    return tl.where(inside, guess, (low & high) + ((low ^ high) >> 1))


@triton.jit
def _least_chosen(key, seen, wanted):
    """An interval [low, high) of keys: all from `high` on are chosen, of those from `low` the first few.

    seen     how many keys aren't UNSEEN
    wanted   how many, at most as many as are seen, above zero
    returns  low, high, and how many keys are from `low` on, and from `high` on
    """
    low = tl.min(tl.where(key > UNSEEN, key, 0x7FFFFFFF), 0)
    high = tl.max(key, 0) + 1
    above = seen
    beyond, turn, side = wanted * 0, wanted * 0, wanted * 0
    goal = tl.log2(wanted.to(tl.float32))
    up, down = tl.log2(above.to(tl.float32)) - goal, goal + 1.0
    while (high > low + 1) & (above > wanted):
        middle = _pivot(low, high, up, down, turn)
        # What is unseen stands below every pivot.
        count = tl.sum((key >= middle).to(tl.int32), 0)
        enough = count >= wanted
        low, above = tl.where(enough, middle, low), tl.where(enough, count, above)
        high, beyond = tl.where(enough, high, middle), tl.where(enough, beyond, count)
        far = tl.log2(tl.maximum(count.to(tl.float32), 0.5)) - goal
        # An end that stays for a second time pulls half as much, or the other would creep towards the goal.
        up = tl.where(enough, far, tl.where(side < 0, up * 0.5, up))
        down = tl.where(enough, tl.where(side > 0, down * 0.5, down), -far)
        side, turn = tl.where(enough, 1, -1), turn + 1
    return low, high, above, beyond


@triton.jit(do_not_specialize=["columns", "missing", "width", "row_columns"])
def _select(
    scores, entries, rows, out, chosen_scores, columns, wanted, missing, width, row_columns,
    WIDE: tl.constexpr, WANTED: tl.constexpr, FROM: tl.constexpr, ROWS: tl.constexpr, SCORED: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = part * WIDE + tl.arange(0, WIDE)
    held = column < columns
    await_previous()
    key = _ordered(tl.load(scores + row * columns + column, mask=held, other=float("-inf")))
    seen = tl.sum((key > UNSEEN).to(tl.int32), 0)
    count = tl.minimum(seen, wanted)
    chosen = key > UNSEEN
    if count > 0:
        low, high, above, beyond = _least_chosen(key, seen, count)
        chosen = key >= low
        if above > count:
            # Too many are equal: the earlier ones of them.
            equal = chosen & (key < high)
            chosen = chosen & (~equal | (_places(equal, WIDE) <= count - beyond))
    place = (row * tl.num_programs(1) + part) * wanted
    entry = column
    if FROM:
        entry = tl.load(entries + row * columns + column, mask=chosen, other=0)
    if ROWS:
        entry = tl.load(rows + row // width * row_columns + entry, mask=chosen, other=0)
    rank = _places(chosen, WIDE) - 1
    tl.store(out + place + rank, entry, mask=chosen)
    free = tl.arange(0, WANTED)
    rest = (free >= count) & (free < wanted)
    tl.store(out + place + free, tl.zeros((WANTED,), tl.int32) + missing, mask=rest)
    if SCORED:
        tl.store(chosen_scores + place + rank, _score(key), mask=chosen)
        tl.store(chosen_scores + place + free, tl.full((WANTED,), float("-inf"), tl.float32), mask=rest)


def part_for(rows: int, columns: int, count: int, processors: int) -> int:
    """Scores of a program: rows that don't fill the device are selected from in parts at once.

    Measured on an H200: a row of 16,384 scores takes 15 us in parts, 19 us whole; one of 65,536 20 and 25 us;
    64 rows of either are faster whole.
    """
    part = PART // 4 if columns <= PART else PART // 2
    fits = rows * triton.cdiv(columns, part) <= processors and 8 * count <= part
    return part if fits else PART


def select_in_order(scores: Tensor, count: int, part: int | None = None) -> Tensor:
    """Entries of the `count` largest scores of each row, as `TorchOps.select_in_order` gives them.

    scores   [..., N] float32; minus infinity is never chosen: N - 1 stands last for each one missing
    part     scores of a program, a power of two; longer rows take two passes. None: as `part_for` says
    returns  [..., count] int64, ascending
    raises   ShapeMismatch
    """
    out = torch.empty(*scores.shape[:-1], count, dtype=torch.int64, device=scores.device)
    _select_into(scores, None, out, part)
    return out


def select_rows(scores: Tensor, rows: Tensor, count: int, part: int | None = None) -> Tensor:
    """Pool rows of the entries with the `count` largest scores of each query, in the entries' order.

    scores   [blocks, W, N] float32, as `index_scores` gives them
    rows     [blocks, N] int32 or int64, the pool row of each entry
    returns  [blocks, W, count] int32; 0 stands last for each one missing
    raises   ShapeMismatch
    """
    if tuple(rows.shape) != (len(scores), scores.shape[2]) or not rows.is_contiguous():
        raise ShapeMismatch(f"rows {tuple(rows.shape)} of scores {tuple(scores.shape)}")
    out = torch.empty(*scores.shape[:2], count, dtype=torch.int32, device=scores.device)
    _select_into(scores, rows, out, part)
    return out


def _select_into(scores: Tensor, rows: Tensor | None, out: Tensor, asked: int | None) -> None:
    """Fills out [..., count] with entries, or with their pool rows [blocks, N]; asked: a program's scores."""
    columns, count = scores.shape[-1], out.shape[-1]
    lists = scores.numel() // max(1, columns)
    part = asked or part_for(lists, columns, count, multiprocessors(scores.device))
    if count > min(columns, part // 2 if columns > part else part) or part & (part - 1):
        raise ShapeMismatch(f"{count} of {columns} entries, in parts of {part}")
    if scores.dtype != torch.float32 or not scores.is_contiguous():
        raise ShapeMismatch(f"scores {scores.dtype} {tuple(scores.shape)}, strides {scores.stride()}")
    if not out.numel():
        return
    best, entries = scores.view(-1, columns), None
    while best.shape[1] > part:
        size = triton.cdiv(best.shape[1], part) * count
        chosen = torch.empty(best.shape[0], size, dtype=torch.int32, device=best.device)
        chosen_scores = torch.empty(chosen.shape, dtype=torch.float32, device=best.device)
        _run(best, entries, None, chosen, chosen_scores, (count, 0, 1, columns), part)
        best, entries = chosen_scores, chosen
    wide = min(part, max(16, int(triton.next_power_of_2(best.shape[1]))))
    sizes = (count, columns - 1 if rows is None else 0, scores.shape[-2] if rows is not None else 1, columns)
    _run(best, entries, rows, out, None, sizes, wide)


def _run(
    scores: Tensor, entries: Tensor | None, rows: Tensor | None, out: Tensor, chosen_scores: Tensor | None,
    sizes: tuple[int, int, int, int], wide: int,
) -> None:  # fmt: skip
    """sizes: how many to choose, what stands for a missing one, queries of a block, entries of a row list."""
    count, columns = scores.shape
    _select[(count, triton.cdiv(columns, wide))](
        scores, entries, rows, out, chosen_scores, columns, *sizes, wide, triton.next_power_of_2(sizes[0]),
        entries is not None, rows is not None, chosen_scores is not None,
        num_warps=max(1, min(16, wide // 512)), **ahead(count),
    )  # fmt: skip
