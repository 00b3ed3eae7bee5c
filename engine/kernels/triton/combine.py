"""The sum over a row's choices. Source: DeepSeek-V4's experts, added in float32 before one rounding."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.errors import ShapeMismatch
from engine.kernels.triton.formats import convert
from engine.kernels.triton.launch import ahead, await_previous


@triton.jit
def _combine(
    parts, ids, extra, out, experts, hidden, CHOICES: tl.constexpr, WIDE: tl.constexpr, EXTRA: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    held = channel < hidden
    total = tl.zeros((WIDE,), tl.float32)
    await_previous()
    for choice in tl.static_range(CHOICES):
        expert = tl.load(ids + row * CHOICES + choice)
        wide = tl.where((expert >= 0) & (expert < experts), hidden, 0)
        total += tl.load(
            parts + (row * CHOICES + choice) * hidden + channel, mask=channel < wide, other=0.0
        ).to(tl.float32)
    if EXTRA:
        total += tl.load(extra + row * hidden + channel, mask=held, other=0.0).to(tl.float32)
    tl.store(out + row * hidden + channel, convert(total, out.dtype.element_ty), mask=held)


@triton.jit
def _clear(parts, ids, experts, hidden, CHOICES: tl.constexpr, PADDED: tl.constexpr, WIDE: tl.constexpr):
    choice = tl.arange(0, PADDED)
    at = tl.program_id(0).to(tl.int64) * CHOICES + choice
    await_previous()
    expert = tl.load(ids + at, mask=choice < CHOICES, other=0)
    outside = (choice < CHOICES) & ((expert < 0) | (expert >= experts))
    channel = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    zeros = tl.zeros((PADDED, WIDE), parts.dtype.element_ty)
    held = outside[:, None] & (channel < hidden)[None, :]
    tl.store(parts + at[:, None] * hidden + channel[None, :], zeros, mask=held)


@triton.jit(do_not_specialize=["rows"])
def _join(
    parts, extra, out, rows, hidden, PARTS: tl.constexpr, CHOICES: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    held = channel < hidden
    total = tl.zeros((WIDE,), tl.float32)
    await_previous()
    for choice in tl.static_range(CHOICES):
        for part in tl.static_range(PARTS):
            at = ((part * rows + row) * CHOICES + choice) * hidden
            total += tl.load(parts + at + channel, mask=held, other=0.0).to(tl.float32)
    total += tl.load(extra + row * hidden + channel, mask=held, other=0.0).to(tl.float32)
    tl.store(out + row * hidden + channel, convert(total, out.dtype.element_ty), mask=held)


def join(parts: Tensor, extra: Tensor) -> Tensor:
    """The sum over choices in their order and over parts, in float32, plus `extra`; extra's type, [T, H].

    parts  [P, R >= T, k, H], contiguous; of a choice's rows all but one are zero
    extra  [T, H], contiguous
    raises ShapeMismatch
    """
    count, rows, choices, hidden = parts.shape
    if not parts.is_contiguous() or not extra.is_contiguous() or extra.shape[1] != hidden:
        raise ShapeMismatch(f"parts {tuple(parts.shape)}, extra {tuple(extra.shape)}")
    out = torch.empty_like(extra)
    if len(extra):
        wide = min(1024, triton.next_power_of_2(hidden))
        grid = (len(extra), triton.cdiv(hidden, wide))
        _join[grid](parts, extra, out, rows, hidden, count, choices, wide, **ahead(len(extra)))
    return out


def clear_outside(parts: Tensor, ids: Tensor, experts: int) -> None:
    """Zeros where rows of ids outside 0..experts - 1 go; other rows stay as they are.

    parts  bfloat16 [T k, H], contiguous
    ids    [T, k], contiguous
    """
    (rows, choices), hidden = ids.shape, parts.shape[1]
    if rows:
        wide = min(1024, triton.next_power_of_2(hidden))
        grid = (rows, triton.cdiv(hidden, wide))
        _clear[grid](
            parts, ids, experts, hidden, choices, triton.next_power_of_2(choices), wide, **ahead(rows)
        )


def combine(
    parts: Tensor, ids: Tensor, experts: int, extra: Tensor | None = None, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """The sum over choices in their order, in float32, plus `extra`; [T, H] of `dtype`.

    parts  bfloat16 [T k, H]; rows of ids outside 0..experts - 1 aren't read
    extra  [T, H], the shared expert's rows, or none
    """
    (rows, choices), hidden = ids.shape, parts.shape[1]
    out = torch.empty(rows, hidden, dtype=dtype, device=parts.device)
    if rows:
        wide = min(1024, triton.next_power_of_2(hidden))
        grid = (rows, triton.cdiv(hidden, wide))
        _combine[grid](
            parts, ids, extra, out, experts, hidden, choices, wide, extra is not None, **ahead(rows)
        )
    return out
