"""Grammar masks of a rank's steps, made on a thread of their own while the target's forward runs.

The device thread says what a step drafts (`begin`), queues the forward, and takes the masks (`finish`) before
tokens are chosen; then it says what the step keeps (`retain`). All matchers belong to one other thread, which
takes jobs in order: entering and leaving requests, masks, kept tokens. Neither the event loop nor the device
thread ever touches a matcher or waits for a lock. The order of it all is specs/grammar_pipeline.toml.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.actors.core import Reply
from engine.actors.grammar_pipeline import (
    Arrived,
    Barrier,
    Began,
    Entered,
    GrammarPipeline,
    Kept,
    Left,
    Retained,
    Traversed,
)
from engine.grammar.matchers import ENDED, FREE, Matcher, MatcherBatch
from engine.grammar.matchers import Traversed as Walked
from engine.grammar.pipeline_buffers import MaskBuffers
from engine.grammar.pipeline_counters import PipelineCounters
from engine.grammar.pipeline_request import Constrained, too_slow
from engine.messages import SlotBind
from engine.runner.columns import Int, Upload
from engine.runner.masking import OVER, MaskGroups, Masks

BUDGET_S = 0.05

NOBODY = -1


class Wish(NamedTuple):
    """What the grammar thread needs of a step: m constrained groups.

    requests, anchors, widths  of each
    drafts  waits for anchors and drafts, int64 [n, gamma + 1], of all groups that verify some
    places  their rows of those constrained groups that verify some, which are the first ones
    """

    epoch: int
    mask_slot: int
    requests: tuple[int, ...]
    anchors: tuple[int, ...]
    widths: Int
    places: Int
    drafts: Callable[[], npt.NDArray[np.int64]]


class Made(NamedTuple):
    """Masks in their slot; columns as in `Masks`."""

    lengths: Int
    most: Int
    failed: dict[int, str]


class Pipeline:
    """The mask source of a rank.

    stop_ids   tokens that end a grammar; none of them may come before it begins
    think_end  token that ends a reasoning; None: the model has none
    slots      of the cache
    rows       most rows that one step chooses tokens from
    budget_s   processor time that one request's rows, or its kept tokens, may take of a step
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
        budget_s: float = BUDGET_S,
    ) -> None:
        self.budget_s = budget_s
        self.counters = PipelineCounters()
        self._stops = frozenset(stop_ids)
        self._think_end = think_end
        self._core = GrammarPipeline()
        self._batch = MatcherBatch(vocab_size, stop_ids, rows, budget_s)
        self._buffers = MaskBuffers(device, rows, self._batch.words)
        self._to = Upload(device)
        allowed = np.ones(self._batch.words * 32, np.bool_)
        allowed[list(stop_ids)] = False
        self._free = np.packbits(allowed, bitorder="little").view(np.int32)
        self._requests: dict[int, Constrained] = {}
        self._of_slot = np.full(slots, NOBODY, np.int64)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar masks")
        self._made: Future[Made] | None = None
        self._wish: Wish | None = None
        self._slots: Int = np.zeros(0, np.int64)
        self._index: Int = np.zeros(0, np.int64)
        self._error: BaseException | None = None

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
        self._requests[request] = Constrained(matcher, think_end)
        self._do(self._core.receive, Entered(request, prompt_tokens))

    def leave(self, request: int) -> None:
        """No step in flight names the request, and none will."""
        self._do(self._leave, request)

    def close(self) -> None:
        """Waits for the jobs that are left."""
        self._thread.shutdown(wait=True)

    # ---- the device thread --------------------------------------------------------------------

    def bind(self, bind: SlotBind) -> str:
        """As MaskSource."""
        self._of_slot[bind.slot] = bind.request_id if bind.constrained else NOBODY
        if bind.constrained and bind.request_id not in self._requests:
            return f"request {bind.request_id} has no matcher"
        return ""

    def constrained(self, slots: npt.NDArray[np.integer]) -> Int:
        """As MaskSource."""
        return np.flatnonzero(self._of_slot[slots] != NOBODY)

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
            self._buffers.fetch(groups.tokens),
        )
        self._made = self._thread.submit(self._make, wish)

    def finish(self, epoch: int) -> Masks:
        """As MaskSource. raises whatever a job of the grammar thread raised"""
        made, wish = self._made, self._wish
        assert made is not None
        assert wish is not None
        assert wish.epoch == epoch
        with self.counters.phase("wait"):
            found = made.result()
        if self._error is not None:
            raise self._error
        index = self._to.int64(self._index)

        def apply(logits: Tensor) -> None:
            self._buffers.apply(wish.mask_slot, logits, index)

        return Masks(apply, *found)

    def retain(self, epoch: int, tokens: Sequence[Sequence[int]]) -> list[bool]:
        """As MaskSource."""
        wish = self._wish
        assert wish is not None
        ended = [bool(kept) and kept[-1] in self._stops for kept in tokens]
        for slot, own in zip(self._slots.tolist(), tokens, strict=True):
            if not own:
                # It failed or had ended: a step that rides in vain has no matcher to follow.
                self._of_slot[slot] = NOBODY
        rows = zip(wish.requests, wish.anchors, tokens, ended, strict=True)
        kept = tuple(Kept(one, first, tuple(own), end) for one, first, own, end in rows if own)
        self._do(self._retain, Retained(epoch, kept))
        self.counters.ended(sum(ended))
        return ended

    # ---- the grammar thread -------------------------------------------------------------------

    def _do(self, job: Callable[[Any], object], msg: Any) -> None:
        """Queues a job; what it raises ends the rank at its next masks."""

        def work() -> None:
            try:
                job(msg)
            except BaseException as error:
                self._error = error

        self._thread.submit(work)

    def _leave(self, request: int) -> None:
        self._core.receive(Left(request))
        self._requests.pop(request, None)

    def _retain(self, kept: Retained) -> None:
        self._core.receive(kept)
        self._tell(Arrived(kept.epoch))

    def _tell(self, msg: Arrived | Barrier) -> None:
        """Advances over what is owed, where anything is."""
        for effect in self._core.receive(msg):
            assert isinstance(effect, Reply)
            self._requests[effect.slot].advance(effect.value, self.budget_s)

    def _make(self, wish: Wish) -> Made:
        phase = self.counters.phase
        with phase("draft_d2h"):
            drafts = wish.drafts()
        with phase("barrier"):
            self._core.receive(Began(wish.epoch, wish.requests, wish.anchors))
            self._tell(Barrier(wish.epoch))
        requests = [self._requests[request] for request in wish.requests]
        with phase("traverse"):
            ids = [np.zeros(width, np.int32) for width in wish.widths.tolist()]
            for own, place in zip(ids, wish.places.tolist(), strict=False):
                own[:] = drafts[place, : own.size]
            chains = [one.chain(own) for one, own in zip(requests, ids, strict=True)]
            walked = self._batch.traverse(chains, self._buffers.host[wish.mask_slot])
        self._core.receive(Traversed(wish.epoch))
        made = self._settle(wish, requests, walked)
        with phase("mask_h2d"):
            self._buffers.send(wish.mask_slot, len(walked.kinds))
        self.counters.made(walked, made.failed)
        return made

    def _settle(self, wish: Wish, requests: Sequence[Constrained], walked: Walked) -> Made:
        """What the kinds of rows mean; rows of groups that fail allow nothing."""
        firsts = np.cumsum(wish.widths) - wish.widths
        ended = walked.kinds == ENDED
        lengths, most = np.array(wish.anchors, np.int64), wish.widths.copy()
        failed = dict(walked.failed)
        for number in walked.late:
            failed[number] = str(too_slow(int(wish.widths[number]), self.budget_s, self.budget_s))
        for number, (request, first) in enumerate(zip(requests, firsts.tolist(), strict=True)):
            rows = slice(first, first + int(wish.widths[number]))
            if request.fault:
                failed[number] = request.fault
            elif request.matcher.terminated:
                lengths[number], most[number] = OVER, 0
            elif ended[rows].any():
                most[number] = int(np.argmax(ended[rows]))
            if request.thinking:
                walked.bitmask[rows][walked.kinds[rows] == FREE] = self._free
            if number in failed:
                walked.bitmask[rows] = 0
        return Made(lengths, most, failed)
