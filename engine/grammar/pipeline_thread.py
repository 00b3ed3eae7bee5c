"""All matchers of a rank, and the lane in which whatever is done with them is done in order.

Entering and leaving requests, drafts, masks, kept tokens: whoever asks hands over a job and goes on, or, on
the device thread and for a few requests, does it at once. The order of it all is specs/grammar_pipeline.toml,
whose core lives here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.actors.core import Reply
from engine.actors.grammar_pipeline import (
    Arrived,
    Barrier,
    Began,
    Entered,
    GrammarPipeline,
    Leads,
    Left,
    Retained,
    Returned,
    Traversed,
)
from engine.grammar.lane import Lane
from engine.grammar.leads import Lead
from engine.grammar.matchers import ENDED, FREE, MatcherBatch
from engine.grammar.matchers import Traversed as Walked
from engine.grammar.pipeline_buffers import MaskBuffers
from engine.grammar.pipeline_counters import PipelineCounters
from engine.grammar.pipeline_drafts import DraftMasks
from engine.grammar.pipeline_request import Constrained, too_slow, traverse
from engine.runner.columns import Int
from engine.runner.masking import OVER

FEW = 8
"""Constrained requests of a step whose masks the device thread makes itself, where the device is the CPU.

A row of masks takes 20 us a request, and to hand it over and wait for it takes 200 us, as both threads want
the interpreter's lock. Nor is a step's job worth handing over beside the forward: for four requests it takes
0.2 ms, and the forward takes 0.3 ms more beside it."""


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


class MaskThread:
    """Matchers, and the masks that are made of them.

    counters  for metrics
    buffers   mask slots, each for `rows` rows
    """

    def __init__(
        self, vocab_size: int, stop_ids: Collection[int], device: torch.device, rows: int, budget_s: float
    ) -> None:
        self.counters = PipelineCounters()
        self._budget_s = budget_s
        self._batch = MatcherBatch(vocab_size, stop_ids, rows, budget_s)
        self.words = self._batch.words
        self.buffers = MaskBuffers(device, rows, self.words)
        self._stops = frozenset(stop_ids)
        allowed = np.ones(self.words * 32, np.bool_)
        allowed[list(stop_ids)] = False
        self._free = np.packbits(allowed, bitorder="little").view(np.int32)
        self._core = GrammarPipeline()
        self._requests: dict[int, Constrained] = {}
        self._error: BaseException | None = None
        self.lane = Lane("grammar masks")

    # ---- any thread ---------------------------------------------------------------------------

    def knows(self, request: int) -> bool:
        """Whether the request has entered."""
        return request in self._requests

    def enter(self, request: int, one: Constrained, prompt_tokens: int) -> None:
        """A request with its matcher."""
        self._requests[request] = one
        self._do(self._core.receive, Entered(request, prompt_tokens))

    def leave(self, request: int) -> None:
        """No step in flight names the request, and none will."""
        self._do(self._leave, request)

    def close(self) -> None:
        """Waits for the jobs that are left."""
        self.lane.close()

    # ---- the device thread --------------------------------------------------------------------

    def few(self, groups: int) -> bool:
        """Whether the device thread itself makes the masks of so many constrained groups."""
        return not self.buffers.cuda and groups <= FEW

    def lead(self, drafts: DraftMasks, leads: Leads) -> None:
        """Masks of drafts: the first ones now, the others as it is said what was drafted."""
        drafts.begin(partial(self._lead, leads))

    def make(self, wish: Wish, drafts: DraftMasks | None) -> Callable[[], Made]:
        """Masks of a step, and of the drafts that it verifies; the result waits for them, or makes them."""
        here = self.few(len(wish.requests))
        self.counters.paths["device" if here else "thread"] += 1
        if here:
            return partial(self.lane.at_once, self._make, wish, drafts)
        return self.lane.submit(self._make, wish, drafts).result

    def retain(self, kept: Retained, *, here: bool) -> None:
        """What the step keeps."""
        self._do(self._retain, kept, here=here)

    # ---- whoever has the lane's turn ----------------------------------------------------------

    def _do(self, job: Callable[[Any], object], msg: Any, *, here: bool = False) -> None:
        """Hands over a job; what the first one raises is the cause that ends the rank at its next masks."""

        def work() -> None:
            try:
                job(msg)
            except BaseException as error:
                self._error = self._error or error

        if here:
            self.lane.at_once(work)
        else:
            self.lane.submit(work)

    def _check(self) -> None:
        """raises what a job before raised, of which whatever comes next would be a mere consequence"""
        if self._error is not None:
            raise self._error

    def _leave(self, request: int) -> None:
        self._core.receive(Left(request))
        self._requests.pop(request, None)

    def _retain(self, kept: Retained) -> None:
        self._core.receive(kept)
        self._tell(Arrived(kept.epoch))

    def _lead(self, leads: Leads) -> list[Lead]:
        """Matchers at their anchors, which are about to walk ahead."""
        self._check()
        with self.counters.phase("barrier"):
            self._tell(leads)
        return [
            Lead(self._requests[name], self._stops, self._free, self._budget_s) for name in leads.requests
        ]

    def _tell(self, msg: Arrived | Barrier | Leads) -> None:
        """Advances over what is owed, where anything is."""
        for effect in self._core.receive(msg):
            assert isinstance(effect, Reply)
            self._requests[effect.slot].advance(effect.value, self._budget_s)

    def _make(self, wish: Wish, guide: DraftMasks | None) -> Made:
        """The masks of a step; those of its drafts are there where a guide made them."""
        self._check()
        phase = self.counters.phase
        if guide is not None:
            guide.come_back()
            self._core.receive(Returned(guide.epoch))
        with phase("draft_d2h"):
            drafts = wish.drafts()
        with phase("barrier"):
            self._core.receive(Began(wish.epoch, wish.requests, wish.anchors))
            self._tell(Barrier(wish.epoch))
        requests = [self._requests[request] for request in wish.requests]
        with phase("traverse"):
            walked = self._walked(wish, requests, drafts[wish.places], guide)
        self._core.receive(Traversed(wish.epoch))
        made = self._settle(wish, requests, walked)
        with phase("mask_h2d"):
            self.buffers.send(wish.mask_slot, len(walked.kinds))
        self.counters.made(walked, made.failed)
        return made

    def _walked(
        self,
        wish: Wish,
        requests: Sequence[Constrained],
        drafts: npt.NDArray[np.int64],
        guide: DraftMasks | None,
    ) -> Walked:
        """Masks of all rows, in the step's slot; drafts int64 [m, gamma + 1] of those that verify some."""
        out, widths = self.buffers.host[wish.mask_slot], wish.widths
        done = 0 if guide is None else len(guide.leads)
        kinds = np.zeros(0, np.uint8) if guide is None else guide.rows(drafts, widths[:done], out)
        if guide is not None and done == len(requests):
            return Walked(out[: len(kinds)], kinds, *guide.faults)
        ids = [np.zeros(width, np.int32) for width in widths[done:].tolist()]
        for own, draft in zip(ids, drafts[done:], strict=False):
            own[:] = draft[: own.size]
        rest = traverse(self._batch, requests[done:], ids, out[len(kinds) :])
        late, failed = ((), ()) if guide is None else guide.faults
        return Walked(
            out[: len(kinds) + len(rest.kinds)],
            np.concatenate([kinds, rest.kinds]),
            (*late, *(done + n for n in rest.late)),
            (*failed, *((done + n, text) for n, text in rest.failed)),
        )

    def _settle(self, wish: Wish, requests: Sequence[Constrained], walked: Walked) -> Made:
        """What the kinds of rows mean; rows of groups that fail allow nothing."""
        lengths, most, first = np.array(wish.anchors, np.int64), wish.widths.copy(), 0
        kinds = walked.kinds.tobytes()
        failed = dict(walked.failed)
        for number in walked.late:
            failed[number] = str(too_slow(int(wish.widths[number]), self._budget_s, self._budget_s))
        for number, (request, width) in enumerate(zip(requests, wish.widths.tolist(), strict=True)):
            rows, first = slice(first, first + width), first + width
            if request.fault:
                failed[number] = request.fault
            elif request.matcher.terminated:
                lengths[number], most[number] = OVER, 0
            elif ENDED in kinds[rows]:
                most[number] = kinds[rows].index(ENDED)
            if request.thinking:
                walked.bitmask[rows][walked.kinds[rows] == FREE] = self._free
            if number in failed:
                walked.bitmask[rows] = 0
        return Made(lengths, most, failed)
