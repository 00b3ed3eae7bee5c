"""How many rows of each row group a step verifies: a prefix of each draft, chosen over all groups at once.

A draft's position is a candidate where its group may still verify it. The `budget` best candidates are
taken by survival; of equal ones the earlier position first, then the earlier group. Scores never rise
along a draft, so what is taken of a draft is a prefix, and whether a position is taken depends on no later
token: its own score is a function of the tokens before it, and later positions rank behind it. That keeps
a cut lossless.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.errors import ShapeMismatch

Int64 = npt.NDArray[np.int64]


def verify_lens(survival: Tensor, caps: Int64, budget: int) -> Int64:
    """Rows that each group verifies, its anchor included; int64 [B].

    survival  float32 [B, gamma] on the CPU, estimated chance of each draft to be accepted; NaN and negative
              scores count as 0, and a score above the one before it counts as that one
    caps      int64 [B], most rows of each group, 0..gamma+1; a group with 0 gets none, any other at least 1
    budget    drafted rows over all groups; -1: as many as `caps` allows
    raises    ShapeMismatch where the groups of `survival` and `caps` differ
    """
    groups, gamma = survival.shape
    if caps.shape != (groups,):
        raise ShapeMismatch(f"survival of {groups} groups against caps of shape {caps.shape}")
    drafted = np.clip(caps - 1, 0, gamma)
    anchors = np.minimum(caps, 1)
    if budget < 0 or budget >= int(drafted.sum()):
        return anchors + drafted
    if budget == 0:
        return anchors
    scores = np.minimum.accumulate(np.fmax(survival.numpy(), 0.0), axis=1)
    open_ = np.arange(gamma)[:, None] < drafted
    # Positions outside, groups inside: a stable sort then breaks ties by position, then by group.
    order = np.where(open_, -scores.T, 1.0).ravel().argsort(kind="stable")
    return anchors + np.bincount(order[:budget] % groups, minlength=groups)


def verify_lens_on_device(survival: Tensor, caps: Tensor, budget: Tensor) -> Tensor:
    """As `verify_lens`, on the device of its arguments, with static shapes and no read by the host.

    survival  float32 [B, gamma]
    caps      int64 [B]
    budget    int64 scalar
    """
    groups, gamma = survival.shape
    device = survival.device
    drafted = (caps - 1).clamp(0, gamma)
    anchors = caps.clamp(max=1)
    scores = torch.fmax(survival, survival.new_zeros(())).cummin(dim=1).values
    open_ = torch.arange(gamma, device=device)[:, None] < drafted
    order = torch.where(open_, -scores.T, 1.0).flatten().argsort(stable=True)
    taken = torch.arange(groups * gamma, device=device) < torch.minimum(budget, drafted.sum())
    chosen = torch.zeros_like(taken).scatter(0, order, taken).view(gamma, groups).sum(dim=0)
    return torch.where(budget < 0, anchors + drafted, anchors + chosen)
