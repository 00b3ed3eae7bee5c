"""Masks of drafts that are being made: a constrained request drafts what its grammar allows.

The device thread has logits of one position after the other. Before it chooses a position's tokens it takes
the masks (`apply`); then it says what it chose (`follow`) and goes on to the next logits, while the grammar
thread takes the matchers one token ahead and fills the next masks. What the rows of the drafts allow is then
known before the target runs; the step's masks are made of them. Where the masks of a position take less time
than the way to that thread and back, the device thread makes them itself, when it wants them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.errors import GrammarDiverged
from engine.grammar.lane import Lane
from engine.grammar.leads import ANCHOR, Lead
from engine.grammar.matchers import DEAD, ENDED, MASKED
from engine.grammar.pipeline_buffers import Drafted, Rows, fetch
from engine.grammar.pipeline_counters import PipelineCounters
from engine.model.draft import Choose
from engine.runner.columns import Int, Upload
from engine.runner.edits import ChooseAmong, MaskWords, forbid


class DraftBuffers:
    """Where masks of drafts are: host memory [rows of a draft, slots, words], pinned for a CUDA device.

    No event guards it. A position's tokens come to the host behind the device's read of its masks, and the
    next step drafts when all of this one's results are there (I5).
    """

    def __init__(self, device: torch.device, rows: int, slots: int, words: int) -> None:
        self.device = device
        self._host = torch.zeros(rows, slots, words, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.host: npt.NDArray[np.int32] = self._host.numpy()
        self.flat: Rows = self.host.reshape(-1, words)

    def words(self, row: int, requests: int) -> Tensor:
        """The first masks of this row of drafts, int32 [requests, words] on the device."""
        return self._host[row, :requests].to(self.device, non_blocking=True)


class DraftMasks:
    """Masks of one step's drafts; m constrained groups of n that draft.

    epoch   of the step
    places  int64 [m] of the constrained groups
    tokens  int64 [gamma, m], what was chosen
    kinds   uint8 [gamma + 1, m], what the rows' masks mean, see matchers.FREE
    leads   of each group, once the grammar thread has them
    """

    def __init__(
        self, epoch: int, groups: int, places: Int, buffers: DraftBuffers, lane: Lane,
        counters: PipelineCounters, *, here: bool,
    ) -> None:  # fmt: skip
        """groups  n; places  int64 [m] of the constrained ones among them; here  on the device thread."""
        self.epoch, self.leads = epoch, list[Lead]()
        block = len(buffers.host) - 1
        self.tokens = np.zeros((block, places.size), np.int64)
        self.kinds = np.zeros((block + 1, places.size), np.uint8)
        self._worth = [block + 1] * places.size
        self.places, self._groups, self._buffers = places, groups, buffers
        self._lane, self._counters, self._here = lane, counters, here
        self._index = Upload(buffers.device).int64(places)
        self._make: Callable[[], None] | None = None
        self._wait: Callable[[], None] | None = None

    # ---- the device thread --------------------------------------------------------------------

    def begin(self, start: Callable[[], Sequence[Lead]]) -> None:
        """Hands over the masks of the first tokens; `start` runs where they are made."""

        def work() -> None:
            self.leads[:] = start()
            self._fill(0, np.full(len(self.leads), ANCHOR))

        self._hand_over(work)

    def guided(self, choose: Choose) -> Choose:
        """`choose`, among tokens that the grammars allow."""

        among = choose.among if isinstance(choose, ChooseAmong) else None

        def pick(k: int, z: Tensor) -> Tensor:
            assert self._wait is not None
            with self._counters.phase("draft_wait"):
                self._wait()
            words = self._buffers.words(k, self.places.size)
            if among is None:
                forbid(z, self._index, words)
                tokens = choose(k, z)
            else:
                tokens = among(k, z, MaskWords(words, self.places))
            own = tokens if self.places.size == self._groups else tokens.index_select(0, self._index)
            self._hand_over(partial(self._follow, k, fetch(own)))
            return tokens

        return pick

    def _hand_over(self, job: Callable[[], None]) -> None:
        """To the grammar thread, or to the wait for it; `come_back` is what waits for the last row."""
        if self._here:
            self._make, self._wait = job, partial(self._lane.at_once, job)
        else:
            self._wait = self._lane.submit(job).result

    def worth(self) -> Int:
        """As Guide; of the last row nothing is known yet."""
        rows = np.full(self._groups, len(self.kinds), np.int64)
        rows[self.places] = self._worth
        return rows

    def certain(self) -> npt.NDArray[np.bool_]:
        """[n, gamma]: drafts that are the only token allowed, if those before them are accepted."""
        rows = self._buffers.host[: len(self.tokens), : self.places.size]
        bits = np.bitwise_count(rows.view(np.uint32)).sum(2, dtype=np.int64)
        only = np.zeros((self._groups, len(self.tokens)), np.bool_)
        only[self.places] = ((bits == 1) & (self.kinds[:-1] == MASKED)).T
        return only

    # ---- whoever has the lane's turn ----------------------------------------------------------

    def _follow(self, k: int, tokens: Callable[[], Drafted]) -> None:
        with self._counters.phase("draft_d2h"):
            self.tokens[k] = tokens()
        self._fill(k + 1, self.tokens[k])

    def _fill(self, row: int, tokens: Int) -> None:
        """The masks of this row of all drafts, whose tokens before it are these."""
        first, known = row * self._buffers.host.shape[1], row < len(self.tokens)
        with self._counters.phase("traverse"):
            for number, (lead, token) in enumerate(zip(self.leads, tokens.tolist(), strict=True)):
                kind = lead.follow(token, self._buffers.flat, first + number)
                self.kinds[row, number] = kind
                if known and kind in (ENDED, DEAD):
                    self._worth[number] = min(self._worth[number], max(row, 1))

    def come_back(self) -> None:
        """Every matcher stands at its anchor again. raises what the masks behind the last token raised"""
        try:
            if self._make is not None:
                self._make()
            elif self._wait is not None:
                self._wait()  # Jobs run in order: it is there.
        finally:
            for lead in self.leads:
                lead.come_back()

    @property
    def faults(self) -> tuple[tuple[int, ...], tuple[tuple[int, str], ...]]:
        """Groups that took too long, and (group, text) of those that the library refused."""
        late = tuple(number for number, lead in enumerate(self.leads) if lead.late)
        return late, tuple((number, lead.fault) for number, lead in enumerate(self.leads) if lead.fault)

    def rows(self, drafts: Drafted, widths: Int, out: Rows) -> npt.NDArray[np.uint8]:
        """Writes the masks of the rows that are verified to `out`, group by group; returns their kinds.

        drafts  int64 [m, gamma + 1], anchor and drafts of each group, as they are verified
        widths  int64 [m], rows of each
        raises  GrammarDiverged where other tokens are verified than were drafted
        """
        kinds, first = [], 0
        for number, width in enumerate(widths.tolist()):
            if drafts[number, 1:width].tobytes() != self.tokens[: width - 1, number].tobytes():
                raise GrammarDiverged(f"group {number} of step {self.epoch} verifies what it didn't draft")
            out[first : first + width] = self._buffers.host[:width, number]
            kinds.append(self.kinds[:width, number])
            first += width
        return np.concatenate(kinds) if kinds else np.zeros(0, np.uint8)
