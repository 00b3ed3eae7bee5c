"""What the draft is fed from: the captured layers' outputs of each slot's last committed rows.

Every forward puts its committed rows in; a draft takes out what it hasn't seen yet. So a request may decode
plainly for a while, or be read in chunks, and still be drafted for at any later step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.runner.batch import ForwardBatch
from engine.runner.columns import Int, Upload

TAP_ROWS = 128
"""Committed rows that are kept of each slot: what a draft can see."""


@dataclass(frozen=True, slots=True)
class WaitingRows:
    """Committed rows that the draft hasn't seen: n of them, with slots and positions int64 [n] on the host.

    taps         [K, n, H]
    next_tokens  int64 [n], the token behind each row; None where the draft doesn't read it
    """

    slots: Int
    positions: Int
    taps: Tensor
    next_tokens: Tensor | None


class TapRing:
    """The last committed rows of each slot.

    rows        [K, slots * 128, H]; the row of position p of slot s is s * 128 + p % 128
    tokens      int64 [slots * 128] likewise; None where the draft doesn't read them
    valid_from  int64 [slots] on the host, first position that the ring has seen since the slot was bound
    """

    def __init__(
        self,
        slots: int,
        taps: int,
        width: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        keep_tokens: bool,
    ) -> None:
        self.rows = torch.zeros(taps, slots * TAP_ROWS, width, dtype=dtype, device=device)
        self.tokens: Tensor | None = None
        if keep_tokens:
            self.tokens = torch.zeros(slots * TAP_ROWS, dtype=torch.int64, device=device)
        self.valid_from = np.zeros(slots, np.int64)
        self._to = Upload(device)

    @property
    def bytes(self) -> int:
        """Memory of the ring."""
        parts = (self.rows,) if self.tokens is None else (self.rows, self.tokens)
        return sum(part.numel() * part.element_size() for part in parts)

    def bind(self, slot: int, length: int) -> None:
        """Forgets what a slot's former request left; `length` tokens of the new one never come by."""
        self.valid_from[slot] = length

    def keep(self, batch: ForwardBatch, taps: Tensor, tokens: Tensor | None, lens: Int) -> None:
        """Puts in what a forward commits of each row group; rows far behind the newest never land.

        taps    [K, T, H] as the forward captured them
        tokens  int64 [T], what the rows were made of; None where no tokens are kept
        lens    int64 [B], committed rows of each group
        """
        if lens.size == batch.tokens.size and lens.all():
            places = self._to.int64(batch.slots * TAP_ROWS + batch.starts % TAP_ROWS)
            self._put(places, taps[:, : lens.size], None if tokens is None else tokens[: lens.size])
            return
        group, row = ragged(np.minimum(lens, TAP_ROWS))
        row += (lens - np.minimum(lens, TAP_ROWS))[group]
        source = self._to.int64((np.cumsum(batch.counts, dtype=np.int64) - batch.counts)[group] + row)
        places = self._to.int64(batch.slots[group] * TAP_ROWS + (batch.starts[group] + row) % TAP_ROWS)
        tokens = None if tokens is None else tokens.index_select(0, source)
        self._put(places, taps.index_select(1, source), tokens)

    def _put(self, places: Tensor, taps: Tensor, tokens: Tensor | None) -> None:
        self.rows.index_copy_(1, places, taps)
        if self.tokens is not None and tokens is not None:
            self.tokens.index_copy_(0, places, tokens)

    def take(self, slots: Int, begins: Int, ends: Int, anchors: Tensor) -> WaitingRows | None:
        """Rows of positions begins .. ends - 1 of each slot, at most its last 128; None where there are none.

        slots    int64 [n], distinct
        anchors  int64 [n] on the device, the token behind each slot's last row
        """
        group, row = ragged(ends - begins)
        if not group.size:
            return None
        positions = begins[group] + row
        places = slots[group] * TAP_ROWS + positions % TAP_ROWS
        next_tokens = None
        if self.tokens is not None:
            behind = self._to.int64(slots[group] * TAP_ROWS + (positions + 1) % TAP_ROWS)
            is_last = self._to.tensor(positions + 1 == ends[group])
            anchor = anchors.index_select(0, self._to.int64(group))
            next_tokens = torch.where(is_last, anchor, self.tokens.index_select(0, behind))
        taps = self.rows.index_select(1, self._to.int64(places))
        return WaitingRows(slots[group], positions, taps, next_tokens)


def ragged(counts: npt.NDArray[np.integer]) -> tuple[Int, Int]:
    """(group, place within it) of each of sum(counts) items, int64."""
    group = np.repeat(np.arange(counts.size), counts)
    firsts = np.cumsum(counts) - counts
    return group, np.arange(group.size) - firsts[group]
