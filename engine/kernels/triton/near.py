"""Rows written straight into the memory of the rank that computes or keeps them, and sums of what came back.

Every rank has one region that all reach (model/groups.py, `Near`), cut as near_planes.py says. A push writes
this rank's rows, as FP8 codes, beside their choices into every region, and tells each row's flag; who sorts
the choices waits for all flags. The experts' second product writes each choice's row into the region of the
rank that sent it, and the join, which every rank begins by telling all others that it is through with that
product, waits for those flags and adds a row's choices in their order. Of a turn's two exchanges each is read
before the other one ends, so that nothing is written over that is still to be read.

Source: `SpreadExperts`, whose sums, and their bits, these are.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.errors import ShapeMismatch
from engine.kernels.near_planes import LINE, Planes
from engine.kernels.triton.arrivals import THREADS, Arrival, await_flags, tell
from engine.kernels.triton.formats import AMAX_FLOOR, GROUP, convert, power_of_two
from engine.kernels.triton.launch import ahead, await_previous
from engine.kernels.triton.quantise import code_words


@triton.jit(do_not_specialize=["count", "rank", "rows"])
def _push(
    x, ids, weights, bases, turns, faults, count, rank, rows, groups, codes_at, scales_at, ids_at, weights_at,
    RANKS: tl.constexpr, CHOICES: tl.constexpr, PADDED: tl.constexpr, GROUPS: tl.constexpr,
    FLOOR: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    place, group, channel = tl.arange(0, PADDED), tl.arange(0, GROUPS), tl.arange(0, 128)
    held, chosen = group < groups, place < CHOICES
    await_previous()
    turn = tl.load(turns) + 1
    # A row past the last one has no choice; nothing is read of it.
    own_choices, own_groups = tl.where(row < count, CHOICES, 0), tl.where(row < count, groups, 0)
    own = tl.load(ids + row * CHOICES + place, mask=place < own_choices, other=-1).to(tl.int32)
    weight = tl.load(weights + row * CHOICES + place, mask=place < own_choices, other=0.0)
    at = (row * groups + group)[:, None] * 128 + channel[None, :]
    value = tl.load(x + at, mask=(group < own_groups)[:, None], other=0.0).to(tl.float32)
    code, exponent = code_words(value, FLOOR)
    scale = power_of_two(exponent)
    there = rank * rows + row
    for peer in tl.static_range(RANKS):
        base = tl.load(bases + peer)
        codes = (base + codes_at).to(tl.pointer_type(tl.uint8)) + there * groups * 128
        at = tl.multiple_of(codes + group * 128, 16)
        tl.store(at[:, None] + channel[None, :], code, mask=held[:, None])
        scales = (base + scales_at).to(tl.pointer_type(tl.float32)) + there * groups
        tl.store(scales + group, scale, mask=held)
        tl.store((base + ids_at).to(tl.pointer_type(tl.int32)) + there * CHOICES + place, own, mask=chosen)
        out = (base + weights_at).to(tl.pointer_type(tl.float32)) + there * CHOICES
        tl.store(out + place, weight, mask=chosen)
    tell(bases, there * 8, turn, rank, faults, RANKS)


@triton.jit(do_not_specialize=["count", "rank"])
def _join_home(
    back, through, ids, extra, out, bases, turns, faults, patience_ns, count, rank, hidden, through_at,
    RANKS: tl.constexpr, CHOICES: tl.constexpr, WIDE: tl.constexpr, APART: tl.constexpr,
    THREADS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    held = channel < tl.where(row < count, hidden, 0)
    first = (tl.program_id(0) == 0) & (tl.program_id(1) == 0)
    await_previous()
    turn = tl.load(turns + 1)
    if first:
        tell(bases, through_at + rank.to(tl.int64) * APART * 8, turn, rank, faults, RANKS)
    total = tl.load(extra + row * hidden + channel, mask=held, other=0.0).to(tl.float32)
    await_flags(through, RANKS, turn, faults, patience_ns, THREADS, APART)
    sum = tl.zeros((WIDE,), tl.float32)
    for choice in tl.static_range(CHOICES):
        # What padding chose nobody wrote.
        expert = tl.load(ids + row * CHOICES + choice, mask=row < count, other=-1)
        written = channel < tl.where(expert >= 0, hidden, 0)
        at = back + (row * CHOICES + choice) * hidden + channel
        sum += tl.load(at, mask=held & written, other=0.0).to(tl.float32)
    tl.store(out + row * hidden + channel, convert(sum + total, out.dtype.element_ty), mask=held)
    if first:
        tl.store(turns, turn)


@dataclass(frozen=True)
class Reach:
    """This rank's way to all regions.

    own          this rank's region, uint8
    bases        int64 [P]: where every rank's region is, its own too
    turns        int64 [2], see Arrival
    """

    rank: int
    planes: Planes
    own: Tensor
    bases: Tensor
    turns: Tensor
    faults: Tensor
    patience_ns: int

    def plane(self, at: int, dtype: torch.dtype, *shape: int) -> Tensor:
        """A view of this rank's region from byte `at` on."""
        size = math.prod(shape) * dtype.itemsize
        return self.own[at : at + size].view(dtype).view(shape)


@dataclass(frozen=True)
class Pushed:
    """What all ranks pushed: codes and scales as of `quantise_words` [P R, ...], ids and weights [P R, k].

    It is there when `arrival` is.
    """

    codes: Tensor
    scales: Tensor
    ids: Tensor
    weights: Tensor
    arrival: Arrival


def push(reach: Reach, x: Tensor, ids: Tensor, weights: Tensor, rows: int) -> Pushed:
    """This rank's rows to every rank.

    x        [T, H] bfloat16, T at most `rows`; ids [T, k] int32 or int64, -1: none
    weights  [T, k] float32; all contiguous
    rows     of each rank, at least 1 and at most the planes'
    raises   ShapeMismatch
    """
    (count, hidden), choices, cut = x.shape, ids.shape[1], reach.planes
    if (
        (hidden, choices) != (cut.hidden, cut.choices) or not max(1, count) <= rows <= cut.rows
        or ids.shape != weights.shape or not all(t.is_contiguous() for t in (x, ids, weights))
    ):  # fmt: skip
        raise ShapeMismatch(f"x {tuple(x.shape)}, ids {tuple(ids.shape)} for {rows} rows of {cut}")
    groups = hidden // GROUP
    _push[(rows,)](
        x, ids, weights, reach.bases, reach.turns, reach.faults, count, reach.rank, rows, groups, cut.codes,
        cut.scales, cut.ids, cut.weights, cut.ranks, choices, triton.next_power_of_2(choices),
        triton.next_power_of_2(groups), AMAX_FLOOR, **ahead(rows),
    )  # fmt: skip
    every = cut.ranks * rows
    return Pushed(
        reach.plane(cut.codes, torch.float8_e4m3fn, every, hidden),
        reach.plane(cut.scales, torch.float32, every, groups),
        reach.plane(cut.ids, torch.int32, every, choices),
        reach.plane(cut.weights, torch.float32, every, choices),
        Arrival(reach.plane(0, torch.int64, every), reach.turns, reach.faults, reach.patience_ns),
    )


def join_home(reach: Reach, ids: Tensor, extra: Tensor) -> Tensor:
    """The sum over choices that came home, in their order, in float32, plus `extra`; its type, [T, H].

    ids     [T, k] of this rank's rows, as they were pushed; rows of negative ones aren't read
    extra   [T, H], contiguous; T may be 0: the others wait for this rank's word
    raises  ShapeMismatch
    """
    cut, (count, choices) = reach.planes, ids.shape
    if tuple(extra.shape) != (count, cut.hidden) or not extra.is_contiguous() or not ids.is_contiguous():
        raise ShapeMismatch(f"ids {tuple(ids.shape)}, extra {tuple(extra.shape)} for {cut}")
    out = torch.empty_like(extra)
    wide = min(1024, triton.next_power_of_2(cut.hidden))
    back = reach.plane(cut.back, torch.bfloat16, cut.rows * choices, cut.hidden)
    through = reach.plane(cut.through, torch.int64, cut.ranks * LINE // 8)
    _join_home[(max(1, count), triton.cdiv(cut.hidden, wide))](
        back, through, ids, extra, out, reach.bases, reach.turns, reach.faults, reach.patience_ns, count,
        reach.rank, cut.hidden, cut.through, cut.ranks, choices, wide, LINE // 8, THREADS,
        **ahead(count),
    )  # fmt: skip
    return out
