"""The router's choice, and choices sorted into blocks of one expert each, without a read by the host.

Source: DeepSeek-V4's gate (square root of softplus; the bias chooses and never weighs; hash layers look
their experts up by token id). Ties go to the expert with the smaller id.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.errors import ShapeMismatch
from engine.kernels.triton.arrivals import MANY, THREADS, Arrival, await_flags
from engine.kernels.triton.launch import ahead, await_previous

CHUNK, FEW = 2048, 512
"""Choices that a program goes through at once; and those that every program counts for itself."""


@triton.jit
def _score(logit):
    """sqrt(softplus(logit)), with full relative precision for very negative logits too."""
    small = tl.exp(-tl.abs(logit))
    one = 1.0 + small
    # log1p: the rounding of 1 + small is undone by the quotient.
    rest = tl.where(one == 1.0, small, tl.log(one) * (small / tl.where(one == 1.0, 1.0, one - 1.0)))
    return tl.sqrt(tl.maximum(logit, 0.0) + rest)


@triton.jit
def _route(
    logits, bias, table, tokens, padding, ids, weights, rows, experts, vocabulary, scaling,
    COUNT: tl.constexpr, PADDED: tl.constexpr, WIDE: tl.constexpr, HASHED: tl.constexpr,
    PARTS: tl.constexpr, MARKED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, WIDE)
    place = tl.arange(0, PADDED)
    if not HASHED:
        shift = tl.load(bias + expert, mask=expert < experts, other=0.0)
    await_previous()
    token = tl.load(tokens + row)
    known = (token >= 0) & (token < vocabulary)
    if MARKED:
        known = known & (tl.load(padding + row) == 0)
    part = tl.arange(0, PARTS)[:, None].to(tl.int64) * rows + row
    logit = tl.load(logits + part * experts + expert[None, :], mask=(expert < experts)[None, :], other=0.0)
    score = _score(tl.sum(logit, 0))
    chosen = tl.full((PADDED,), -1, tl.int32)
    weight = tl.zeros((PADDED,), tl.float32)
    ranking = score
    if not HASHED:
        ranking = score + shift
    ranking = tl.where(expert < experts, ranking, float("-inf"))
    for choice in tl.static_range(COUNT):
        if HASHED:
            best = tl.load(table + tl.where(known, token, 0).to(tl.int64) * COUNT + choice).to(tl.int32)
        else:
            best = tl.argmax(ranking, 0, tie_break_left=True)
            ranking = tl.where(expert == best, float("-inf"), ranking)
        chosen = tl.where(place == choice, best, chosen)
        weight = tl.where(place == choice, tl.sum(tl.where(expert == best, score, 0.0), 0), weight)
    weight = weight * (scaling / tl.sum(weight, 0))
    at = row * COUNT + place
    tl.store(ids + at, tl.where(known, chosen, -1), mask=place < COUNT)
    tl.store(weights + at, tl.where(known, weight, 0.0), mask=place < COUNT)


@triton.jit
def _arrive(flags, count, turns, faults, patience_ns, FLAGS: tl.constexpr):
    """Waits for all flags of the turn that is at hand; the first program notes that they are there."""
    turn = tl.load(turns) + 1
    await_flags(flags, count, turn, faults, patience_ns, FLAGS, 1)
    if tl.program_id(0) == 0:
        tl.store(turns + 1, turn)


@triton.jit(do_not_specialize=["flag_count"])
def _count(
    ids, counts, choices, first_expert, flags, flag_count, turns, faults, patience_ns,
    CHUNK: tl.constexpr, FLAGS: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0) + first_expert
    lane = tl.arange(0, CHUNK)
    await_previous()
    if FLAGS > 0:
        _arrive(flags, flag_count, turns, faults, patience_ns, FLAGS)
    count = tl.zeros((CHUNK,), tl.int32)
    for first in range(0, choices, CHUNK):
        own = tl.load(ids + first + lane, mask=first + lane < choices, other=-1)
        count += (own == expert).to(tl.int32)
    tl.store(counts + tl.program_id(0), tl.sum(count, 0))


@triton.jit(do_not_specialize=["blocks", "flag_count"])
def _sort(
    ids, counts, slots, owners, choices, experts, blocks, first_expert, flags, flag_count, turns, faults,
    patience_ns, ROWS: tl.constexpr, WIDE: tl.constexpr, CHUNK: tl.constexpr, COUNTED: tl.constexpr,
    FLAGS: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    other = tl.arange(0, WIDE)
    await_previous()
    if FLAGS > 0:
        _arrive(flags, flag_count, turns, faults, patience_ns, FLAGS)
    if COUNTED:
        had = tl.load(counts + other, mask=other < experts, other=0)
    else:
        # All choices are one chunk: every program counts them for itself.
        every = tl.load(ids + lane, mask=lane < choices, other=-1).to(tl.int32) - first_expert
        known = (every >= 0) & (every < experts)
        had = tl.histogram(tl.where(known, every, 0), WIDE, mask=known)
    tiles = (had + ROWS - 1) // ROWS
    start = tl.sum(tl.where(other < expert, tiles, 0), 0)
    count = tl.sum(tl.where(other == expert, tiles, 0), 0)
    if expert == experts:
        # The last program closes the list: blocks beyond it belong to nobody.
        for first in range(start, blocks, CHUNK):
            tl.store(owners + first + lane, -1, mask=first + lane < blocks)
    else:
        for first in range(start, start + count, CHUNK):
            tl.store(owners + first + lane, expert, mask=first + lane < start + count)
        place = start * ROWS
        for first in range(0, choices, CHUNK):
            own = tl.load(ids + first + lane, mask=first + lane < choices, other=-1)
            hit = (own == expert + first_expert).to(tl.int32)
            tl.store(slots + place + tl.cumsum(hit, 0) - 1, first + lane, mask=hit > 0)
            place += tl.sum(hit, 0)
        end = (start + count) * ROWS
        for first in range(place, end, CHUNK):
            tl.store(slots + first + lane, -1, mask=first + lane < end)


@dataclass(frozen=True)
class Blocks:
    """Choices in blocks of `rows`, each of one expert; a choice is t k + j, for choice j of row t.

    slots   int32 [blocks, rows]: choices, in ascending order for each expert; -1 where a block isn't full
    owners  int32 [blocks]: expert of each block; -1 for blocks that aren't needed (their slots hold anything)
    """

    slots: Tensor
    owners: Tensor
    rows: int


def route(
    logits: Tensor, tokens: Tensor, bias: Tensor | None, table: Tensor | None, count: int, scaling: float,
    padding: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Experts of each row, best first, and their weights.

    logits   [T, E] float32, or in parts [P, T, E] to be added up, P a power of two
    tokens   [T] token ids; -1 (and any id outside the table) is padding: ids -1, weights 0
    bias     [E] float32, or none and table [V, k] of expert ids by token, int32 or int64
    padding  bool [T]: padding whatever the token id; none: no row but for its id
    returns  ids int32 [T, k], weights float32 [T, k]
    raises   ShapeMismatch
    """
    parts = logits if logits.dim() == 3 else logits.unsqueeze(0)
    split, rows, experts = parts.shape
    if (bias is None) == (table is None) or count > experts or not logits.is_contiguous():
        raise ShapeMismatch(f"{count} of {experts} experts; takes a bias or a table, not both")
    ids = torch.empty(rows, count, dtype=torch.int32, device=logits.device)
    weights = torch.empty(rows, count, dtype=torch.float32, device=logits.device)
    if rows:
        vocabulary = 2**31 - 1 if table is None else table.shape[0]
        marks = None if padding is None else padding.view(torch.uint8)
        _route[(rows,)](
            parts, bias, table, tokens, marks, ids, weights, rows, experts, vocabulary, scaling, count,
            triton.next_power_of_2(count), triton.next_power_of_2(experts), table is not None, split,
            padding is not None, num_warps=1, **ahead(rows),
        )  # fmt: skip
    return ids, weights


def block_count(choices: int, experts: int, rows: int) -> int:
    """The most blocks of `rows` that so many choices can need, whatever they choose."""
    return choices // rows + min(choices, experts)


def sort_choices(
    ids: Tensor, experts: int, rows: int, first: int = 0, arrival: Arrival | None = None
) -> Blocks:
    """Choices in blocks of one expert each; the same ids give the same blocks.

    ids      [T, k] int32 or int64; ids outside first..first + experts - 1 are left out
    rows     of a block
    first    id of the first expert here
    arrival  what ids, and what the blocks' users read beside them, wait for
    """
    choices = ids.numel()
    blocks = block_count(choices, experts, rows)
    slots = torch.empty(blocks, rows, dtype=torch.int32, device=ids.device)
    owners = torch.empty(blocks, dtype=torch.int32, device=ids.device)
    if choices:
        ids, counts, counted = ids.contiguous(), owners, choices > FEW
        chunk = CHUNK if counted else max(128, triton.next_power_of_2(choices))
        waits, flags = _waits(arrival, ids, MANY if counted else THREADS)
        if counted:
            counts = torch.empty(experts, dtype=torch.int32, device=ids.device)
            _count[(experts,)](ids, counts, choices, first, *waits, chunk, flags)
            flags = 0
        wide = triton.next_power_of_2(experts)
        _sort[(experts + 1,)](
            ids, counts, slots, owners, choices, experts, blocks, first, *waits, rows, wide, chunk, counted,
            flags, **ahead(len(ids)),
        )  # fmt: skip
    return Blocks(slots, owners, rows)


def _waits(
    arrival: Arrival | None, unread: Tensor, lanes: int
) -> tuple[tuple[Tensor, int, Tensor, Tensor, int], int]:
    """A kernel's arguments, and its lanes for flags: none where it waits for nothing."""
    if arrival is None:
        return (unread, 0, unread, unread, 0), 0
    count = arrival.flags.numel()
    return (arrival.flags, count, arrival.turns, arrival.faults, arrival.patience_ns), lanes
