"""Rotations of positions: unit complex numbers, and their inverses, in one kernel.

Source: rotary embedding as `engine.model.rope.turns` states it.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from engine.errors import ShapeMismatch
from engine.kernels.triton.formats import INTERPRETED
from engine.kernels.triton.launch import ahead, await_previous

ELEMENTS = 1024
"""Numbers of a program, in as many whole rows as fit."""


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["positions"])
def _turns(
    positions, table, out, back, rows, half, ROWS: tl.constexpr, WIDE: tl.constexpr, BACK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    pair = tl.arange(0, WIDE)
    step = tl.load(table + pair, mask=pair < half, other=0.0)
    await_previous()
    position = tl.load(positions + row, mask=row < rows, other=0).to(tl.float32)
    angle = position[:, None] * step[None, :]
    # The library's functions hold for any angle, a million tokens on.
    cosine = tl.cos(angle) if INTERPRETED else libdevice.cos(angle)
    sine = tl.sin(angle) if INTERPRETED else libdevice.sin(angle)
    at = (row[:, None] * half + pair[None, :]) * 2
    held = (row < rows)[:, None] & (pair < half)[None, :]
    tl.store(out + at, cosine, mask=held)
    tl.store(out + at + 1, sine, mask=held)
    if BACK:
        tl.store(back + at, cosine, mask=held)
        tl.store(back + at + 1, -sine, mask=held)


def turns(positions: Tensor, table: Tensor) -> Tensor:
    """Rotations at positions, complex64 [n, 1, r / 2].

    positions  [n] int64 or int32, contiguous
    table      float32 [r / 2]: the angle of one position
    raises     ShapeMismatch
    """
    return _run(positions, table, back=False)[0]


def turns_and_back(positions: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """As `turns`, and beside them those that undo them."""
    return _run(positions, table, back=True)


def _run(positions: Tensor, table: Tensor, *, back: bool) -> tuple[Tensor, Tensor]:
    ragged = positions.dim() != 1 or not positions.is_contiguous()
    if ragged or table.dim() != 1 or table.dtype != torch.float32:
        raise ShapeMismatch(f"positions {tuple(positions.shape)}, table {table.dtype} {tuple(table.shape)}")
    rows, half = len(positions), len(table)
    out = torch.empty(rows, 1, half, dtype=torch.complex64, device=positions.device)
    undone = torch.empty_like(out) if back else out
    wide = triton.next_power_of_2(half)
    block = max(1, ELEMENTS // wide)
    if rows:
        _turns[(triton.cdiv(rows, block),)](
            positions, table, torch.view_as_real(out), torch.view_as_real(undone), rows, half, block, wide,
            back, **ahead(rows),
        )  # fmt: skip
    return out, undone
