"""What is verified in a step: groups of rows on the host, and their way into a grid of one line a group."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.errors import ShapeMismatch
from engine.model.group_stats import GroupStats

Int = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class VerifyRows:
    """One call's groups; group g judges its first verify_lens[g] - 1 drafted tokens.

    slots         the slot of each group [B]
    positions     position of the first token that each group will emit: what plain decoding would sample at
    verify_lens   int64 [B], rows of each group, anchor included, 0 .. gamma + 1; 0 emits nothing
    draft_ids     int64 [B, gamma]
    draft_logits  float32 [B, gamma, V], what each drafted token was drawn from at its request's temperature;
                  None: a draft is the one token that could come (greedy drafts)
    draft_stats   of those logits, where the drafting left them
    """

    slots: tuple[int, ...]
    positions: tuple[int, ...]
    verify_lens: Int
    draft_ids: Tensor
    draft_logits: Tensor | None
    draft_stats: GroupStats | None = None

    def only(self, index: int) -> VerifyRows:
        """The call that has this one group; its logits are the group's own rows."""
        one = slice(index, index + 1)
        logits = None if self.draft_logits is None else self.draft_logits[one].contiguous()
        return VerifyRows(
            self.slots[one], self.positions[one], self.verify_lens[one], self.draft_ids[one], logits
        )


def widths_of(rows: VerifyRows, logits: Tensor) -> Int:
    """Rows of each group, int64 [B].

    logits  [M, V]
    raises  ShapeMismatch where the columns disagree
    """
    widths = np.asarray(rows.verify_lens, np.int64)
    groups, gamma = rows.draft_ids.shape
    sizes = (len(rows.slots), len(rows.positions), widths.size)
    if set(sizes) != {groups}:
        raise ShapeMismatch(f"slots, positions, verify_lens hold {sizes} entries, {groups} are drafted")
    low, high = widths.min(initial=0), widths.max(initial=0)
    if low < 0 or high > gamma + 1:
        raise ShapeMismatch(f"verify_lens {low} .. {high} with {gamma} drafted tokens a group")
    if int(widths.sum()) != len(logits):
        raise ShapeMismatch(f"{int(widths.sum())} rows to verify, {len(logits)} rows of logits")
    wanted = (groups, gamma, logits.shape[1])
    if rows.draft_logits is not None and tuple(rows.draft_logits.shape) != wanted:
        raise ShapeMismatch(f"draft logits are {tuple(rows.draft_logits.shape)}, not {wanted}")
    return widths


class Layout:
    """Where each row and each draft of a call stands.

    firsts  int64 [B], first row of each group
    widths  int64 [B], its rows; device_widths the same on the device
    groups  int64 [M], the group of each row;  ahead  int64 [M], drafted tokens before it
    """

    def __init__(self, rows: VerifyRows, logits: Tensor) -> None:
        """Raises ShapeMismatch where the columns disagree."""
        self.widths = widths_of(rows, logits)
        groups, gamma = rows.draft_ids.shape
        self.gamma, self.device = gamma, logits.device
        self.firsts = np.cumsum(self.widths) - self.widths
        self.groups = np.repeat(np.arange(groups), self.widths)
        self.ahead = np.arange(len(self.groups)) - self.firsts[self.groups]
        self.device_widths = torch.from_numpy(self.widths).to(self.device)
        self._full = bool((self.widths == gamma + 1).all())

    def judging(self, groups: Int) -> Int:
        """Rows of some groups that judge a draft: all but the last of each."""
        chosen = np.zeros(len(self.widths), bool)
        chosen[groups] = True
        return np.flatnonzero((self.ahead < self.widths[self.groups] - 1) & chosen[self.groups])

    def grid(self, values: Tensor, fill: float) -> Tensor:
        """Values [M] of rows as [B, gamma + 1]; `fill` where a group has no such row."""
        shape = (len(self.widths), self.gamma + 1)
        if self._full:
            return values.view(shape)
        cells = torch.from_numpy(self.groups * (self.gamma + 1) + self.ahead).to(self.device)
        out = torch.full(shape, fill, dtype=values.dtype, device=self.device)
        out.view(-1).index_copy_(0, cells, values)
        return out
