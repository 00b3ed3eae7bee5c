"""Scheduling policy as pure functions of values and constants: equal inputs give equal answers on every rank.

Who is served (I16: logical counters only, no ages). Requests stand in one line: first those that were passed
PASS_LIMIT times, then by priority (higher first), then by arrival. The first in line that waits is admitted
next, and nobody behind it is admitted while it doesn't fit. Each admission out of arrival order is a pass
for every earlier arrival that waits; a retraction counts, too. So no request is passed more than PASS_LIMIT
times, whatever arrives later: nobody starves. When pages run out, the last in line gives its pages back; the
first in line never does, so somebody always gets on.

How many are served. Admission sets pages aside for what the running requests are expected to need: the share
`ratio` of what each may still generate. A retraction raises the share, each step lowers it a little.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.config import PAGE_TOKENS

Column = NDArray[np.int64]
Rows = NDArray[np.intp]

PASS_LIMIT = 16
"""Later arrivals that may be admitted before a request, whatever their priority."""

RATIO_ONE = 1024
RATIO_FIRST, RATIO_LEAST, RATIO_RAISE, RATIO_DECAY = 512, 64, 256, 2
"""In 1/1024: share at start, its floor, what a retraction adds, what a step takes off."""

URGENT = 1 << 30
"""Priority of the server's own probe, which stands in no line: it has a place of its own."""

PADDING_LIMIT = 4
"""A prefill graph may run at most so many times the tokens that the fullest rank has."""

IDLE, EXTEND, DECODE, MIXED, STOPPING = range(5)
MODES = ("idle", "extend", "decode", "mixed", "stopping")
"""Forward modes: their codes in the exchange, their names in RunStep."""


def line(passed: Column, priority: Column, arrival: Column) -> Rows:
    """Indices of the requests from first to last in line; columns of equal length, arrivals distinct."""
    return np.lexsort((arrival, -priority, passed < PASS_LIMIT))


def chunk_end(start: int, end: int, room: int, budget: int) -> int:
    """Where the next chunk of a prompt that is computed up to `start` ends; `start`: it must wait a step.

    Chunks that aren't the last end on a page, so that each page is complete when it is left behind.
    room    prompt tokens that this step still has, of `budget` in all
    """
    if end - start <= room:
        return end
    aligned = (start + room) // PAGE_TOKENS * PAGE_TOKENS
    if aligned > start:
        return aligned
    # A budget smaller than the rest of the page can't reach the boundary at all: then any end is right.
    return start + room if room == budget else start


def expected_pages(computed: Column, ends_at: Column, ratio: int) -> Column:
    """Pages that each request will have when it ends, if it uses `ratio`/1024 of what it may still generate.

    computed  tokens that are computed for certain: the prompt, or what lies behind
    ends_at   tokens at its longest; its last token is never computed
    """
    left = np.maximum(ends_at - 1 - computed, 0)
    tokens = computed + -(-left * ratio // RATIO_ONE)
    pages: Column = -(-tokens // PAGE_TOKENS)
    return pages


def can_admit(need: int, expected: int, free: int, reserved: int, alone: bool) -> bool:
    """Whether a request may take its slot now, by the pages of one pool.

    need      pages that it needs at once
    expected  pages that it is expected to need in its life
    reserved  pages set aside for the running requests; alone: there are none
    """
    return free >= need if alone else free - expected >= reserved


def raised(ratio: int) -> int:
    """The share after a retraction."""
    return min(RATIO_ONE, ratio + RATIO_RAISE)


def decayed(ratio: int) -> int:
    """The share after a step."""
    return max(RATIO_LEAST, ratio - RATIO_DECAY)


class Want(NamedTuple):
    """What a rank tells the others about its part of a step: the values of `Peer`, in their order.

    Votes are 1 where the rank has no objection. An idle rank objects to nothing (I9).
    """

    tokens: int = 0
    logit_rows: int = 0
    decode_graph: int = 1
    has_extend: int = 0
    two_batches: int = 1
    mode: int = IDLE
    prefill_graph: int = 1


class Graphs(NamedTuple):
    """Captured sizes in tokens, ascending, equal on every rank; none: every step runs eagerly."""

    decode: tuple[int, ...] = ()
    prefill: tuple[int, ...] = ()
    holds_idle_ranks: bool = False


class Decision(NamedTuple):
    """What all ranks do in a step (I2).

    tokens  of each rank
    bucket  captured size; 0 where the step runs eagerly
    reason  ok, or why no graph: vote, inactive_rank, no_bucket, padding
    """

    tokens: tuple[int, ...]
    extend: bool
    bucket: int
    reason: str

    @property
    def runs(self) -> bool:
        """Whether any rank has tokens; without, the round is over and nobody runs."""
        return any(self.tokens)


def smallest_at_least(size: int, captured: Sequence[int]) -> int:
    """Smallest captured size that holds `size`; 0 where none does."""
    return next((bucket for bucket in captured if bucket >= size), 0)


def decide(wants: Sequence[Want], graphs: Graphs) -> Decision:
    """The step that these wants lead to; a function of exchanged values and constants only."""
    tokens = tuple(want.tokens for want in wants)
    extend = any(want.has_extend for want in wants)
    most = max(tokens)
    captured = graphs.prefill if extend else graphs.decode
    votes = [want.prefill_graph if extend else want.decode_graph for want in wants]
    bucket = smallest_at_least(most, captured)
    if not min(votes):
        reason = "vote"
    elif extend and not all(tokens) and not graphs.holds_idle_ranks:
        reason = "inactive_rank"
    elif not bucket:
        reason = "no_bucket"
    elif extend and bucket > PADDING_LIMIT * most:
        reason = "padding"
    else:
        reason = "ok"
    return Decision(tokens, extend, bucket if reason == "ok" else 0, reason)


def loads(wants: Sequence[Want], speculates: bool = False) -> tuple[tuple[int, int, int], ...]:
    """What RunStep tells the device of each rank: (requests, tokens, rows that need logits).

    A rank that decodes one row a request has as many requests as tokens; otherwise nobody tells: -1.
    """
    return tuple(
        (-1 if want.has_extend or speculates else want.tokens, want.tokens, want.logit_rows) for want in wants
    )


def mode_of(decodes: int, chunks: int) -> int:
    """Forward mode of a batch with so many decode rows and prompt chunks."""
    if chunks:
        return MIXED if decodes else EXTEND
    return DECODE if decodes else IDLE
