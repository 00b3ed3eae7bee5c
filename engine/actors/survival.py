"""What earlier drafts of each request's row promised, for the choice of the next step's budget.

Values are read LAG steps late, whether or not they have come sooner: the budget of a step is then the same
with and without a step in flight. A row that was given to another request doesn't tell of the one before
(its generation differs); it and rows without drafts yet are estimated by the mean of recent steps.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.integer[Any]]
Scores = NDArray[np.float32]

LAG = 2
"""A step is planned with survival of this many steps before it, or older."""

KEEP = 0.9
"""Weight of what was believed before in the running mean, against one step's drafts."""

NEVER = np.iinfo(np.int64).min


class SurvivalHistory:
    """The last LAG drafts of each row, and a running mean over all rows.

    rows   of the request table
    gamma  drafted tokens of a round
    """

    def __init__(self, rows: int, gamma: int) -> None:
        # Newest first. A row's epochs differ, so the oldest of LAG entries is at least LAG - 1 steps behind.
        self._epochs = np.full((LAG, rows), NEVER)
        self._generations = np.zeros((LAG, rows), np.int64)
        self._scores = np.ones((LAG, rows, gamma), np.float32)
        self._mean_epochs = np.full(LAG, NEVER)
        self._means = np.ones((LAG, gamma), np.float32)

    def note(self, epoch: int, rows: Ints, generations: Ints, survival: Scores) -> None:
        """Drafts of a finished step, each step once and in order; no row twice.

        survival  float32 [B, gamma]; B = 0: the step drafted nothing
        """
        if not rows.size:
            return
        for column in (self._epochs, self._generations, self._scores):
            column[1:, rows] = column[:-1, rows]
        self._epochs[0, rows], self._generations[0, rows] = epoch, generations
        self._scores[0, rows] = survival
        first = self._mean_epochs[0] == NEVER
        mean = np.fmax(survival, 0.0).mean(axis=0)
        self._mean_epochs[1:] = self._mean_epochs[:-1]
        self._means[1:] = self._means[:-1]
        self._mean_epochs[0] = epoch
        self._means[0] = mean if first else KEEP * self._means[1] + (1 - KEEP) * mean

    def prior(self, epoch: int) -> Scores:
        """Running mean for a step of this epoch, float32 [gamma]; 1 where nothing is known yet."""
        known = self._mean_epochs <= epoch - LAG
        if not known.any():
            return np.ones(self._means.shape[1], np.float32)
        mean: Scores = self._means[int(known.argmax())].copy()
        return mean

    def at(self, epoch: int, rows: Ints, generations: Ints) -> Scores:
        """What to plan a step of this epoch with, float32 [R, gamma]."""
        scores = np.tile(self.prior(epoch), (rows.size, 1))
        usable = (self._epochs[:, rows] <= epoch - LAG) & (self._generations[:, rows] == generations)
        usable &= self._epochs[:, rows] != NEVER
        for age in reversed(range(LAG)):
            at = usable[age]
            scores[at] = self._scores[age, rows[at]]
        return scores

    def snapshot(self) -> tuple[Any, ...]:
        """What changes, for the search."""
        return tuple((column.tobytes(), column.shape) for column in self._columns())

    def restore(self, taken: tuple[Any, ...]) -> None:
        """Back to a snapshot."""
        for column, (content, shape) in zip(self._columns(), taken, strict=True):
            column[...] = np.frombuffer(content, column.dtype).reshape(shape)

    def _columns(self) -> tuple[NDArray[Any], ...]:
        return self._epochs, self._generations, self._scores, self._mean_epochs, self._means
