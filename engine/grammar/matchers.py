"""Which tokens a grammar allows at each drafted row: one batched traversal over the constrained requests.

The library has the traversal of one request; here it is called for one request after the other. The masks
cost the time, the loop does not. Filling, accepting and rolling back by single calls gives the same masks in
1.2 to 1.4 times the time at 1, 4, 32 and 64 requests of six rows, in about the same where masks are dear (in
free strings); it has neither a time limit nor a matcher that is as before whatever happens.

A chain of v rows belongs to a request: row 0 is the anchor, the token that was verified last and that the
matcher has accepted; rows 1 to v-1 are drafts. The mask of row i is what may follow its token.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.errors import GrammarDiverged, ShapeMismatch

Masks = NDArray[np.int32]

MOST_NODES = 64
"""Rows of one chain; the library's own recursion would overflow the stack at some 100,000."""

PATIENCE = 20
"""How much longer than its budget of processor time a chain may take on the clock."""

FREE, MASKED, ENDED, DEAD = range(4)
"""What a row's mask means: before the grammar's root, any token may come; the mask holds; the row's token
ended the grammar, nothing may come; an illegal or an ending token stands before it, or is its own.

Only MASKED rows restrict anything. All bits of the others are set: a row of zeros makes NaN of logits.
"""


def allows(masks: Masks, row: int, token: int, vocab_size: int) -> bool:
    """Whether a row of masks, int32 [rows, words], lets a token through; no token of the vocabulary: no."""
    return 0 <= token < vocab_size and bool(masks.item(row, token >> 5) >> (token & 31) & 1)


class Matcher:
    """Where one request stands in its grammar. One thread at a time.

    generation  grows with each advance: who read the state before and after sees whether it moved
    tokens      accepted so far, the ending one included
    terminated  the grammar has ended; nothing is accepted any more
    """

    __slots__ = ("generation", "handle", "limit", "terminated", "tokens")

    def __init__(self, compiled: Any, vocab_size: int) -> None:
        """compiled  the library's CompiledGrammar; it may be shared by any number of matchers."""
        from xgrammar import GrammarMatcher  # Late: it brings torch, which a compile worker does without.

        self.handle: Any = GrammarMatcher(compiled)._handle
        self.limit = vocab_size
        self.generation = 0
        self.tokens = 0
        self.terminated = False

    def advance(self, tokens: Sequence[int]) -> tuple[int, bool]:
        """Accepts verified tokens, once each (I1). Returns how many are kept, and whether the grammar ended.

        The token that ends the grammar is kept; those behind it are not, and must leave KV and output (I6).

        raises  GrammarDiverged for a token that the grammar doesn't allow; the matcher is as before
        """
        kept = 0
        for token in tokens:
            if self.terminated:
                break
            if not (0 <= token < self.limit and self.handle.accept_token(int(token), False)):
                if kept:
                    self.handle.rollback(kept)
                    self.tokens -= kept
                raise GrammarDiverged(
                    f"token {token}, number {self.tokens + kept} of the output, is not allowed"
                )
            kept += 1
            self.tokens += 1
            self.terminated = bool(self.handle.is_terminated())
        self.generation += kept > 0
        return kept, self.terminated

    def fill(self, masks: Masks, row: int) -> None:
        """Writes what may come next to a row of masks, int32 [rows, words], C-contiguous.

        raises  RuntimeError where the library refuses, as behind the end of the grammar
        """
        if not self.handle.fill_next_token_bitmask(masks, row, False):
            masks[row] = -1

    def step(self, token: int) -> None:
        """Walks over a token that isn't verified; `back` undoes it. raises GrammarDiverged"""
        if not self.handle.accept_token(token, False):
            raise GrammarDiverged(f"token {token}, which the mask allows, is refused")

    def back(self, tokens: int) -> None:
        """Walks back over so many tokens."""
        if tokens:
            self.handle.rollback(tokens)


class Chain(NamedTuple):
    """The rows of one request.

    ids   int32[v], 1 <= v <= 64: the token of each row; the anchor's is not looked at
    root  the row at which the grammar begins, 0 as a rule; later where the rows before it are free text, as
          with a reasoning that ends inside the drafts. The matcher stands at this row. v: all rows are free
    """

    matcher: Matcher
    ids: NDArray[np.int32]
    root: int = 0


class Traversed(NamedTuple):
    """What a traversal found, rows of all chains one behind the other.

    bitmask  int32[rows, ceil(V/32)], bit t % 32 of word t // 32 is token t; a view that the next call reuses
    kinds    uint8[rows], see FREE
    late     chains that took longer than their budget; their rows are DEAD and their requests fail
    failed   (chain, text) of those that the library refused
    """

    bitmask: Masks
    kinds: NDArray[np.uint8]
    late: tuple[int, ...]
    failed: tuple[tuple[int, str], ...]


class MatcherBatch:
    """Traverses the chains of a step.

    rows      most rows of all chains
    budget_s  what one chain may take of its thread's processor time: a thread that others push aside is no
              reason to fail a request. The library looks at the clock between rows alone, so a single slow
              token overruns it and is noticed afterwards. A chain that isn't done within PATIENCE times as
              long on the clock is late, too
    """

    def __init__(self, vocab_size: int, stop_ids: Collection[int], rows: int, budget_s: float = 0.05) -> None:
        self.vocab_size = vocab_size
        self.words = -(-vocab_size // 32)
        self.budget_s = budget_s
        self._own = np.empty((rows, self.words), np.int32)
        self._tokens = np.empty(MOST_NODES, np.int64)
        self._stops = frozenset(stop_ids)
        self._next = [np.array([*range(1, n), -1], np.int64) for n in range(1, MOST_NODES + 1)]
        self._alone = [np.full(n, -1, np.int64) for n in range(1, MOST_NODES + 1)]

    def traverse(self, chains: Sequence[Chain], out: Masks | None = None) -> Traversed:
        """The masks of all rows. Matchers are left where they were.

        out     int32[most rows, words], C-contiguous host memory to write to; the batch's own by default
        raises  ShapeMismatch for a chain or an `out` of another form
        """
        total = sum([len(chain.ids) for chain in chains])
        masks = self._checked(chains, total, out)
        kinds = np.full(total, MASKED, np.uint8)
        late: list[int] = []
        failed: list[tuple[int, str]] = []
        end = 0
        for number, chain in enumerate(chains):
            at, end = end, end + len(chain.ids)
            root = at + chain.root
            if root > at:
                kinds[at:root] = FREE
                masks[at:root] = -1
            if root == end:
                continue
            fault = self._walk(chain, masks[root:end], kinds[root:end])
            if fault is not None:
                kinds[root:end] = DEAD
                masks[root:end] = -1
                if fault:
                    failed.append((number, fault))
                else:
                    late.append(number)
        return Traversed(masks, kinds, tuple(late), tuple(failed))

    def _checked(self, chains: Sequence[Chain], total: int, out: Masks | None) -> Masks:
        """The library ignores strides, so that a view of another layout would give wrong rows silently."""
        masks = self._own if out is None else out
        if total > len(masks):
            raise ShapeMismatch(f"{total} rows find room for {len(masks)}")
        if masks.dtype != np.int32 or masks.ndim != 2 or masks.shape[1] != self.words:
            raise ShapeMismatch(f"masks are {masks.dtype}{masks.shape}, not int32[rows, {self.words}]")
        if not masks.flags.c_contiguous:
            raise ShapeMismatch(f"masks have the strides {masks.strides}; they must be contiguous")
        for chain in chains:
            if chain.ids.ndim != 1 or not 1 <= len(chain.ids) <= MOST_NODES:
                raise ShapeMismatch(f"a chain has the shape {chain.ids.shape}, not [1..{MOST_NODES}]")
            if not 0 <= chain.root <= len(chain.ids):
                raise ShapeMismatch(f"a chain of {len(chain.ids)} rows has its root at {chain.root}")
        return masks[:total]

    def _walk(self, chain: Chain, masks: Masks, kinds: NDArray[np.uint8]) -> str | None:
        """The rows from the root on: None where all went well, empty where it was late, else why not."""
        matcher, nodes = chain.matcher, len(masks)
        if matcher.terminated:
            self._close(0, ENDED, masks, kinds)
            return None
        tokens = self._tokens[:nodes]
        tokens[:] = chain.ids[chain.root :]
        generation = matcher.generation
        try:
            in_time = self._traversed(matcher, tokens, masks)
        except RuntimeError as error:
            return str(error).rpartition("\n")[2][:200] or "the grammar library refused a chain"
        if matcher.generation != generation:
            raise GrammarDiverged(f"a matcher moved from {generation} to {matcher.generation} in a traversal")
        if not in_time:
            return ""
        self._settle(tokens.tolist(), masks, kinds)
        return None

    def _traversed(self, matcher: Matcher, tokens: NDArray[np.int64], masks: Masks) -> bool:
        """Whether the masks are made within the budget.

        The library's limit is on the clock. Where it stops a chain that has had less than its budget of the
        processor, it begins again, with twice the time: it leaves a matcher that it stops as it was.
        """
        nodes, limit_s, ends_s = len(tokens), self.budget_s, time.perf_counter() + PATIENCE * self.budget_s
        while True:
            began_s = time.thread_time()
            done = matcher.handle.traverse_draft_tree(
                self._next[nodes - 1], self._alone[nodes - 1], tokens, masks, limit_s, None
            )
            if time.thread_time() - began_s > self.budget_s:
                return False
            if done or time.perf_counter() >= ends_s:
                return bool(done)
            limit_s *= 2

    def _settle(self, tokens: list[int], masks: Masks, kinds: NDArray[np.uint8]) -> None:
        """Marks rows behind a token that is illegal or ends the grammar: the library doesn't write there."""
        for row in range(1, len(tokens)):
            token = tokens[row]
            if not allows(masks, row - 1, token, self.vocab_size):
                self._close(row, DEAD, masks, kinds)
                return
            if token in self._stops:
                self._close(row, ENDED, masks, kinds)
                return

    @staticmethod
    def _close(row: int, kind: int, masks: Masks, kinds: NDArray[np.uint8]) -> None:
        """From this row on nothing is restricted, and nothing follows."""
        masks[row:] = -1
        kinds[row:] = DEAD
        kinds[row] = kind
