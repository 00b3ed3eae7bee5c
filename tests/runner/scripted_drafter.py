"""A drafter whose tokens are given beforehand, and that refuses to draft from rows that it never got."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.model.draft import Choose, Drafted, DraftRows, InjectRows, greedy
from engine.model.draft_ring import RING, DraftState

Survival = Callable[[int, int, int], float]
"""(slot, committed length, place in the draft) -> what the draft claims of itself."""


class ScriptedDrafter:
    """Drafts `texts[slot][L + 1 : L + 1 + block]`, off the target's way where `wrong` names a position.

    Its KV is the position and the sum of the taps of each ring row: position 0 alone would hide an unwritten
    ring, so positions count from 1.

    samples        the tokens are picked by `choose` from logits around the script
    check_anchors  anchors must be the script's
    broken         slots whose drafts are NaN
    seen           (slot, length, first visible position) of every draft
    taps_seen      (slot, position) -> taps [K, H] of every injected row
    next_seen      (slot, position) -> the token behind it, as the runner gave it
    """

    rereads_logits = False

    def __init__(
        self, block: int, taps: tuple[int, ...], vocab_size: int = 256, *, needs_next_tokens: bool = False
    ) -> None:
        self.block, self.taps, self.vocab_size = block, taps, vocab_size
        self.needs_next_tokens = needs_next_tokens
        self.texts: dict[int, list[int]] = {}
        self.wrong: set[tuple[int, int]] = set()
        self.survival: Survival = lambda slot, length, place: 0.9 ** (place + 1)
        self.broken: set[int] = set()
        self.samples, self.check_anchors = False, True
        self.seen: list[tuple[int, int, int]] = []
        self.taps_seen: dict[tuple[int, int], Tensor] = {}
        self.next_seen: dict[tuple[int, int], int] = {}

    def new_state(self, slots: int) -> DraftState:
        """Rows that were never written are NaN."""
        return DraftState(torch.full((1, slots * (RING + self.block), 1), torch.nan), self.block)

    def inject(self, state: DraftState, rows: InjectRows, taps: Tensor) -> None:
        """As Drafter.inject."""
        assert taps.shape[:2] == (len(self.taps), len(rows.slots))
        assert taps.isfinite().all()
        places = state.ring_rows(rows.slots, rows.positions)
        assert len(set(places.tolist())) == len(places), "a ring row is written twice in one call"
        state.pool[0, places, 0] = rows.positions.float() + 1
        for row, (slot, position) in enumerate(
            zip(rows.slots.tolist(), rows.positions.tolist(), strict=True)
        ):
            self.taps_seen[slot, position] = taps[:, row].clone()
            if rows.next_tokens is not None:
                self.next_seen[slot, position] = int(rows.next_tokens[row])
        assert (rows.next_tokens is not None) == self.needs_next_tokens

    def draft(
        self, state: DraftState, rows: DraftRows, choose: Choose = greedy, *, keep_logits: bool = False
    ) -> Drafted:
        """As Drafter.draft; every row in sight must be the one that was injected for its position."""
        ids = np.zeros((rows.slots.size, self.block), np.int64)
        survival = torch.empty(rows.slots.size, self.block)
        for row, (slot, length, first) in enumerate(
            zip(rows.slots.tolist(), rows.lengths.tolist(), rows.valid_from.tolist(), strict=True)
        ):
            sight = torch.arange(max(first, length - RING), length)
            found = state.pool[0, state.ring_rows(torch.tensor(slot), sight), 0]
            assert found.tolist() == (sight + 1).tolist(), (slot, length, first)
            if self.check_anchors:
                assert int(rows.anchors[row]) == self.texts[slot][length], (slot, length)
            self.seen.append((slot, length, first))
            for place in range(self.block):
                survival[row, place] = self.survival(slot, length, place)
                ids[row, place] = self._token(slot, length + 1 + place)
            if slot in self.broken:
                survival[row] = torch.nan
                ids[row] = self.vocab_size + 7
        logits = self._logits(ids) if self.samples else None
        chosen = torch.from_numpy(ids)
        if logits is not None:
            chosen = torch.stack([choose(k, logits[:, k]) for k in range(self.block)], 1)
        return Drafted(chosen, survival, logits if keep_logits else None)

    def _token(self, slot: int, position: int) -> int:
        text = self.texts[slot]
        token = text[position] if position < len(text) else 0
        return (token + 1) % self.vocab_size if (slot, position) in self.wrong else token

    def _logits(self, ids: npt.NDArray[np.int64]) -> Tensor:
        """Mass around the scripted token, and some everywhere."""
        logits = torch.zeros(*ids.shape, self.vocab_size)
        return logits.scatter_(2, torch.from_numpy(ids % self.vocab_size)[:, :, None], 5.0)
