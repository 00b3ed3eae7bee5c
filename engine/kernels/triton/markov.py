"""The Markov head's loop over a block of drafts: each position's bias of the token before it, and its draft.

Two launches a position. The first adds W2 e to the position's logits in place, and leaves the statistics of
its groups of 128 tokens, so that nothing reads the logits for their sake; the second draws.

Source: engine/model/markov.py, engine/runner/acceptance.py (`choose`). The bias is a float32 sum here; plain
torch rounds it to W2's type.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.errors import ShapeMismatch
from engine.kernels.triton.draws import draw_drafts, drawn_plain, leader
from engine.kernels.triton.draws_numbers import DRAFT, GROUP, uniform, weight
from engine.kernels.triton.formats import convert, product
from engine.model.group_stats import GroupStats

FEW_ROWS, MANY_ROWS = 16, 64
STEP = 64


@dataclass(frozen=True)
class Choosers:
    """How B rows choose their drafts.

    slots      int64 [B], negative for padding
    positions  int64 [B], of each row's first draft
    floats     float32 [S, 6] and ints int64 [S, 2], of SlotParameters
    repeats    uint8 [S], Features.repeats; None: no slot's request repeats
    """

    slots: Tensor
    positions: Tensor
    floats: Tensor
    ints: Tensor
    repeats: Tensor | None


@dataclass(frozen=True)
class MarkovDrafts:
    """Of B rows: ids int64 [B, gamma], lying position by position, and statistics of [gamma B, V] logits."""

    ids: Tensor
    stats: GroupStats


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["previous", "tops", "args", "sums"])
def _bias(
    logits, previous, w1, w2, slots, floats, tops, args, sums, rows, columns, rank, groups, fields,
    ROWS: tl.constexpr, SIZE: tl.constexpr, STEP: tl.constexpr, LOOKED_UP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    group = tl.program_id(1)
    token = group * SIZE + tl.arange(0, SIZE)
    real, held = row < rows, token < columns
    source = tl.where(real, row, 0).to(tl.int64)
    if LOOKED_UP:
        source = tl.load(previous + source)
        source = tl.where((source >= 0) & (source < columns), source, 0)
    total = tl.zeros((SIZE, ROWS), tl.float32)
    for first in range(0, rank, STEP):
        channel = first + tl.arange(0, STEP)
        inside = (channel < rank)[None, :]
        e = tl.load(w1 + source[:, None] * rank + channel[None, :], mask=inside, other=0.0)
        e = convert(e.to(tl.float32), w2.dtype.element_ty)
        at = w2 + token.to(tl.int64)[:, None] * rank + channel[None, :]
        own = tl.load(at, mask=held[:, None] & inside, other=0.0)
        if w2.dtype.element_ty == tl.float32:
            total = tl.dot(own, tl.trans(e), total, input_precision="tf32x3")
        else:
            total = product(own, tl.trans(e), total)
    both = real[:, None] & held[None, :]
    at = logits + row.to(tl.int64)[:, None] * columns + token[None, :]
    value = tl.load(at, mask=both, other=float("-inf")) + tl.trans(total)
    tl.store(at, value, mask=both)
    value = tl.where(value != value, float("inf"), tl.where(both, value, float("-inf")))
    top = tl.max(value, 1)
    into = row.to(tl.int64) * groups + group
    tl.store(tops + into, top, mask=real)
    tl.store(args + into, tl.argmax(value, 1, tie_break_left=True) + group * SIZE, mask=real)
    slot = tl.load(slots + row, mask=real, other=-1)
    temperature = tl.load(floats + tl.maximum(slot, 0) * fields, mask=slot >= 0, other=0.0)
    if tl.max(temperature, 0) > 0:
        warm = tl.where(temperature > 0, temperature, 1.0)
        least = tl.where(tl.abs(top) < float("inf"), top, 0.0)
        mass = tl.sum(weight(value, least[:, None], warm[:, None]).to(tl.float64), 1)
        tl.store(sums + into, mask=real, value=mass)


@triton.jit(
    do_not_specialize=["step"], do_not_specialize_on_alignment=["positions", "tops", "args", "sums", "tokens"]
)
def _choose(
    logits, slots, positions, floats, ints, tops, args, sums, tokens, step, columns, groups, fields, numbers,
    PLACES: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    place, held, top, best, token, sane = leader(tops, args, row, slot, groups, columns, PLACES)
    if sane:
        temperature = tl.load(floats + slot * fields)
        if (temperature > 0) & (tl.load(ints + slot * numbers + 1) != 1):
            u = uniform(tl.load(ints + slot * numbers), tl.load(positions + row), DRAFT | (step << 8))
            mass = tl.load(sums + row * groups + place, mask=held, other=0.0)
            own = logits + row * columns
            token, _ = drawn_plain(own, top, mass, best, temperature, u, columns, PLACES, SIZE)
    tl.store(tokens + row, tl.where(sane, token, 0).to(tl.int64))


def add_bias(
    logits: Tensor, w1: Tensor, w2: Tensor, previous: Tensor | None, stats: GroupStats, slots: Tensor,
    floats: Tensor,
) -> None:  # fmt: skip
    """Adds W2 e to logits [B, V] float32 in place, and writes their statistics.

    w1        [V, r], of which e are the rows `previous` int64 [B]; or e itself, [B, r], where that is None
    w2        [V, r] bfloat16 or float32; e is rounded to its type
    stats     [B, ceil(V / 128)], written at the temperatures of slots int64 [B] in floats float32 [S, 6]
    raises    ShapeMismatch
    """
    rows, columns = logits.shape
    rank, groups = w2.shape[1], triton.cdiv(columns, GROUP)
    sources = rows if previous is None else columns
    if w2.shape != (columns, rank) or w1.shape != (sources, rank) or stats.tops.shape != (rows, groups):
        raise ShapeMismatch(f"W1 {tuple(w1.shape)}, W2 {tuple(w2.shape)}, logits {tuple(logits.shape)}")
    if not (logits.is_contiguous() and w1.is_contiguous() and w2.is_contiguous()):
        raise ShapeMismatch("logits, W1 and W2 must each lie in one piece")
    if rows:
        tile = FEW_ROWS if rows <= FEW_ROWS else MANY_ROWS
        _bias[(triton.cdiv(rows, tile), groups)](
            logits, previous, w1, w2, slots, floats, stats.tops, stats.args, stats.sums, rows, columns, rank,
            groups, floats.stride(0), tile, GROUP, STEP, previous is not None, num_warps=4, num_stages=3,
        )  # fmt: skip


def choose(logits: Tensor, stats: GroupStats, choosers: Choosers, step: int, out: Tensor) -> None:
    """Draft `step` (from 0) of each row of biased logits [B, V] into out, int64 [B]; the stats are theirs."""
    slots, positions, floats, ints = choosers.slots, choosers.positions, choosers.floats, choosers.ints
    if choosers.repeats is not None:
        out.copy_(draw_drafts(logits, stats, slots, positions, floats, ints, step, choosers.repeats))
        return
    rows, columns = logits.shape
    groups = stats.tops.shape[1]
    if rows:
        _choose[(rows,)](
            logits, slots, positions, floats, ints, stats.tops, stats.args, stats.sums, out, step, columns,
            groups, floats.stride(0), ints.stride(0), triton.next_power_of_2(groups), GROUP,
        )  # fmt: skip


def draft_block(logits: Tensor, anchors: Tensor, w1: Tensor, w2: Tensor, choosers: Choosers) -> MarkovDrafts:
    """A block of drafts of the "vanilla" head, whose e is W1 of the token before.

    logits   float32 [gamma, B, V] in one piece; the biases are added in place: what drafts were drawn from
    anchors  int64 [B], the token before each row's first draft
    raises   ShapeMismatch
    """
    gamma, rows, columns = logits.shape
    groups, empty = triton.cdiv(columns, GROUP), logits.new_empty
    shape = (gamma, rows, groups)
    stats = GroupStats(empty(shape), empty(shape, dtype=torch.int32), empty(shape, dtype=torch.float64))
    ids = empty(gamma, rows, dtype=torch.int64)
    previous = anchors
    for k in range(gamma):
        own = GroupStats(stats.tops[k], stats.args[k], stats.sums[k])
        add_bias(logits[k], w1, w2, previous, own, choosers.slots, choosers.floats)
        choose(logits[k], own, choosers, k, ids[k])
        previous = ids[k]
    flat = GroupStats(stats.tops.flatten(0, 1), stats.args.flatten(0, 1), stats.sums.flatten(0, 1))
    return MarkovDrafts(ids.t(), flat)
