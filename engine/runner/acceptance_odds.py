"""Accept tests and residual draws of groups that sample, in parts of rows that bound the workspace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.runner.acceptance_layout import Layout, VerifyRows
from engine.runner.filters import cut, draw
from engine.runner.parameters import KEY, MIN_P, TEMPERATURE, TOP_K, TOP_P, Features, SlotParameters
from engine.runner.randomness import Purpose, uniforms
from engine.runner.tempering import Int, Tempering

# A smaller mass of p above q is rounding.
_LEAST_RESIDUAL = 1e-8


@dataclass(frozen=True, slots=True)
class Judged:
    """One call as the tests see it.

    edited    float32 [M, V], the target's logits after all edits
    features  of each group
    """

    edited: Tensor
    rows: VerifyRows
    layout: Layout
    features: Sequence[Features]

    def sampled(self) -> Int:
        """Groups that have rows, and whose drafts are accepted by odds: neither greedy nor repeating."""
        by_odds = np.array([f.by_odds for f in self.features], bool)
        return np.flatnonzero(by_odds & (self.layout.widths > 0))

    def repeating(self) -> Int:
        """Rows of groups whose tokens are those of plain decoding, whatever was drafted."""
        repeats = np.array([f.repeats for f in self.features], bool)
        return np.flatnonzero(repeats[self.layout.groups])

    def split(self, groups: Int) -> list[tuple[bool, Int]]:
        """The groups without, and those with top-k, top-p or min-p."""
        filtered = np.array([self.features[g].filtered for g in groups], bool)
        return [(False, groups[~filtered]), (True, groups[filtered])]


@dataclass(frozen=True, slots=True)
class Trials:
    """Outcomes by draft, bool [B, gamma]; False where nothing was tested.

    passed    the draft is accepted if those before it are
    possible  q can have made the draft; of one that it can't, p alone decides what comes instead
    """

    passed: Tensor
    possible: Tensor


class Odds:
    """Computes p and q of rows; owns the buffers for one part of each."""

    def __init__(self, parameters: SlotParameters) -> None:
        self.parameters = parameters
        self._tempering = Tempering(parameters.vocab_size, parameters.floats.device, buffers=2)

    def test(self, judged: Judged, groups: Int) -> Trials:
        """The accept test of every draft of these groups: u q(d) < p(d)."""
        layout = judged.layout
        shape = judged.rows.draft_ids.shape
        trials = Trials(*(torch.zeros(shape, dtype=torch.bool, device=layout.device) for _ in range(2)))
        for filtered, some in judged.split(groups):
            for part in self._tempering.parts(layout.judging(some).tolist()):
                self._test_part(judged, np.array(part), filtered, trials)
        return trials

    def _test_part(self, judged: Judged, part: Int, filtered: bool, trials: Trials) -> None:
        """Test the drafts that the rows `part` judge, and note the outcomes."""
        layout, rows = judged.layout, judged.rows
        group, ahead = layout.groups[part], layout.ahead[part]
        slots = self._slots(rows, group)
        drafts = self._tempering.index(group * layout.gamma + ahead)
        ids = rows.draft_ids.reshape(-1)[drafts]
        known = (ids >= 0) & (ids < self.parameters.vocab_size)
        cells = torch.where(known, ids, 0)[:, None]
        weights, totals = self._target(judged, part, group, slots, filtered)
        p = weights.gather(1, cells)[:, 0] / totals
        q = torch.ones_like(p)
        if rows.draft_logits is not None:
            weights, totals = self._proposed(rows.draft_logits, group * layout.gamma + ahead, slots)
            q = weights.gather(1, cells)[:, 0] / totals
        possible = known & (q > 0)
        u = self._uniforms(rows, group, ahead, slots, Purpose.ACCEPT)
        trials.possible.view(-1)[drafts] = possible
        trials.passed.view(-1)[drafts] = possible & (u * q < p)

    def replace(self, judged: Judged, groups: Int, accepted: Int, trials: Trials) -> tuple[list[int], Tensor]:
        """Groups in another order, and the token of each that comes instead of its first rejected draft.

        groups    at least one
        accepted  int64 [B], drafts accepted of every group of the call
        """
        order: list[int] = []
        tokens: list[Tensor] = []
        for filtered, some in judged.split(groups):
            for part in self._tempering.parts(some.tolist()):
                order += part
                tokens.append(self._replace_part(judged, np.array(part), accepted[part], filtered, trials))
        return order, torch.cat(tokens)

    def _replace_part(
        self, judged: Judged, groups: Int, accepted: Int, filtered: bool, trials: Trials
    ) -> Tensor:
        """Draws from max(p - q, 0), or from p where that has no mass or q can't have made the draft."""
        layout, rows = judged.layout, judged.rows
        slots, drafts = self._slots(rows, groups), groups * layout.gamma + accepted
        index = self._tempering.index(drafts)
        possible = trials.possible.view(-1)[index]
        weights, totals = self._target(judged, layout.firsts[groups] + accepted, groups, slots, filtered)
        if rows.draft_logits is None:
            ids = rows.draft_ids.reshape(-1)[index].clamp(0, self.parameters.vocab_size - 1)[:, None]
            drafted = weights.gather(1, ids)
            has_mass = totals - drafted[:, 0] > _LEAST_RESIDUAL * totals
            weights.scatter_(1, ids, torch.where((possible & has_mass)[:, None], 0.0, drafted))
        else:
            proposed, proposed_totals = self._proposed(rows.draft_logits, drafts, slots)
            weights = _residual(weights, totals, proposed, proposed_totals, possible)
        return draw(weights, self._uniforms(rows, groups, accepted, slots, Purpose.RESIDUAL))

    def _target(
        self, judged: Judged, part: Int, groups: Int, slots: Tensor, filtered: bool
    ) -> tuple[Tensor, Tensor]:
        """p of rows, not normalised: weights [n, V] and their sums, float64 [n]."""
        floats = self.parameters.floats[slots]
        _, weights = self._tempering.weights(judged.edited, part.tolist(), floats[:, TEMPERATURE])
        if not filtered:
            return weights, weights.sum(-1, dtype=torch.float64)
        largest_k = max(judged.features[g].top_k for g in groups)
        top_k = self.parameters.ints[slots, TOP_K]
        return weights, cut(weights, top_k, floats[:, TOP_P], floats[:, MIN_P], largest_k)

    def _proposed(self, logits: Tensor, drafts: Int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """q of drafts, as `_target` gives p; drafts int64 [n] count over [B, gamma]."""
        temperatures = self.parameters.floats[slots, TEMPERATURE]
        flat = logits.reshape(-1, logits.shape[-1])
        _, weights = self._tempering.weights(flat, drafts.tolist(), temperatures, buffer=1)
        return weights, weights.sum(-1, dtype=torch.float64)

    def _slots(self, rows: VerifyRows, groups: Int) -> Tensor:
        return self._tempering.index([rows.slots[g] for g in groups])

    def _uniforms(self, rows: VerifyRows, groups: Int, ahead: Int, slots: Tensor, purpose: Purpose) -> Tensor:
        positions = np.array([rows.positions[g] for g in groups], np.int64) + ahead
        return uniforms(self.parameters.ints[slots, KEY], self._tempering.index(positions), purpose)


def _residual(p: Tensor, p_totals: Tensor, q: Tensor, q_totals: Tensor, possible: Tensor) -> Tensor:
    """max(p - q, 0) [n, V] with p and q normalised; p where that has no mass, or q is unfit. Changes both."""
    p.div_(p_totals[:, None])
    q.div_(q_totals[:, None])
    torch.sub(p, q, out=q).clamp_min_(0.0)
    fits = possible & (q.sum(-1, dtype=torch.float64) > _LEAST_RESIDUAL)
    if q.is_cuda or not bool(fits.all()):
        return torch.where(fits[:, None], q, p)
    return q
