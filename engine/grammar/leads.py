"""A matcher that walks ahead along a draft, and comes back.

A draft is made token by token, and what may follow a token depends on it. So the rows of a draft are masked
one at a time, while it is made: `traverse_draft_tree` wants all tokens at once. Filling and accepting by
single calls gives the same masks. Whoever drafts what the grammar allows loses no row to it, and a token that
is the only one allowed is as good as accepted.
"""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from engine.errors import GrammarDiverged
from engine.grammar.matchers import DEAD, ENDED, FREE, MASKED, Masks, allows
from engine.grammar.pipeline_request import Constrained

ANCHOR = -1
"""In place of a token: the row behind the last verified one, where the matcher stands."""


class Lead:
    """One constrained request's walk in one step. One thread at a time.

    fault  why the library refused a row; empty: it didn't
    late   its rows took longer than its budget, and not for the first time
    """

    __slots__ = ("_begun", "_budget_s", "_free", "_over", "_row", "_spent_s", "_stops", "_walked", "fault",
                 "late", "request")  # fmt: skip

    def __init__(
        self, request: Constrained, stops: frozenset[int], free: NDArray[np.int32], budget_s: float
    ) -> None:
        """stops, free  tokens that end a grammar, and the mask of all others; budget_s  of processor time."""
        self.request, self.fault, self.late = request, "", False
        self._stops, self._free, self._budget_s = stops, free, budget_s
        self._begun = not request.thinking
        self._over = bool(request.fault) or request.matcher.terminated
        self._row, self._walked, self._spent_s = -1, 0, 0.0

    def follow(self, token: int, masks: Masks, row: int) -> int:
        """Writes the mask of what may follow `token` to masks[row]; returns its kind, see matchers.FREE.

        masks  int32 [rows, words], C-contiguous, that of the token before included
        """
        if self.request.matcher.terminated and token == ANCHOR:
            kind = ENDED
        elif self._over:
            kind = DEAD
        elif not self._begun:
            self._begun = self.request.ends_thinking(token)
            kind = self._filled(ANCHOR, masks, row) if self._begun else FREE
        else:
            kind = self._behind(token, masks, row)
        if kind != MASKED:
            masks[row] = self._free if kind == FREE else -1
        self._over = self._over or kind in (DEAD, ENDED)
        self._row = row
        return kind

    def come_back(self) -> None:
        """The matcher stands where it stood."""
        self.request.matcher.back(self._walked)
        self._walked = 0

    def _behind(self, token: int, masks: Masks, row: int) -> int:
        if token != ANCHOR:
            if not allows(masks, self._row, token, self.request.matcher.limit):
                return DEAD
            if token in self._stops:
                return ENDED
        return self._filled(token, masks, row)

    def _filled(self, token: int, masks: Masks, row: int) -> int:
        matcher, began_s = self.request.matcher, time.thread_time()
        try:
            if token != ANCHOR:
                matcher.step(token)
                self._walked += 1
            matcher.fill(masks, row)
        except (RuntimeError, GrammarDiverged) as error:
            self.fault = str(error).rpartition("\n")[2][:200] or "the grammar library refused a row"
            return DEAD
        self._spent_s += time.thread_time() - began_s
        if self._spent_s > self._budget_s:
            self.late, self._spent_s = self.request.overruns(), 0.0
        return DEAD if self.late else MASKED
