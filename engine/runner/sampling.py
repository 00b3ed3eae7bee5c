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

from engine.runner.filters import draw, draw_filtered
from engine.runner.parameters import (
    KEY,
    MIN_P,
    REPETITION,
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

# 8 rows of 129,280 values drawn one by one take 2.1 ms on a CPU, all at once 10.4 ms.
_PART_VALUES = 1 << 17

_Choice = Callable[[Tensor, "Rows"], tuple[Tensor, Tensor]]


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
        vocab_size, device = parameters.vocab_size, parameters.floats.device
        self._part_rows = max(1, _PART_VALUES // vocab_size)
        # On a CPU fresh pages would cost more than the arithmetic on them.
        self._scratch = None if device.type == "cuda" else torch.empty(self._part_rows, vocab_size)

    def sample(self, logits: Tensor, rows: Rows, mask: GrammarMask | None = None) -> Chosen:
        """One token a row; the counts of penalised slots grow by it.

        logits  float32 [R, V]; not changed
        raises  BadRequest where a row's slot isn't bound
        """
        features = [self.parameters.of(slot) for slot in rows.slots]
        edited = self._edit(logits, rows, features, mask)
        greedy = [i for i, f in enumerate(features) if f.greedy]
        plain = [i for i, f in enumerate(features) if not f.greedy and not f.filtered]
        filtered = [i for i, f in enumerate(features) if not f.greedy and f.filtered]
        parts: list[tuple[Sequence[int], _Choice]] = [(greedy, _greedy)] if greedy else []
        parts += [(part, self._draw) for part in self._parts(plain)]
        parts += [(part, self._draw_filtered) for part in self._parts(filtered)]
        chosen = _join([(part, self._choose(edited, rows, part, how)) for part, how in parts])
        counted = [i for i, f in enumerate(features) if f.penalised]
        if counted:
            self.counts.add([rows.slots[i] for i in counted], chosen.tokens[counted])
        return chosen

    def _parts(self, group: list[int]) -> list[list[int]]:
        """The group in parts whose working set stays in the processor's cache; whole on a GPU."""
        rows = self._part_rows if self._scratch is not None else max(1, len(group))
        return [group[first : first + rows] for first in range(0, len(group), rows)]

    def _choose(self, logits: Tensor, rows: Rows, group: Sequence[int], how: _Choice) -> Chosen:
        """What `how` chooses for one group of rows."""
        if len(group) < len(rows.slots):
            first, stop = group[0], group[-1] + 1
            # Neighbouring rows are a view; others have to be copied together.
            adjacent = stop - first == len(group)
            logits = logits[first:stop] if adjacent else logits.index_select(0, self._index(group))
            rows = _take(rows, group)
        best, tokens = how(logits, rows)
        valid = best.isfinite()
        return Chosen(torch.where(valid, tokens, 0), valid)

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
            index, slots = self._index(penalised), [rows.slots[i] for i in penalised]
            factors = self.parameters.floats[self._index(slots), REPETITION:]
            logits[index] = self.counts.penalise(logits[index], slots, factors)
        for i, (slot, position) in enumerate(zip(rows.slots, rows.positions, strict=True)):
            if position < features[i].stop_from:
                logits[i, self.parameters.stops[slot]] = float("-inf")
        if mask is not None:
            mask(logits)
        return logits

    def _draw(self, logits: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """Largest logit of each row, and a token drawn from its tempered distribution."""
        best, weights, slots = self._tempered(logits, rows)
        return best, draw(weights, self._uniforms(slots, rows))

    def _draw_filtered(self, logits: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """As `_draw`, after top-k, top-p and min-p."""
        best, weights, slots = self._tempered(logits, rows)
        floats = self.parameters.floats[slots]
        top_k = self.parameters.ints[slots, TOP_K]
        largest_k = max(self.parameters.of(slot).top_k for slot in rows.slots)
        u = self._uniforms(slots, rows)
        return best, draw_filtered(weights, u, top_k, floats[:, TOP_P], floats[:, MIN_P], largest_k)

    def _tempered(self, logits: Tensor, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
        """Largest logit [n], weights [n, V] relative to it, and slots [n]."""
        slots = self._index(rows.slots)
        best = logits.amax(-1)
        # The largest logit is taken off first, so that a tiny temperature can't overflow.
        weights = torch.empty_like(logits) if self._scratch is None else self._scratch[: len(rows.slots)]
        torch.sub(logits, best[:, None], out=weights)
        weights.div_(self.parameters.floats[slots, TEMPERATURE, None]).exp_()
        return best, weights, slots

    def _uniforms(self, slots: Tensor, rows: Rows) -> Tensor:
        keys = self.parameters.ints[slots, KEY]
        return uniforms(keys, self._index(rows.positions), Purpose.SAMPLE)

    def _index(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.parameters.floats.device)


def _take(rows: Rows, group: Sequence[int]) -> Rows:
    return Rows(tuple(rows.slots[i] for i in group), tuple(rows.positions[i] for i in group))


def _greedy(logits: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Largest logit of each row, and its token."""
    best, tokens = logits.max(-1)
    return best, tokens


def _join(parts: Sequence[tuple[Sequence[int], Chosen]]) -> Chosen:
    """Results of groups, in the order of the rows."""
    if len(parts) == 1:
        return parts[0][1]
    order = torch.tensor([row for group, _ in parts for row in group]).argsort()
    tokens = torch.cat([chosen.tokens for _, chosen in parts])
    valid = torch.cat([chosen.valid for _, chosen in parts])
    order = order.to(tokens.device)
    return Chosen(tokens[order], valid[order])
