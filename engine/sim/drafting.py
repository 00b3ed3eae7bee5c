"""What the simulated device does with drafts: tokens that are right or wrong as the order seed draws, rows to
verify, and the acceptance of what fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.actors.capacity import CostTable, Curve
from engine.actors.speculation import CAP_ACCEPT
from engine.messages import RunStep
from engine.sim.chain import FAILS, FIRST_TOKEN, TOKENS

Draw = Callable[[], float]


class Layout(NamedTuple):
    """Rows that each group verifies, how many of them may be committed; survival of drafts or None."""

    rows: list[int]
    limits: list[int]
    survival: NDArray[np.float32] | None


class Drafter:
    """Drafts of one device.

    block  drafted tokens of a round
    mode   verify mode
    right  chance of a draft to be the token that follows
    draw   a number of 0..1, by the order seed
    """

    def __init__(self, block: int, mode: str, right: float, draw: Draw) -> None:
        self.block = block
        self._right = right
        self._mode = mode
        self._draw = draw

    def layout(self, job: RunStep, caps: Sequence[int]) -> Layout:
        """How the step's budget is spent.

        caps  most rows of each group; 0: it has none
        """
        anchors = [min(cap, 1) for cap in caps]
        if job.budget == 0:
            return Layout(anchors, anchors, None)
        factors = [[self._right * (0.5 + self._draw()) for _ in range(self.block)] for _ in caps]
        survival = np.cumprod(np.minimum(factors, 1.0), 1).astype(np.float32)
        rows = list(caps)
        if job.budget > 0:
            rows = self._scheduled(survival, caps, job.budget)
        return Layout(list(caps) if self._mode == CAP_ACCEPT else rows, rows, survival)

    def _scheduled(self, survival: NDArray[np.float32], caps: Sequence[int], budget: int) -> list[int]:
        """Anchors, and the best drafts: by survival, then position, then group."""
        rows = [min(cap, 1) for cap in caps]
        candidates = [
            (-float(survival[group, place]), place, group)
            for group, cap in enumerate(caps)
            for place in range(cap - 1)
        ]
        for _, _, group in sorted(candidates)[:budget]:
            rows[group] += 1
        return rows

    def run(self, follows: Callable[[int], int], anchor: int, rows: int, limit: int) -> list[int]:
        """Tokens of one round: the accepted drafts and the one behind them, `limit` at most.

        FAILS alone where the first one's sampling fails; a later failure ends the round before it.
        follows  computes the next position from its token; returns the token that follows it
        """
        tokens: list[int] = []
        fed, accepted = anchor, True
        for _ in range(rows):
            token = follows(fed)
            if token == FAILS and not tokens:
                return [FAILS]
            accepted = accepted and token != FAILS and len(tokens) < limit
            if accepted:
                tokens.append(token)
            fed = token if token != FAILS and self._draw() < self._right else self._other(token)
            accepted = accepted and fed == token
        return tokens

    def _other(self, token: int) -> int:
        """A draft that is wrong."""
        other = FIRST_TOKEN + int(self._draw() * TOKENS)
        return other if other != token else FIRST_TOKEN + (other + 1 - FIRST_TOKEN) % TOKENS


def costs(draft_ms: float) -> CostTable:
    """Costs of a simulated rank, whose drafts cost so much."""
    return CostTable(
        bias=0.01,
        requests=Curve([1], [0.0]),
        rows=Curve([1, 64], [0.0, 0.063]),
        drafting=Curve([1], [draft_ms / 1000]),
    )
