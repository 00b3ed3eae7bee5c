"""Grammar masks of a step's logits: asked for before the target runs, applied before tokens are chosen."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.runner.columns import Int
from engine.runner.edits import GrammarMask


class MaskSource(Protocol):
    """Masks of the rows that tokens are chosen from; made while the target runs.

    Their groups are those that are verified, then those that are sampled; what is masked is one row for each
    verified token, and one for each sampled group, in this order.
    """

    def begin(self, epoch: int, slots: Int, tokens: Tensor, verify_lens: Int) -> None:
        """The groups are known.

        slots        int64 [n]
        tokens       int64 [n, gamma + 1] on the device, anchor and drafts; zeros for sampled groups
        verify_lens  int64 [n], how many of them are verified; 1 for sampled groups
        """

    def finish(self, epoch: int) -> GrammarMask | None:
        """What masks the rows' logits in place; None where no request of the step has a grammar."""


def begin_masks(masks: MaskSource, epoch: int, judged: Int, lens: Int, drafted: Tensor, sampled: Int) -> None:
    """Tells a mask source of a step's groups.

    judged, sampled  int64 slots of groups that verify drafts, and of those that are sampled
    lens             int64, rows of each judged group
    drafted          int64 [judged, gamma + 1] on the device
    """
    slots, lens = np.append(judged, sampled), np.append(lens, np.ones_like(sampled))
    none = torch.zeros(sampled.size, drafted.shape[1], dtype=torch.int64, device=drafted.device)
    masks.begin(epoch, slots, torch.cat([drafted, none]), lens)


def masked(masks: MaskSource | None, epoch: int, logits: Tensor, rows: int) -> Tensor:
    """Logits [R, V] that tokens are chosen from: the target's own where the step has no grammar.

    rows  how many of them, from the first, choose a token
    """
    mask = None if masks is None else masks.finish(epoch)
    if mask is None:
        return logits
    chosen = logits[:rows].clone()
    mask(chosen)
    return chosen
