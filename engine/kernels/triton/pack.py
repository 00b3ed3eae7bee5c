"""Rows on their way to the ranks that hold their experts: packed beside their choices, and taken apart again.

A packed row is, in this order: the row's values, its choices' ids plus one as int32, their weights as
float32. Zeros are a row of no choices. Source: `TorchOps.pack` and `unpack`.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.errors import ShapeMismatch


@triton.jit(do_not_specialize=["count"])
def _pack(
    x, ids, weights, out, count, hidden, width, CHOICES: tl.constexpr, PADDED: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PADDED)
    # Of a row past the last one nothing is read.
    end = tl.where(row < count, hidden, 0)
    choices = tl.where(row < count, CHOICES, 0)
    at = out + row * width
    values = at.to(tl.pointer_type(tl.bfloat16))
    for first in range(0, hidden, WIDE):
        channel = first + tl.arange(0, WIDE)
        value = tl.load(x + row * hidden + channel, mask=channel < end, other=0.0)
        tl.store(values + channel, value, mask=channel < hidden)
    chosen = place < choices
    own = tl.load(ids + row * CHOICES + place, mask=chosen, other=-1).to(tl.int32) + 1
    weight = tl.load(weights + row * CHOICES + place, mask=chosen, other=0.0)
    rest = at + 2 * hidden
    tl.store(rest.to(tl.pointer_type(tl.int32)) + place, own, mask=place < CHOICES)
    rest += 4 * CHOICES
    tl.store(rest.to(tl.pointer_type(tl.float32)) + place, weight, mask=place < CHOICES)


@triton.jit
def _unpack(
    packed, x, ids, weights, hidden, width, first_expert, CHOICES: tl.constexpr, PADDED: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PADDED)
    at = packed + row * width
    values = at.to(tl.pointer_type(tl.bfloat16))
    for first in range(0, hidden, WIDE):
        channel = first + tl.arange(0, WIDE)
        held = channel < hidden
        tl.store(x + row * hidden + channel, tl.load(values + channel, mask=held, other=0.0), mask=held)
    chosen = place < CHOICES
    rest = at + 2 * hidden
    own = tl.load(rest.to(tl.pointer_type(tl.int32)) + place, mask=chosen, other=0) - 1 - first_expert
    weight = tl.load((rest + 4 * CHOICES).to(tl.pointer_type(tl.float32)) + place, mask=chosen, other=0.0)
    tl.store(ids + row * CHOICES + place, own, mask=chosen)
    tl.store(weights + row * CHOICES + place, weight, mask=chosen)


def pack(x: Tensor, ids: Tensor, weights: Tensor, rows: int) -> Tensor:
    """Rows and choices side by side, uint8 [rows, 2 H + 8 k]; those past T are zeros.

    x        [T, H] bfloat16, H even, T at most `rows`; ids [T, k] int32 or int64, -1: none
    weights  [T, k] float32; all contiguous
    raises   ShapeMismatch
    """
    (count, hidden), choices = x.shape, ids.shape[1]
    if (
        x.dtype != torch.bfloat16 or hidden % 2 or count > rows or ids.shape != weights.shape
        or not (x.is_contiguous() and ids.is_contiguous() and weights.is_contiguous())
    ):  # fmt: skip
        raise ShapeMismatch(f"x {x.dtype} {tuple(x.shape)}, ids {tuple(ids.shape)} for {rows} rows")
    out = torch.empty(rows, 2 * hidden + 8 * choices, dtype=torch.uint8, device=x.device)
    if rows:
        wide = min(4096, triton.next_power_of_2(hidden))
        _pack[(rows,)](
            x, ids, weights, out, count, hidden, out.shape[1], choices, triton.next_power_of_2(choices), wide
        )
    return out


def unpack(packed: Tensor, hidden: int, choices: int, first: int) -> tuple[Tensor, Tensor, Tensor]:
    """What `pack` was given: bfloat16 [n, H], int32 [n, k] numbered from expert `first` on, float32 [n, k].

    packed  uint8 [n, 2 H + 8 k], contiguous
    raises  ShapeMismatch
    """
    rows, width = packed.shape
    if width != 2 * hidden + 8 * choices or packed.dtype != torch.uint8 or not packed.is_contiguous():
        raise ShapeMismatch(f"packed {packed.dtype} {tuple(packed.shape)} for {hidden} values, {choices} ids")
    x = torch.empty(rows, hidden, dtype=torch.bfloat16, device=packed.device)
    ids = torch.empty(rows, choices, dtype=torch.int32, device=packed.device)
    weights = torch.empty(rows, choices, dtype=torch.float32, device=packed.device)
    if rows:
        wide = min(4096, triton.next_power_of_2(hidden))
        _unpack[(rows,)](
            packed, x, ids, weights, hidden, width, first, choices, triton.next_power_of_2(choices), wide
        )
    return x, ids, weights
