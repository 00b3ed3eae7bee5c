"""How drafts are picked by kernels: a block at once with its Markov biases, or position by position."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.triton.logits import group_stats
from engine.kernels.triton.markov import Choosers, choose, draft_block
from engine.model.group_stats import GroupStats


class DeviceChooser:
    """A BlockChoose of some slots; which numbers draws take is as in `Acceptance.choose`."""

    def __init__(self, choosers: Choosers) -> None:
        self._choosers = choosers

    def __call__(self, k: int, z: Tensor) -> Tensor:
        """As Choose; for logits that something else than the Markov head has changed, as a grammar's mask."""
        rows, z = self._choosers, z.contiguous()
        tokens = torch.empty_like(rows.slots)
        choose(z, group_stats(z, rows.slots, rows.floats), rows, k, tokens)
        return tokens

    def block(self, logits: Tensor, anchors: Tensor, w1: Tensor, w2: Tensor) -> tuple[Tensor, GroupStats]:
        """As BlockChoose.block."""
        drafts = draft_block(logits, anchors, w1, w2, self._choosers)
        return drafts.ids, drafts.stats
