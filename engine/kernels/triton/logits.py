"""What sampling knows of a row before it looks at single tokens: statistics of groups of 128 tokens.

One pass over the logits. Source: engine/runner/filters.py's blocks (`greatest`, `draw`). A group's figures
depend on nothing but the group, so a row's result doesn't depend on the other rows or on how many there are.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.errors import ShapeMismatch
from engine.kernels.triton.draws_numbers import GROUP, weight
from engine.model.group_stats import GroupStats

FEW_ROWS = 16
"""Up to so many rows programs are small, to be more than the device has multiprocessors."""


@triton.jit
def store_stats(value, at, held, first, temperature, tops, args, sums):
    """Writes statistics of groups: value float32 [GROUPS, SIZE], minus infinity behind the vocabulary.

    at, held, first  [GROUPS], where each group's figures stand, whether it is one, and its first token
    """
    value = tl.where(value != value, float("inf"), value)
    top = tl.max(value, 1)
    tl.store(tops + at, top, mask=held)
    tl.store(args + at, tl.argmax(value, 1, tie_break_left=True) + first, mask=held)
    if temperature > 0:
        # Without a finite top the sum is 0, or belongs to a row that fails.
        least = tl.where(tl.abs(top) < float("inf"), top, 0.0)[:, None]
        mass = tl.sum(weight(value, least, temperature).to(tl.float64), 1)
        tl.store(sums + at, mass, mask=held)


@triton.jit
def _group_stats(
    logits, slots, floats, tops, args, sums, stride, columns, groups, width, fields,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, TEMPERED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    token = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    slot = tl.zeros((), tl.int64)
    temperature = tl.full((), 1.0, tl.float32)
    if TEMPERED:
        slot = tl.load(slots + row // width).to(tl.int64)
        temperature = tl.load(floats + tl.maximum(slot, 0) * fields)
    if slot >= 0:
        value = tl.load(logits + row * stride + token, mask=token < columns, other=float("-inf"))
        at = row * groups + group
        store_stats(value, at, group < groups, group * SIZE, temperature, tops, args, sums)


def new_stats(logits: Tensor) -> GroupStats:
    """Room for the statistics of logits [R, V]."""
    shape, empty = (logits.shape[0], triton.cdiv(logits.shape[1], GROUP)), logits.new_empty
    return GroupStats(empty(shape), empty(shape, dtype=torch.int32), empty(shape, dtype=torch.float64))


def groups_of_a_program(rows: int) -> int:
    """Groups that one program takes: few rows are cut finer, so that the whole device reads them."""
    return 8 if rows <= FEW_ROWS else 32


def group_stats(
    logits: Tensor, slots: Tensor | None = None, floats: Tensor | None = None, width: int = 1
) -> GroupStats:
    """Statistics of all rows.

    logits  float32 [R, V], V below 2^31
    slots   int64 [R / width], the slot of `width` rows each, negative for padding: its figures are anything;
            None: every temperature is 1
    floats  float32 [S, 6], SlotParameters.floats
    raises  ShapeMismatch
    """
    rows, columns = logits.shape
    if logits.dtype != torch.float32 or logits.stride(1) != 1 or (slots is None) != (floats is None):
        raise ShapeMismatch(f"logits are {logits.dtype} {tuple(logits.shape)}, strides {logits.stride()}")
    if slots is not None and slots.numel() * width != rows:
        raise ShapeMismatch(f"{slots.numel()} slots of {width} rows each, {rows} rows of logits")
    stats = new_stats(logits)
    if rows:
        groups, several = stats.tops.shape[1], groups_of_a_program(rows)
        fields = 0 if floats is None else floats.stride(0)
        _group_stats[(rows, triton.cdiv(groups, several))](
            logits, slots, floats, stats.tops, stats.args, stats.sums, logits.stride(0), columns, groups,
            width, fields, several, GROUP, slots is not None, num_warps=4,
        )  # fmt: skip
    return stats
