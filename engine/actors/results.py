"""What a finished step means: tokens kept, ends found, pages left behind, and the StepOut that tells of it.

The token that ends a request (EOS or a stop token) is emitted and counted, with its finish code; the
detokenizer strips it from the text. A token after the end is dropped: the row was queued before the host knew
(I6).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.actors.batches import Batch
from engine.actors.logprob_rows import Kept, kept_logprobs
from engine.actors.requests import End, Requests, ending
from engine.actors.schedule import Rows
from engine.config import PAGE_TOKENS
from engine.errors import DeviceFailed
from engine.messages import FAILED, GOES_ON, LENGTH, STOP_EOS, STOP_TOKEN, StepDone, StepOut

Tokens = NDArray[np.int32]
Codes = NDArray[np.uint8]


class Results:
    """Commits finished steps to the request table.

    eos_ids        token ids that end a request unless it ignores them
    window_tokens  attention window: how far back a row reads window pages
    """

    def __init__(self, requests: Requests, rank: int, eos_ids: tuple[int, ...], window_tokens: int) -> None:
        self.requests = requests
        self.rank = rank
        self.eos_ids = eos_ids
        self.window_tokens = window_tokens

    def commit(self, batch: Batch, done: StepDone) -> StepOut | None:
        """Takes in the results of this batch, whose rows aren't in flight with it any more.

        Returns the columns of the rows that gained something, None where none did.
        raises  DeviceFailed where the results don't have the batch's shape
        """
        r, rows = self.requests, batch.rows
        counts, tokens = _columns(batch, done)
        r.in_flight[rows] -= 1
        live = r.are("active", rows)
        for place, text in done.failed:
            live[place] = False
            r.end("Fail", int(rows[place]), ending(FAILED, 500, text))
        at = np.flatnonzero(counts)
        r.fire("Token", rows[at], tokens)
        finish = np.full(rows.size, GOES_ON, np.uint8)
        finish[at] = self._finish(rows[at], tokens)
        over = np.flatnonzero(live & (finish != GOES_ON))
        if over.size:
            r.fire("Over", rows[over], End(finish[over]))
        self._leave_pages_behind(batch)
        out = self._step_out(batch, done, Kept(rows, live, counts), tokens, finish)
        r.settle(rows)
        return out

    def _finish(self, rows: Rows, tokens: Tokens) -> Codes:
        """Finish code of each sampled row; the strongest cause wins: EOS, stop token, length."""
        r = self.requests
        may_stop = r.known[rows] > r.least[rows]
        codes = np.where(r.known[rows] >= r.ends_at[rows], LENGTH, GOES_ON).astype(np.uint8)
        for place in np.flatnonzero(may_stop & (r.has_stops[rows] != 0)).tolist():
            if int(tokens[place]) in r.submit_of(int(rows[place])).sampling.stop_token_ids:
                codes[place] = STOP_TOKEN
        heeds_eos = may_stop & (r.ignores_eos[rows] == 0)
        for eos in self.eos_ids:
            codes[heeds_eos & (tokens == eos)] = STOP_EOS
        return codes

    def _leave_pages_behind(self, batch: Batch) -> None:
        """Window pages that no later row reads: the next one of each row is at its end or behind it."""
        r, rows = self.requests, batch.rows
        first = np.maximum(batch.ends - self.window_tokens + 1, 0) // PAGE_TOKENS
        moved = np.flatnonzero((first > r.held.window_first[rows]) & r.are("active", rows))
        for place in moved.tolist():
            r.held.leave_behind(int(rows[place]), int(first[place]))

    def _step_out(
        self, batch: Batch, done: StepDone, kept: Kept, tokens: Tokens, finish: Codes
    ) -> StepOut | None:
        r = self.requests
        logprobs, echoes = (
            (None, np.zeros(0, np.intp)) if done.logprobs is None else kept_logprobs(done.logprobs, kept, r)
        )
        told = kept.live & (kept.counts > 0)
        told[echoes] = True
        if not told.any():
            return None
        sampled = np.flatnonzero(kept.counts)
        return StepOut(
            epoch=done.epoch,
            rank=self.rank,
            request_ids=r.held.owner[batch.rows[told]].tobytes(),
            counts=kept.counts[told].tobytes(),
            token_ids=tokens[kept.live[sampled]].tobytes(),
            finish=finish[told].tobytes(),
            logprobs=logprobs,
        )


def _columns(batch: Batch, done: StepDone) -> tuple[Codes, Tokens]:
    """Counts and tokens of the step, which must be those that the batch asked for."""
    counts = np.frombuffer(done.counts, np.uint8)
    tokens = np.frombuffer(done.token_ids, np.int32)
    expected = batch.samples.copy()
    expected[[place for place, _ in done.failed]] = 0
    if not np.array_equal(counts, expected) or tokens.size != counts.sum():
        raise DeviceFailed(
            f"epoch {done.epoch}: counts {counts.tolist()}, {tokens.size} tokens, {len(done.failed)} failed "
            f"rows, but {batch.samples.tolist()} were to be sampled"
        )
    return counts, tokens
