"""How many drafted rows a step verifies: expected tokens against what the step costs.

A step of R requests that runs M rows takes bias + requests(R) + rows(M) seconds, and drafting(R) more
where it drafts (the draft's forward, its injections, the acceptance). The curves are piecewise linear
between measured points. Which rows of which draft fill the budget is decided on the device, by scores that
are not known here; the budget depends on survival of earlier steps alone, so it tells nothing about this
step's drafts (I13).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Scores = NDArray[np.float32]
Caps = NDArray[np.int64]

PROBE_SHARE = 0.01
"""Share of plain decoding's time that probes may cost where drafting doesn't pay."""

PROBE_BUDGET = 1
"""Drafted rows of a probe: a step with none doesn't draft."""


class Curve:
    """Piecewise linear: the first value below the first point, rising on above the last one.

    Above, its slope is that of the last piece, or of the whole curve where that is steeper: a last piece that
    noise made flat doesn't make all further rows free.

    at      where it was measured, ascending, at least one
    values  seconds there
    """

    __slots__ = ("_at", "_slope", "_values")

    def __init__(self, at: Sequence[float], values: Sequence[float]) -> None:
        self._at = np.asarray(at, np.float64)
        self._values = np.asarray(values, np.float64)
        if not self._at.size or self._at.shape != self._values.shape or (np.diff(self._at) <= 0).any():
            raise ValueError(f"a curve needs as many values as ascending points, not {at} and {values}")
        self._slope = 0.0
        if self._at.size > 1:
            run, rise = self._at[-1] - self._at, self._values[-1] - self._values
            self._slope = max(0.0, rise[-2] / run[-2], rise[0] / run[0])

    @property
    def points(self) -> tuple[tuple[float, float], ...]:
        """(where, seconds), ascending."""
        return tuple(zip(self._at.tolist(), self._values.tolist(), strict=True))

    def __call__(self, x: ArrayLike) -> Floats:
        """Seconds at each x."""
        where = np.asarray(x, np.float64)
        above = self._slope * np.maximum(where - self._at[-1], 0.0)
        seconds: Floats = np.interp(where, self._at, self._values) + above
        return seconds


@dataclass(frozen=True, slots=True)
class CostTable:
    """What steps of one rank cost, in seconds."""

    bias: float
    requests: Curve
    rows: Curve
    drafting: Curve

    def seconds(self, requests: int, rows: ArrayLike, drafted: bool) -> Floats:
        """A step of so many decoding requests that runs `rows` rows in all, prompt rows included."""
        fixed = self.bias + float(self.requests(requests))
        if drafted:
            fixed += float(self.drafting(requests))
        return fixed + self.rows(rows)

    def plain(self, requests: int, prompt_tokens: int = 0) -> float:
        """A step that doesn't draft: one row a request, and these prompt tokens."""
        return float(self.seconds(requests, requests + prompt_tokens, False))


class BudgetPlan(NamedTuple):
    """A budget, and what is expected of it.

    budget           drafted rows to verify; 0: plain decoding, nothing is drafted
    expected_tokens  that the step's decoding requests emit
    expected_s       of the step
    plain_s          of the same step without drafts
    """

    budget: int
    expected_tokens: float
    expected_s: float
    plain_s: float


def choose_budget(
    survival: Scores, caps: Caps, table: CostTable, prompt_tokens: int = 0, margin: float = 1.0
) -> BudgetPlan:
    """The budget with the most expected tokens a second, of all there are: cost curves are jagged.

    Of equal ones the smallest. Scores are taken as `verify_lens` takes them.

    survival       float32 [R, gamma], estimated chance of each draft to be accepted, from earlier steps
    caps           int64 [R], most rows of each request, its anchor included; one with 0 has no row
    prompt_tokens  rows of prompts in the same step
    margin         how much more than plain decoding drafts must promise
    """
    gamma = survival.shape[1]
    requests = int(np.count_nonzero(caps > 0))
    scores = np.minimum.accumulate(np.fmax(survival, 0.0), axis=1)
    gains = -np.sort(-scores[np.arange(gamma) < (caps - 1)[:, None]])
    tokens = np.empty(gains.size + 1)
    tokens[0] = requests
    np.cumsum(gains, out=tokens[1:], dtype=np.float64)
    tokens[1:] += requests
    least = requests + prompt_tokens
    seconds = table.seconds(requests, np.arange(least, least + tokens.size), True)
    seconds[0] = plain = table.plain(requests, prompt_tokens)
    # Prompts take their time whatever is drafted beside them: counted in, they would make drafts look cheap.
    sunk = plain - table.plain(requests)
    rates = tokens / (seconds - sunk)
    rates[0] *= margin
    budget = int(np.argmax(rates)) if requests else 0
    return BudgetPlan(budget, float(tokens[budget]), float(seconds[budget]), plain)


def probe_period(table: CostTable, requests: int) -> int:
    """Steps from one probe to the next, so that probes cost at most PROBE_SHARE of plain decoding's time.

    A probe is a step with PROBE_BUDGET where `choose_budget` says 0: it shows whether drafts survive again.
    """
    plain = table.plain(requests)
    extra = float(table.seconds(requests, requests + PROBE_BUDGET, True)) - plain
    return max(1, math.ceil(extra / (PROBE_SHARE * plain)))
