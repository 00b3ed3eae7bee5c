"""One constrained request as the grammar thread has it: its matcher, and where its grammar begins."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.errors import GrammarDiverged, GrammarTooSlow
from engine.grammar.matchers import Chain, Masks, Matcher, MatcherBatch, Traversed

FORGETS = 64
"""Tokens after which a request may take longer than its budget once more."""


class Constrained:
    """Used by one thread at a time.

    A budget is of processor time, but where the host of a virtual machine stands still, whoever runs is
    charged for it. So one overrun is no reason to fail a request; a second one soon after it is.

    thinking  its tokens are free, and the grammar begins behind the token that ends the reasoning
    fault     why it can't go on; empty: it can
    """

    __slots__ = ("_overran_at", "_think_end", "fault", "matcher", "thinking")

    def __init__(self, matcher: Matcher, think_end: int | None) -> None:
        """think_end  token behind which the grammar begins; None: it begins with the output."""
        self.matcher = matcher
        self.thinking = think_end is not None
        self.fault = ""
        self._think_end = -1 if think_end is None else think_end
        self._overran_at: int | None = None

    def overruns(self) -> bool:
        """Notes that it took longer than its budget. Returns whether it did so before, in its last tokens."""
        before, self._overran_at = self._overran_at, self.matcher.tokens
        return before is not None and self.matcher.tokens - before < FORGETS

    def advance(self, tokens: Sequence[int], budget_s: float) -> None:
        """Takes verified tokens, once each. What goes wrong is its `fault`, and nobody else's.

        budget_s  of this thread's processor time: what others on the host take is not the grammar's fault
        """
        if self.thinking:
            if self._think_end not in tokens:
                return
            tokens = tokens[tokens.index(self._think_end) + 1 :]
            self.thinking = False
        began_s = time.thread_time()
        try:
            kept, _ = self.matcher.advance(tokens)
        except GrammarDiverged as error:
            self.fault = f"GrammarDiverged: {error}"
            return
        took_s = time.thread_time() - began_s
        if kept < len(tokens):
            self.fault = f"GrammarDiverged: {len(tokens) - kept} tokens came behind the end of the grammar"
        elif took_s > budget_s and self.overruns():
            self.fault = str(too_slow(len(tokens), took_s, budget_s))

    def ends_thinking(self, token: int) -> bool:
        """Whether the grammar begins behind this token."""
        return token == self._think_end

    def chain(self, ids: NDArray[np.int32]) -> Chain:
        """Its rows: anchor and drafts, int32[v]."""
        if not self.thinking:
            return Chain(self.matcher, ids)
        ends = np.flatnonzero(ids[1:] == self._think_end)
        return Chain(self.matcher, ids, int(ends[0]) + 1 if ends.size else len(ids))


def traverse(
    batch: MatcherBatch, requests: Sequence[Constrained], ids: Sequence[NDArray[np.int32]], out: Masks
) -> Traversed:
    """As MatcherBatch.traverse, over the chains of these ids; a request that is forgiven gets another try.

    The others' rows stay as they are: what the first try found of them was right, and took its time.
    """
    chains = [one.chain(own) for one, own in zip(requests, ids, strict=True)]
    found = batch.traverse(chains, out)
    late, failed = list[int](), [*found.failed]
    for number in found.late:
        if requests[number].overruns():
            late.append(number)
            continue
        first = sum(len(own) for own in ids[:number])
        rows = slice(first, first + len(ids[number]))
        again = batch.traverse(chains[number : number + 1], out[rows])
        found.kinds[rows] = again.kinds
        late += [number for _ in again.late]
        failed += [(number, text) for _, text in again.failed]
    return found._replace(late=tuple(late), failed=tuple(failed))


def too_slow(rows: int, took_s: float, budget_s: float) -> GrammarTooSlow:
    """The error of a request whose grammar takes too long."""
    return GrammarTooSlow(
        f"GrammarTooSlow: {rows} tokens of the grammar took {took_s * 1000:.0f} ms of a processor, "
        f"{budget_s * 1000:.0f} ms are allowed"
    )
