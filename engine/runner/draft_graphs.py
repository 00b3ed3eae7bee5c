"""DSpark's stages over memory that never moves: captured once a size on a device, then replayed.

What is captured takes anchors and a plan's columns, and gives the hidden states of all blocks. Head, Markov
loop and draws follow as they do of an eager pass: they need no rows of requests that aren't there. Requests
that pad a size stand in slot 0, the sink, and see their own rows alone.

The draft's experts are all here: no collective is in what is captured, and ranks needn't agree on a size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from engine.model.draft import Choose, Drafted, DraftRows, InjectRows, greedy
from engine.model.draft_dspark import DSparkDrafter
from engine.model.draft_ring import BlockShape, DraftState, to_device
from engine.runner.columns import padded
from engine.runner.recorded import Recorded

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE


class RecordedPass(Recorded):
    """The stages for blocks of so many requests, over shared memory.

    anchors  int64 [B]; packed int64 [sum of shape.parts]; hidden [B, gamma, H]
    """

    def __init__(
        self, drafter: DSparkDrafter, state: DraftState, shape: BlockShape, shared: tuple[Tensor, ...]
    ) -> None:
        self.shape, self._drafter, self._state = shape, drafter, state
        anchors, packed, hidden = shared
        self.anchors, self.packed = anchors[: shape.requests], packed[: sum(shape.parts)]
        self.hidden = hidden[: shape.requests]
        super().__init__(f"a draft of {shape.requests}")

    def _now(self) -> tuple[int, ...]:
        return tuple(part.data_ptr() for part in (self.anchors, self.packed, self.hidden, self._state.pool))

    @torch.inference_mode()
    def run(self, anchors: Tensor, packed: Tensor) -> Tensor:
        """Hidden states [n, gamma, H] of anchors [n], n up to the size; valid until the next run of any size.

        raises  DeviceFailed where memory has moved that the pass reads
        """
        self._check()
        count = anchors.shape[0]
        self.anchors[:count].copy_(anchors)
        self.anchors[count:].fill_(self._drafter.noise)
        self.packed.copy_(packed)
        self._again()
        return self.hidden[:count]

    def _step(self) -> None:
        self.hidden.copy_(self._drafter.passed(self._state, self.anchors, self.packed, self.shape))


class RecordedDrafter:
    """A Drafter that passes its blocks by what was recorded over one state, if they fit; else eagerly.

    sizes  numbers of requests, any order
    pool   that other graphs of the device share, as of RecordedPass.record
    say    is told of each capture before it begins
    """

    needs_next_tokens = False
    rereads_logits = False

    def __init__(
        self,
        drafter: DSparkDrafter,
        state: DraftState,
        sizes: tuple[int, ...],
        pool: _POOL_HANDLE | None,
        say: Callable[[str], None],
    ) -> None:
        self._drafter, self._state = drafter, state
        self.block, self.taps, self.weights = drafter.block, drafter.taps, drafter.weights
        device, dtype, most = drafter.model.device, drafter.model.dtype, max(sizes)
        plan = drafter.plan(state, _nobody(most, device))
        anchors = torch.full((most,), drafter.noise, dtype=torch.int64, device=device)
        wide = drafter.config.hidden_size
        hidden = torch.zeros(most, self.block, wide, dtype=dtype, device=device)
        self._shared = (anchors, to_device(plan.packed(), device).clone(), hidden)
        self._recorded: dict[int, RecordedPass] = {}
        for number, size in enumerate(sorted(sizes, reverse=True), 1):
            say(f"capturing {number} of {len(sizes)} (draft of {size} requests)")
            own = drafter.plan(state, _nobody(size, device))
            one = RecordedPass(drafter, state, own.shape, self._shared)
            one.packed.copy_(to_device(own.packed(), device))
            one.record(pool)
            self._recorded[size] = one

    @property
    def bytes(self) -> int:
        """Of the memory that all sizes share, beside the pool."""
        return sum(part.numel() * part.element_size() for part in self._shared)

    def new_state(self, slots: int) -> DraftState:
        """As Drafter.new_state; blocks on another state than the recorded one pass eagerly."""
        return self._drafter.new_state(slots)

    def inject(self, state: DraftState, rows: InjectRows, taps: Tensor) -> None:
        """As Drafter.inject."""
        self._drafter.inject(state, rows, taps)

    def draft(
        self, state: DraftState, rows: DraftRows, choose: Choose = greedy, *, keep_logits: bool = False
    ) -> Drafted:
        """As Drafter.draft."""
        count = rows.slots.size
        size = min((size for size in self._recorded if size >= count), default=0)
        if not count or not size or state is not self._state:
            return self._drafter.draft(state, rows, choose, keep_logits=keep_logits)
        plan = self._drafter.plan(state, _padded(rows, size))
        packed = to_device(plan.packed(), self._drafter.model.device)
        hidden = self._recorded[size].run(rows.anchors, packed)
        return self._drafter.chosen(hidden, rows.anchors, choose, keep_logits=keep_logits)

    def close(self) -> None:
        """Frees all graphs, before the state that they name (I8); blocks pass eagerly from then on."""
        for one in self._recorded.values():
            one.free()
        self._recorded.clear()


def _nobody(count: int, device: torch.device) -> DraftRows:
    """Blocks of `count` requests that aren't there."""
    none = np.zeros(count, np.int64)
    return DraftRows(none, none, none, torch.zeros(count, dtype=torch.int64, device=device))


def _padded(rows: DraftRows, size: int) -> DraftRows:
    slots, lengths, valid_from = (padded(own, size) for own in (rows.slots, rows.lengths, rows.valid_from))
    return DraftRows(slots, lengths, valid_from, rows.anchors)
