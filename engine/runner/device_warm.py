"""Compiles what choosing tokens may want before the first request: a compiler takes seconds of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.kernels.triton.logits import FEW_ROWS
from engine.runner.acceptance import Accepted
from engine.runner.acceptance_layout import VerifyRows
from engine.runner.edits import MaskWords
from engine.runner.sampling import Chosen, Rows

FEW_AND_MANY = (1, FEW_ROWS + 1)
"""Rows: kernels are compiled for either."""

Sample = Callable[[Tensor, Rows, MaskWords | None], Chosen]
Accept = Callable[[Tensor, VerifyRows, MaskWords | None], Accepted]


def warm_sampling(sample: Sample, slot: int, columns: int, device: torch.device) -> None:
    """Few and many rows of one slot, with masks and without; columns: of logits."""
    for count in FEW_AND_MANY:
        rows = Rows((slot,) * count, (0,) * count)
        for mask in _masks(count, columns, device):
            sample(torch.zeros(count, columns, device=device), rows, mask)


def warm_verification(accept: Accept, slot: int, block: int, columns: int, device: torch.device) -> None:
    """Likewise for drafts of `block` tokens, drawn from logits or the one token that could come."""
    for count in FEW_AND_MANY:
        slots, positions, lens = (slot,) * count, (0,) * count, np.full(count, block + 1)
        ids = torch.zeros(count, block, dtype=torch.int64, device=device)
        rows = count * (block + 1)
        for mask in _masks(rows, columns, device):
            for q in (torch.zeros(count, block, columns, device=device), None):
                logits = torch.zeros(rows, columns, device=device)
                accept(logits, VerifyRows(slots, positions, lens, ids, q), mask)


def _masks(rows: int, columns: int, device: torch.device) -> Sequence[MaskWords | None]:
    """None, and one that allows everything."""
    words = torch.full((rows, -(-columns // 32)), -1, dtype=torch.int32, device=device)
    return None, MaskWords(words, np.arange(rows))
