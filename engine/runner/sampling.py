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

from engine.runner.edits import GrammarMask, Groups, MaskWords, edit
from engine.runner.filters import draw, draw_filtered, greatest
from engine.runner.parameters import KEY, MIN_P, TEMPERATURE, TOP_K, TOP_P, Features, SlotParameters
from engine.runner.penalties import TokenCounts
from engine.runner.randomness import Purpose, uniforms
from engine.runner.tempering import Tempering

_Choice = Callable[[Tensor, "Rows", Sequence[int]], tuple[Tensor, Tensor]]


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
        self._tempering = Tempering(parameters.vocab_size, parameters.floats.device)

    def sample(self, logits: Tensor, rows: Rows, mask: GrammarMask | None = None) -> Chosen:
        """One token a row; the counts of penalised slots grow by it.

        logits  float32 [R, V]; not changed
        raises  BadRequest where a row's slot isn't bound
        """
        features = [self.parameters.of(slot) for slot in rows.slots]
        groups = Groups(rows.slots, rows.positions, (1,) * len(rows.slots), features)
        if isinstance(mask, MaskWords) and groups.favoured:
            return _sound(*greatest(logits, mask))
        chosen = self.choose(edit(self.parameters, self.counts, logits, groups, mask), rows, features)
        counted = [i for i, f in enumerate(features) if f.penalised]
        if counted:
            self.counts.add([rows.slots[i] for i in counted], chosen.tokens[counted])
        return chosen

    def choose(
        self, logits: Tensor, rows: Rows, features: Sequence[Features], places: Sequence[int] | None = None
    ) -> Chosen:
        """One token a row of logits that are edited already; no count grows.

        features  of each row's slot
        places    the row of `logits` of each, ascending; None: its rows are the call's
        """
        places = range(len(rows.slots)) if places is None else places
        greedy = [i for i, f in enumerate(features) if f.greedy]
        plain = [i for i, f in enumerate(features) if not f.greedy and not f.filtered]
        filtered = [i for i, f in enumerate(features) if not f.greedy and f.filtered]
        parts: list[tuple[Sequence[int], _Choice]] = [(greedy, self._greedy)] if greedy else []
        parts += [(part, self._draw) for part in self._tempering.parts(plain)]
        parts += [(part, self._draw_filtered) for part in self._tempering.parts(filtered)]
        return _join([(part, _choose(logits, rows, part, places, how)) for part, how in parts])

    def _greedy(self, logits: Tensor, rows: Rows, places: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Largest logit of each row, and its token."""
        return greatest(self._tempering.take(logits, places))

    def _draw(self, logits: Tensor, rows: Rows, places: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Largest logit of each row, and a token drawn from its tempered distribution."""
        best, weights, slots = self._tempered(logits, rows, places)
        return best, draw(weights, self._uniforms(slots, rows))

    def _draw_filtered(self, logits: Tensor, rows: Rows, places: Sequence[int]) -> tuple[Tensor, Tensor]:
        """As `_draw`, after top-k, top-p and min-p."""
        best, weights, slots = self._tempered(logits, rows, places)
        floats = self.parameters.floats[slots]
        top_k = self.parameters.ints[slots, TOP_K]
        largest_k = max(self.parameters.of(slot).top_k for slot in rows.slots)
        u = self._uniforms(slots, rows)
        return best, draw_filtered(weights, u, top_k, floats[:, TOP_P], floats[:, MIN_P], largest_k)

    def _tempered(self, logits: Tensor, rows: Rows, places: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Largest logit [n], weights [n, V] relative to it, and slots [n]."""
        slots = self._tempering.index(rows.slots)
        best, weights = self._tempering.weights(logits, places, self.parameters.floats[slots, TEMPERATURE])
        return best, weights, slots

    def _uniforms(self, slots: Tensor, rows: Rows) -> Tensor:
        keys = self.parameters.ints[slots, KEY]
        return uniforms(keys, self._tempering.index(rows.positions), Purpose.SAMPLE)


def _choose(logits: Tensor, rows: Rows, group: Sequence[int], places: Sequence[int], how: _Choice) -> Chosen:
    """What `how` chooses for one group of rows."""
    if len(group) < len(rows.slots):
        rows = Rows(tuple(rows.slots[i] for i in group), tuple(rows.positions[i] for i in group))
        places = [places[i] for i in group]
    return _sound(*how(logits, rows, places))


def _sound(best: Tensor, tokens: Tensor) -> Chosen:
    """The tokens of rows whose largest logit is a number."""
    valid = best.isfinite()
    return Chosen(torch.where(valid, tokens, 0), valid)


def _join(parts: Sequence[tuple[Sequence[int], Chosen]]) -> Chosen:
    """Results of groups, in the order of the rows."""
    if len(parts) == 1:
        return parts[0][1]
    order = torch.tensor([row for group, _ in parts for row in group]).argsort()
    tokens = torch.cat([chosen.tokens for _, chosen in parts])
    valid = torch.cat([chosen.valid for _, chosen in parts])
    order = order.to(tokens.device)
    return Chosen(tokens[order], valid[order])
