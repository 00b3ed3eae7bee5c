"""Confidences of drafts, corrected by what became of the drafts before.

The confidence head is calibrated on text like that which it was trained on. On other text, or where drafts
keep to a grammar, it is too sure or not sure enough, and a scheduler that believes it verifies too much or
too little. So the ratio of accepted to expected drafts is kept, of free and of guided ones, and the chance of
each later draft is multiplied by it. A cut stays lossless: a ratio is of rounds that are over.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.runner.columns import Int

WINDOW = 512.0
"""Trials that are remembered: each one fades with those that follow."""

PRIOR = 64.0
"""Trials as expected that every count begins with."""

LEAST, MOST = 0.25, 1.5

Chances = NDArray[np.float32]


class Correction:
    """Of a rank. Rows of its sums: free drafts, guided ones; columns: accepted, expected."""

    def __init__(self) -> None:
        self._sums = np.full((2, 2), PRIOR)
        self._given: Chances = np.zeros((0, 0), np.float32)
        self._counted = np.zeros((0, 0), np.bool_)
        self._kinds: Int = np.zeros(0, np.int64)

    @property
    def factors(self) -> tuple[float, float]:
        """What chances of free and of guided drafts are multiplied by."""
        free, guided = np.clip(self._sums[:, 0] / self._sums[:, 1], LEAST, MOST).tolist()
        return free, guided

    def survival(self, survival: Chances, certain: NDArray[np.bool_] | None, guided: Int) -> Tensor:
        """The chances [n, gamma] that drafts and all before them are accepted, corrected; float32.

        survival  what the drafter says of them; NaN counts as 0
        certain   [n, gamma], drafts that are accepted if those before them are; None: none
        guided    int64 places of groups whose drafts keep to a grammar
        """
        before = np.concatenate([np.ones_like(survival[:, :1]), survival[:, :-1]], axis=1)
        given = np.divide(survival, before, out=np.zeros_like(survival), where=before > 0)
        self._given = np.nan_to_num(given, nan=0.0)
        self._kinds = np.zeros(len(survival), np.int64)
        self._kinds[guided] = 1
        factors = np.array(self.factors, np.float32)[self._kinds]
        given = np.minimum(self._given * factors[:, None], 1.0)
        self._counted = self._given > 0
        if certain is not None:
            given[certain] = 1.0
            self._counted &= ~certain
        return torch.from_numpy(given.cumprod(1, dtype=np.float32))

    def note(self, verified: Int, accepted: Int) -> None:
        """What became of the last drafts.

        verified  int64 [n], drafts that were judged; where a grammar ended among them, those before its end
        accepted  int64 [n]; -1 where the group failed
        """
        places = np.arange(self._given.shape[1])
        tried = self._counted & (places < np.minimum(accepted + 1, verified)[:, None])
        passed = tried & (places < accepted[:, None])
        for kind, sums in enumerate(self._sums):
            own = self._kinds == kind
            count = int(tried[own].sum())
            sums *= max(0.0, 1.0 - count / WINDOW)
            sums += passed[own].sum(), self._given[own][tried[own]].sum()
            sums += PRIOR * max(0.0, 1.0 - sums[1] / PRIOR)
