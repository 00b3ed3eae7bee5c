"""How the slots of a step pick their drafts: by argmax where greedy, else from softmax(z / temperature)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.runner.edits import ChooseAmong, MaskWords
from engine.runner.filters import draw, greatest
from engine.runner.parameters import KEY, TEMPERATURE, SlotParameters
from engine.runner.randomness import Purpose, uniforms
from engine.runner.tempering import Tempering

Repeat = Callable[[Tensor, Sequence[int], Sequence[int], list[int]], Tensor]
"""(logits, rows, slots of all rows, positions): what plain decoding draws from these rows, int64 [n]."""


class DraftChoice(ChooseAmong):
    """Of some slots.

    A number belongs to the round and k, not to the token's position: a position whose draft was thrown away
    gets a fresh one, as what was known of the old draft may have chosen how many rows are verified. Where the
    token itself is drawn by its position alone, its draft is, too.
    """

    def __init__(
        self,
        parameters: SlotParameters,
        tempering: Tempering,
        repeat: Repeat,
        slots: Sequence[int],
        positions: Sequence[int],
    ) -> None:
        """positions  position of each slot's first draft; raises BadRequest where a slot isn't bound"""
        features = [parameters.of(slot) for slot in slots]
        self._tempering, self._repeat, self._slots, self._positions = tempering, repeat, slots, positions
        self._sampled = [row for row, f in enumerate(features) if f.by_odds]
        self._repeats = [row for row, f in enumerate(features) if f.repeats]
        if self._sampled:
            chosen = tempering.index([slots[row] for row in self._sampled])
            self._first = tempering.index([positions[row] for row in self._sampled])
            self._temperatures = parameters.floats[chosen, TEMPERATURE]
            self._keys = parameters.ints[chosen, KEY]

    def __call__(self, k: int, z: Tensor) -> Tensor:
        """As Choose."""
        return self._pick(k, z, None)

    def among(self, k: int, z: Tensor, mask: MaskWords) -> Tensor:
        """As ChooseAmong: greedy rows take a mask's word for it, draws want it in the logits."""
        if self._sampled or self._repeats:
            mask(z)
            return self._pick(k, z, None)
        return self._pick(k, z, mask)

    def _pick(self, k: int, z: Tensor, mask: MaskWords | None) -> Tensor:
        greedy = len(self._sampled) + len(self._repeats) < len(self._slots)
        tokens = greatest(z, mask)[1] if greedy else z.new_empty(len(z), dtype=torch.int64)
        if self._sampled:
            self._draw(k, z, tokens)
        if self._repeats:
            positions = [self._positions[row] + k for row in self._repeats]
            own = self._repeat(z, self._repeats, self._slots, positions)
            tokens[self._tempering.index(self._repeats)] = own
        return tokens

    def _draw(self, k: int, z: Tensor, tokens: Tensor) -> None:
        """Writes the tokens of rows that sample."""
        u, done = uniforms(self._keys, self._first, Purpose.DRAFT, k), 0
        for part in self._tempering.parts(self._sampled):
            some = slice(done, done + len(part))
            _, weights = self._tempering.weights(z, part, self._temperatures[some])
            tokens[self._tempering.index(part)] = draw(weights, u[some])
            done += len(part)
