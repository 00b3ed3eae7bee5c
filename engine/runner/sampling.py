"""Choosing the next token of each row, batched over rows, each with its own parameters.

Processors run in this order: logit bias, penalties, minimum length, grammar mask, temperature, top-k, top-p,
min-p. A step computes a processor only for rows that ask for it; a batch of greedy rows costs one argmax.
A row's token is a pure function of its own logits, parameters, counts and (seed, child, position).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.runner.filters import keep_thresholds
from engine.runner.parameters import (
    CHILD,
    MIN_P,
    REPETITION,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    Features,
    SlotParameters,
)
from engine.runner.penalties import TokenCounts
from engine.runner.randomness import Purpose, uniforms

GrammarMask = Callable[[Tensor], None]
"""Sets forbidden tokens of logits [R, V] to minus infinity, in place."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one sampling call: the slot of each, and the position that its new token will have."""

    slots: tuple[int, ...]
    positions: tuple[int, ...]

    def only(self, index: int) -> Rows:
        """The call that has this one row."""
        return Rows((self.slots[index],), (self.positions[index],))


@dataclass(frozen=True, slots=True)
class Chosen:
    """Result of one sampling call, on the device.

    tokens  int64 [R]; 0 where the row failed
    valid   bool [R]; False where the row's logits hold NaN or infinity, or nothing is allowed
    """

    tokens: Tensor
    valid: Tensor


class Sampler:
    """Samples rows of slots; owns nothing but references to the slots' parameters and counts."""

    def __init__(self, parameters: SlotParameters, counts: TokenCounts) -> None:
        self.parameters = parameters
        self.counts = counts

    def sample(self, logits: Tensor, rows: Rows, mask: GrammarMask | None = None) -> Chosen:
        """One token a row; the counts of penalised slots grow by it.

        logits  float32 [R, V]; not changed
        raises  BadRequest where a row's slot isn't bound
        """
        features = [self.parameters.of(slot) for slot in rows.slots]
        edited = self._edit(logits, rows, features, mask)
        best, tokens = edited.max(-1)
        valid = best.isfinite()
        tokens = torch.where(valid, tokens, 0)
        drawn = [i for i, f in enumerate(features) if not f.greedy and not f.filtered]
        filtered = [i for i, f in enumerate(features) if not f.greedy and f.filtered]
        for group, with_filters in ((drawn, False), (filtered, True)):
            if group:
                index = self._index(group)
                picked = self._draw(edited[index], best[index], _take(rows, group), with_filters)
                tokens[index] = torch.where(valid[index], picked, 0)
        counted = [i for i, f in enumerate(features) if f.penalised]
        if counted:
            index = self._index(counted)
            slots = self._index([rows.slots[i] for i in counted])
            self.counts.add(slots, tokens[index])
        return Chosen(tokens, valid)

    def _edit(
        self, logits: Tensor, rows: Rows, features: Sequence[Features], mask: GrammarMask | None
    ) -> Tensor:
        """Logits after bias, penalties, minimum length, grammar; the input itself where nothing asks."""
        edits = any(f.edits_logits(p) for f, p in zip(features, rows.positions, strict=True))
        if not edits and mask is None:
            return logits
        logits = logits.clone()
        for i, slot in enumerate(rows.slots):
            if features[i].biased:
                ids, values = self.parameters.bias[slot]
                logits[i].index_add_(0, ids, values)
        penalised = [i for i, f in enumerate(features) if f.penalised]
        if penalised:
            index = self._index(penalised)
            slots = self._index([rows.slots[i] for i in penalised])
            factors = self.parameters.floats[slots, REPETITION:]
            logits[index] = self.counts.penalise(logits[index], slots, factors)
        for i, (slot, position) in enumerate(zip(rows.slots, rows.positions, strict=True)):
            if position < features[i].stop_from:
                logits[i, self.parameters.stops[slot]] = float("-inf")
        if mask is not None:
            mask(logits)
        return logits

    def _draw(self, logits: Tensor, best: Tensor, rows: Rows, with_filters: bool) -> Tensor:
        """Draw from the tempered distribution by inverting its cumulative sum; int64 [n].

        logits  float32 [n, V];  best  float32 [n], the largest of each row
        """
        slots = self._index(rows.slots)
        floats, ints = self.parameters.floats[slots], self.parameters.ints[slots]
        # The largest logit is taken off first, so that a tiny temperature can't overflow.
        scaled = (logits - best[:, None]) / floats[:, TEMPERATURE, None]
        weights = scaled.exp()
        if with_filters:
            threshold = keep_thresholds(
                scaled, ints[:, TOP_K], floats[:, TOP_P], floats[:, MIN_P], self._largest_k(rows)
            )
            weights = torch.where(scaled >= threshold[:, None], weights, 0.0)
        cumulative = weights.cumsum(-1, dtype=torch.float64)
        u = uniforms(ints[:, SEED], ints[:, CHILD], self._index(rows.positions), Purpose.SAMPLE)
        point = u * cumulative[:, -1]
        # `right` skips tokens of weight 0; a row of NaN finds none, and is failed by the caller.
        found = torch.searchsorted(cumulative, point[:, None], right=True)[:, 0]
        return found.clamp_max(logits.shape[-1] - 1)

    def _largest_k(self, rows: Rows) -> int:
        """Largest top_k of the rows; 0 where a row limits its nucleus but not its count."""
        features = [self.parameters.of(slot) for slot in rows.slots]
        if any(f.nucleus and f.top_k == 0 for f in features):
            return 0
        return max(1, max(f.top_k for f in features))

    def _index(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.parameters.floats.device)


def _take(rows: Rows, group: Sequence[int]) -> Rows:
    return Rows(tuple(rows.slots[i] for i in group), tuple(rows.positions[i] for i in group))
