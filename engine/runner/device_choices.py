"""Tokens chosen by kernels: every launch is of a size that the host knows, and none waits for the host.

One pass edits rows and leaves statistics of their groups of tokens; draws and tests start from these. The
rules, and the numbers that draws take, are those of `Sampler` and `Acceptance`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.kernels.triton import accept as kernels
from engine.kernels.triton import logits as statistics
from engine.kernels.triton.accept_rows import VerifiedRows, spread
from engine.kernels.triton.draws import Drawn, draw
from engine.kernels.triton.logits_best import best_logprobs
from engine.kernels.triton.markov import Choosers
from engine.kernels.triton.masks import RowMasks, count_tokens, edit
from engine.messages import SlotBind
from engine.model.draft import Choose
from engine.runner.acceptance import Accepted
from engine.runner.acceptance_layout import VerifyRows, widths_of
from engine.runner.columns import Upload
from engine.runner.device_drafts import DeviceChooser
from engine.runner.device_tables import DeviceTables
from engine.runner.device_warm import FEW_AND_MANY, warm_sampling, warm_verification
from engine.runner.edits import MaskWords
from engine.runner.logprobs import TokenLogprobs
from engine.runner.parameters import Features, SlotParameters
from engine.runner.sampling import Chosen, Rows


class DeviceChoices:
    """Choices by Triton kernels; interpreted where TRITON_INTERPRET is set."""

    name = "triton"

    def __init__(self, parameters: SlotParameters) -> None:
        self.parameters = parameters
        self._tables = DeviceTables(parameters)
        self._to = Upload(parameters.floats.device)

    def bind(self, bind: SlotBind) -> None:
        """As Choices.bind."""
        self.parameters.bind(bind)
        self._tables.bind(bind)

    def warm(self, slot: int, block: int) -> None:
        """As Choices.warm: kernels are compiled."""
        columns, device = self.parameters.vocab_size, self.parameters.floats.device
        warm_sampling(self.sample, slot, columns, device)
        if block:
            warm_verification(self.accept, slot, block, columns, device)
        for count in FEW_AND_MANY:
            logits = torch.zeros(count, columns, device=device)
            for repeats in (None, self._tables.repeats) if block else ():
                self._chooser((slot,) * count, (0,) * count, repeats)(0, logits)
            self.logprobs(logits, self._columns((0,) * count)[0], [1])

    def sample(self, logits: Tensor, rows: Rows, mask: MaskWords | None = None) -> Chosen:
        """As Choices.sample."""
        features = [self.parameters.of(slot) for slot in rows.slots]
        slots, positions, ones = self._columns(rows.slots, rows.positions, np.ones(len(features), np.int64))
        laid = spread(slots, positions, ones, 1, len(features))
        logits = _editable(logits, rows.positions, features, mask)
        drawn = self._drawn(logits, laid, mask)
        # A row that failed counts its 0: nobody asks its slot again.
        count_tokens(self._tables.edits, slots, drawn.tokens[:, None], ones)
        return Chosen(drawn.tokens, drawn.valid)

    def accept(self, logits: Tensor, rows: VerifyRows, mask: MaskWords | None = None) -> Accepted:
        """As Choices.accept."""
        features = [self.parameters.of(slot) for slot in rows.slots]
        widths, width = widths_of(rows, logits), rows.draft_ids.shape[1] + 1
        slots, positions, lens = self._columns(rows.slots, rows.positions, widths)
        laid = spread(slots, positions, lens, width, len(logits))
        logits = _editable(logits, rows.positions, features, mask)
        drawn = self._drawn(logits, laid, mask, rows.draft_ids)
        drafts = kernels.Drafts(slots, positions, lens, rows.draft_ids, rows.draft_logits, rows.draft_stats)
        floats, ints = self.parameters.floats, self.parameters.ints
        found = kernels.accept(logits, drafts, floats, ints, self._tables.repeats, drawn)
        count_tokens(self._tables.edits, slots, found.tokens, found.counts)
        return Accepted(found.tokens, found.counts, found.valid)

    def choose(self, slots: Sequence[int], positions: Sequence[int]) -> Choose:
        """As Choices.choose; what it returns can take blocks."""
        # The kernel that draws for repeating requests, too, has several launches a position.
        again = any(self.parameters.of(slot).repeats for slot in slots)
        return self._chooser(slots, positions, self._tables.repeats if again else None)

    def logprobs(self, logits: Tensor, tokens: Tensor, tops: Sequence[int]) -> TokenLogprobs:
        """As Choices.logprobs."""
        chosen, ids, values = best_logprobs(logits, tokens, max(tops, default=0))
        return TokenLogprobs(chosen, ids, values, tuple(tops))

    def _drawn(
        self, logits: Tensor, laid: VerifiedRows, mask: MaskWords | None, draft_ids: Tensor | None = None
    ) -> Drawn:
        """Edits the rows in place, and draws from each as plain decoding does."""
        stats = statistics.new_stats(logits)
        masks = None if mask is None else self._row_masks(mask, len(logits))
        edit(logits, laid, self._tables.edits, draft_ids, masks, stats)
        floats, ints = self.parameters.floats, self.parameters.ints
        return draw(logits, stats, laid.slots, laid.positions, floats, ints)

    def _chooser(
        self, slots: Sequence[int], positions: Sequence[int], repeats: Tensor | None
    ) -> DeviceChooser:
        own, places = self._columns(slots, positions)
        return DeviceChooser(Choosers(own, places, self.parameters.floats, self.parameters.ints, repeats))

    def _row_masks(self, mask: MaskWords, rows: int) -> RowMasks:
        which = np.full(rows, -1, np.int64)
        which[mask.rows] = np.arange(mask.rows.size)
        return RowMasks(mask.words, self._to.int64(which))

    def _columns(self, *columns: Sequence[int] | np.ndarray) -> tuple[Tensor, ...]:
        """Host columns of one length as int64 on the device, in one copy."""
        return self._to.int64(np.array(columns, np.int64)).unbind()


def _editable(
    logits: Tensor, positions: Sequence[int], features: Sequence[Features], mask: MaskWords | None
) -> Tensor:
    """The logits, or a copy where an edit would take from a request the numbers that it asked to see."""
    edited = mask is not None or any(
        f.edits_logits(position) for f, position in zip(features, positions, strict=True)
    )
    return logits.clone() if edited and any(f.logprobs >= 0 for f in features) else logits
