"""Where the rows of a verification stand: groups of them one behind the other, told by lengths on the device.

Source: engine/runner/acceptance_layout.py, which lays them out on the host.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.errors import ShapeMismatch

FEW_GROUPS = 128
"""Up to so many groups there is one kind of each kernel."""


@dataclass(frozen=True)
class VerifiedRows:
    """Of M rows, int64 each; of rows that no group has, slot and group are -1 and the rest is 0.

    slots      [M]
    positions  [M], where the token that the row chooses will stand
    groups     [M]
    ahead      [M], drafted tokens before it
    """

    slots: Tensor
    positions: Tensor
    groups: Tensor
    ahead: Tensor


def lanes_of(groups: int) -> int:
    """Lanes that look at all groups: no more kinds of kernels than there must be."""
    return max(FEW_GROUPS, int(triton.next_power_of_2(groups)))


@triton.jit
def length_and_first(lens, slots, group, groups, GROUPS: tl.constexpr):
    """Rows of a group, int32 (none where its slot is padding), and the first of them."""
    other = tl.arange(0, GROUPS)
    real = tl.load(slots + other, mask=other < groups, other=-1) >= 0
    rows = tl.where(real, tl.load(lens + other, mask=other < groups, other=0), 0).to(tl.int32)
    own = tl.sum(tl.where(other == group, rows, 0), 0)
    return own, tl.sum(tl.where(other < group, rows, 0), 0)


@triton.jit(
    do_not_specialize=["groups", "rows"], do_not_specialize_on_alignment=["slots", "positions", "lens"]
)
def _spread(
    slots, positions, lens, row_slots, row_positions, row_groups, row_ahead, groups, rows,
    GROUPS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    lane = tl.arange(0, LANES)
    own, first = length_and_first(lens, slots, group, groups, GROUPS)
    if group < groups:
        slot, position = tl.load(slots + group), tl.load(positions + group)
        at = first + lane
        held = lane < tl.minimum(own, rows - first)
        tl.store(row_slots + at, slot + tl.zeros_like(lane), mask=held)
        tl.store(row_positions + at, position + lane, mask=held)
        tl.store(row_groups + at, group + tl.zeros_like(lane), mask=held)
        tl.store(row_ahead + at, lane, mask=held)
    else:
        # The last program marks the rows behind all groups.
        for start in range(first, rows, LANES):
            at = start + lane
            tl.store(row_slots + at, tl.full((LANES,), -1, tl.int64), mask=at < rows)
            tl.store(row_positions + at, tl.zeros((LANES,), tl.int64), mask=at < rows)
            tl.store(row_groups + at, tl.full((LANES,), -1, tl.int64), mask=at < rows)
            tl.store(row_ahead + at, tl.zeros((LANES,), tl.int64), mask=at < rows)


def spread(slots: Tensor, positions: Tensor, lens: Tensor, width: int, rows: int) -> VerifiedRows:
    """The rows of B groups; no read by the host.

    slots      int64 [B], negative for padding: the group has no rows, whatever its length
    positions  int64 [B], where the first token of each will stand
    lens       int64 [B], rows of each, 0 .. width; their sum is at most `rows`
    raises     ShapeMismatch
    """
    groups = slots.numel()
    if positions.shape != (groups,) or lens.shape != (groups,):
        raise ShapeMismatch(
            f"{groups} slots, {tuple(positions.shape)} positions, {tuple(lens.shape)} lengths"
        )
    out = VerifiedRows(*(torch.empty(rows, dtype=torch.int64, device=slots.device) for _ in range(4)))
    _spread[(groups + 1,)](
        slots, positions, lens, out.slots, out.positions, out.groups, out.ahead, groups, rows,
        lanes_of(groups), triton.next_power_of_2(max(width, 1)), num_warps=1,
    )  # fmt: skip
    return out
