"""Grammar masks of a rank's steps, made beside the target's forward on a thread of their own, or in a moment.

Drafts are made of what the grammars allow (`guide`). Then the device thread says what a step verifies
(`begin`), queues the forward, and takes the masks (`finish`) before tokens are chosen; and it says what the
step keeps (`retain`). All matchers belong to a lane, whose thread takes jobs in order: entering and leaving
requests, drafts, masks, kept tokens. The event loop never touches a matcher or waits for one. The device
thread takes the lane's turn itself where the jobs of few requests are shorter than the way to that thread and
back. The order of it all is specs/grammar_pipeline.toml.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.actors.grammar_pipeline import Kept, Leads, Retained
from engine.grammar.matchers import Matcher
from engine.grammar.pipeline_buffers import fetch
from engine.grammar.pipeline_drafts import DraftBuffers, DraftMasks
from engine.grammar.pipeline_request import Constrained
from engine.grammar.pipeline_thread import Made, MaskThread, Wish
from engine.messages import SlotBind
from engine.runner.columns import Int
from engine.runner.edits import MaskWords
from engine.runner.masking import MaskGroups, Masks

BUDGET_S, TOKEN_S = 0.05, 5e-6
"""A budget is at least so much, and for each token. Where all are tried for a row, that takes 0.7 us a token:
a block of rows has to get through with a large vocabulary, too."""

NOBODY = -1


class Pipeline:
    """The mask source of a rank.

    stop_ids   tokens that end a grammar; none of them may come before it begins
    think_end  token that ends a reasoning; None: the model has none
    slots      of the cache
    rows       most rows of one slot that a step chooses tokens from: drafts and one more
    budget_s   processor time that one request's rows, or its kept tokens, may take of a step; None: by the
               vocabulary
    counters   for metrics
    """

    def __init__(
        self,
        vocab_size: int,
        stop_ids: Collection[int],
        think_end: int | None,
        device: torch.device,
        slots: int,
        rows: int,
        budget_s: float | None = None,
    ) -> None:
        budget_s = max(BUDGET_S, TOKEN_S * vocab_size) if budget_s is None else budget_s
        self._thread = MaskThread(vocab_size, stop_ids, device, slots * rows, budget_s)
        self.counters = self._thread.counters
        self._stops, self._think_end = frozenset(stop_ids), think_end
        self._buffers = self._thread.buffers
        self._draft_buffers = DraftBuffers(device, rows, slots, self._thread.words)
        self._drafts: DraftMasks | None = None
        self._of_slot = np.full(slots, NOBODY, np.int64)
        self._made: Callable[[], Made] | None = None
        self._wish: Wish | None = None
        self._slots: Int = np.zeros(0, np.int64)
        self._index: Int = np.zeros(0, np.int64)

    @property
    def reasons(self) -> bool:
        """Whether a grammar may begin behind a reasoning."""
        return self._think_end is not None

    def figures(self) -> dict[str, float]:
        """For metrics."""
        return self.counters.figures()

    # ---- the event loop -----------------------------------------------------------------------

    def enter(self, request: int, matcher: Matcher, prompt_tokens: int, after_think: bool) -> None:
        """A request's matcher, before the request is bound to a slot."""
        think_end = self._think_end if after_think else None
        self._thread.enter(request, Constrained(matcher, think_end), prompt_tokens)

    def leave(self, request: int) -> None:
        """No step in flight names the request, and none will."""
        self._thread.leave(request)

    def close(self) -> None:
        """Waits for the jobs that are left."""
        self._thread.close()

    # ---- the device thread --------------------------------------------------------------------

    def bind(self, bind: SlotBind) -> str:
        """As MaskSource."""
        self._of_slot[bind.slot] = bind.request_id if bind.constrained else NOBODY
        if bind.constrained and not self._thread.knows(bind.request_id):
            return f"request {bind.request_id} has no matcher"
        return ""

    def constrained(self, slots: npt.NDArray[np.integer]) -> Int:
        """As MaskSource."""
        return np.flatnonzero(self._of_slot[slots] != NOBODY)

    def guide(self, epoch: int, slots: npt.NDArray[np.integer], anchors: Int) -> DraftMasks | None:
        """As MaskSource."""
        places = self.constrained(slots)
        if not places.size:
            return None
        names, ends = self._of_slot[slots[places]].tolist(), anchors[places].tolist()
        drafts = self._drafts = DraftMasks(
            epoch, slots.size, places, self._draft_buffers, self._thread.lane, self.counters,
            here=self._thread.few(places.size),
        )  # fmt: skip
        self._thread.lead(drafts, Leads(epoch, tuple(names), tuple(ends)))
        return drafts

    def wait_read(self, mask_slot: int) -> None:
        """As MaskSource."""
        self._buffers.wait_read(mask_slot)

    def begin(self, epoch: int, mask_slot: int, groups: MaskGroups) -> None:
        """As MaskSource."""
        places = self.constrained(groups.slots)
        self._slots = groups.slots[places]
        widths = groups.widths[places]
        firsts = (np.cumsum(groups.widths) - groups.widths)[places]
        self._index = np.repeat(firsts - (np.cumsum(widths) - widths), widths) + np.arange(widths.sum())
        wish = self._wish = Wish(
            epoch,
            mask_slot,
            tuple(self._of_slot[groups.slots[places]].tolist()),
            tuple(groups.anchors[places].tolist()),
            widths,
            places[places < len(groups.tokens)],
            fetch(groups.tokens),
        )
        self._made = self._thread.make(wish, self._drafts)
        self._drafts = None

    def finish(self, epoch: int) -> Masks:
        """As MaskSource. raises whatever a job of the grammar thread raised"""
        made, wish = self._made, self._wish
        assert made is not None
        assert wish is not None
        assert wish.epoch == epoch
        with self.counters.phase("wait"):
            found = made()
        words = self._buffers.words(wish.mask_slot, self._index.size)
        return Masks(MaskWords(words, self._index), *found)

    def retain(self, epoch: int, tokens: Sequence[Sequence[int]]) -> list[bool]:
        """As MaskSource."""
        wish = self._wish
        assert wish is not None
        self._buffers.read(wish.mask_slot)
        ended = [bool(kept) and kept[-1] in self._stops for kept in tokens]
        for slot, own in zip(self._slots.tolist(), tokens, strict=True):
            if not own:
                # It failed or had ended: a step that rides in vain has no matcher to follow.
                self._of_slot[slot] = NOBODY
        rows = zip(wish.requests, wish.anchors, tokens, ended, strict=True)
        kept = tuple(Kept(one, first, tuple(own), end) for one, first, own, end in rows if own)
        self._thread.retain(Retained(epoch, kept), here=self._thread.few(len(wish.requests)))
        self.counters.ended(sum(ended))
        return ended
