"""What a finished step means: tokens kept, ends found, pages left behind, and the StepOut that tells of it.

The token that ends a request (EOS or a stop token) is emitted and counted, with its finish code; the
detokenizer strips it from the text. A token after the end is dropped, whether it came with the last one or in
a step that was queued before the host knew (I6).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.actors.batches import Batch
from engine.actors.logprob_rows import Kept, kept_logprobs
from engine.actors.requests import End, Gained, Requests, ending
from engine.actors.schedule import Column, Rows
from engine.config import PAGE_TOKENS
from engine.errors import DeviceFailed
from engine.messages import FAILED, GOES_ON, LENGTH, STOP_EOS, STOP_TOKEN, StepDone, StepOut

Tokens = NDArray[np.int32]
Codes = NDArray[np.uint8]
Live = NDArray[np.bool_]


class Results:
    """Commits finished steps to the request table.

    eos_ids        token ids that end a request unless it ignores them
    window_tokens  attention window: how far back a row reads window pages
    cut            requests whose last tokens or verified rows came after their end, by cause; for the metrics
    """

    def __init__(self, requests: Requests, rank: int, eos_ids: tuple[int, ...], window_tokens: int) -> None:
        self.requests = requests
        self.rank = rank
        self.eos_ids = eos_ids
        self.window_tokens = window_tokens
        self.cut = {"grammar_end": 0, "stop": 0, "max_tokens": 0}

    def commit(self, batch: Batch, done: StepDone) -> StepOut | None:
        """Takes in the results of this batch, whose rows aren't in flight with it any more.

        Returns the columns of the rows that gained something, None where none did.
        raises  DeviceFailed where the results don't have the batch's shape, or where the device isn't as far
                as the host
        """
        r, rows = self.requests, batch.rows
        live = r.are("active", rows)
        counts, tokens = _columns(batch, done, live)
        r.in_flight[rows] -= 1
        r.due[rows] -= batch.samples
        r.most_due[rows] -= batch.most
        for place, text in done.failed:
            live[place] = False
            r.end("Fail", int(rows[place]), ending(FAILED, 500, text))
        kept, finish = self._kept(rows, live, counts, tokens, done.ended)
        at = np.flatnonzero(counts)
        firsts = np.cumsum(counts, dtype=np.int64) - counts
        r.fire("Token", rows[at], Gained(tokens, firsts[at], kept.counts[at].astype(np.int64)))
        over = np.flatnonzero(live & (finish != GOES_ON))
        if over.size:
            r.fire("Over", rows[over], End(finish[over]))
            self._note_cut(finish[over[counts[over] > kept.counts[over]]])
        if done.ended and done.verified:
            # The device has dropped what it verified behind the ends of grammars.
            behind = np.frombuffer(done.verified, np.uint8) > counts
            self.cut["grammar_end"] += int(np.count_nonzero(behind & _flags(done.ended)))
        if done.lengths:
            self._settle_lengths(batch, done)
        self._leave_pages_behind(batch)
        out = self._step_out(batch, done, kept, tokens, finish)
        r.settle(rows)
        return out

    def _kept(
        self, rows: Rows, live: Live, counts: Codes, tokens: Tokens, grammars: bytes
    ) -> tuple[Kept, Codes]:
        """What counts of each row's tokens: those up to the first that ends it; and the finish codes.

        grammars  StepDone.ended: the last token of such a row is the last one of its grammar
        """
        finish = np.full(rows.size, GOES_ON, np.uint8)
        if not grammars and tokens.size == np.count_nonzero(counts):
            places = np.flatnonzero(counts)
            finish[places] = self._finish(rows[places], 1, tokens)
            return Kept(rows, live, counts, places, np.ones(tokens.size, np.bool_)), finish
        places = np.repeat(np.arange(rows.size), counts)
        firsts = np.cumsum(counts, dtype=np.int64) - counts
        nth = np.arange(1, tokens.size + 1) - firsts[places]
        codes = self._finish(rows[places], nth, tokens)
        if grammars:
            over = _flags(grammars)
            codes[(firsts + counts - 1)[over]] = STOP_EOS
        kept = counts.copy()
        ends = np.flatnonzero(codes)
        if ends.size:
            ended, first = np.unique(places[ends], return_index=True)
            finish[ended], kept[ended] = codes[ends[first]], nth[ends[first]]
        return Kept(rows, live, kept, places, nth <= kept[places]), finish

    def _finish(self, rows: Rows, nth: Column | int, tokens: Tokens) -> Codes:
        """Finish code of each token, the nth (from 1) that its row gains now; the strongest cause wins: EOS,
        stop token, length.
        """
        r = self.requests
        known = r.known[rows] + nth
        may_stop = known > r.least[rows]
        codes = np.where(known >= r.ends_at[rows], LENGTH, GOES_ON).astype(np.uint8)
        for place in np.flatnonzero(may_stop & (r.has_stops[rows] != 0)).tolist():
            if int(tokens[place]) in r.submit_of(int(rows[place])).sampling.stop_token_ids:
                codes[place] = STOP_TOKEN
        heeds_eos = may_stop & (r.ignores_eos[rows] == 0)
        for eos in self.eos_ids:
            codes[heeds_eos & (tokens == eos)] = STOP_EOS
        return codes

    def _note_cut(self, codes: Codes) -> None:
        by_length = int(np.count_nonzero(codes == LENGTH))
        self.cut["max_tokens"] += by_length
        self.cut["stop"] += codes.size - by_length

    def _settle_lengths(self, batch: Batch, done: StepDone) -> None:
        """How far each row is, now that it is known; the device must say the same of rows that go on."""
        r = self.requests
        at = np.flatnonzero(r.are("active", batch.rows))
        rows, samples = batch.rows[at], batch.samples[at] != 0
        computed = np.where(samples, r.known[rows] - 1, batch.ends[at])
        lengths = np.frombuffer(done.lengths, np.int32)
        if lengths.size != batch.rows.size or not np.array_equal(lengths[at], computed):
            raise DeviceFailed(
                f"epoch {done.epoch}: the device has computed {lengths.tolist()} positions, the host counts "
                f"{computed.tolist()} in the rows {at.tolist()}, which go on"
            )
        most = r.known[rows] - 1 + r.most_due[rows]
        r.planned[rows] = np.where(samples, np.minimum(most, r.ends_at[rows] - 1), r.planned[rows])

    def _leave_pages_behind(self, batch: Batch) -> None:
        """Window pages that no later row reads: the next one of each row is at its end or behind it."""
        r, rows = self.requests, batch.rows
        ends = np.where(batch.samples != 0, r.known[rows] - 1, batch.ends)
        first = np.maximum(ends - self.window_tokens + 1, 0) // PAGE_TOKENS
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
        told = kept.told
        told[echoes] = True
        if not told.any():
            return None
        verified, accepted = (b"", b"") if not done.verified else _drafts(batch, done, told)
        return StepOut(
            epoch=done.epoch,
            rank=self.rank,
            request_ids=r.held.owner[batch.rows[told]].tobytes(),
            counts=kept.counts[told].tobytes(),
            token_ids=tokens[kept.tokens].tobytes(),
            finish=finish[told].tobytes(),
            logprobs=logprobs,
            verified=verified,
            accepted=accepted,
        )


def _flags(column: bytes) -> Live:
    """bool[B] of a column uint8[B]."""
    flags: Live = np.frombuffer(column, np.uint8) != 0
    return flags


def _drafts(batch: Batch, done: StepDone, told: Live) -> tuple[bytes, bytes]:
    """Drafted tokens of the rows that are told of: verified, accepted."""
    columns = []
    for column in (done.verified, done.counts):
        beyond = np.maximum(np.frombuffer(column, np.uint8), 1) - 1
        beyond[batch.decodes :] = 0
        columns.append(beyond[told].tobytes())
    return columns[0], columns[1]


def _columns(batch: Batch, done: StepDone, live: Live) -> tuple[Codes, Tokens]:
    """Counts and tokens of the step, which must be those that the batch asked for.

    A decode row with drafts has at least one token, at most as many as it might verify; none where the
    request had ended before.
    """
    counts = np.frombuffer(done.counts, np.uint8)
    tokens = np.frombuffer(done.token_ids, np.int32)
    most, least = batch.most.copy(), batch.samples.copy()
    failed = [place for place, _ in done.failed]
    most[failed] = least[failed] = 0
    if batch.drafting is not None:
        least[~live] = 0
    if counts.size != most.size or (counts < least).any() or (counts > most).any():
        raise DeviceFailed(
            f"epoch {done.epoch}: counts {counts.tolist()}, but {least.tolist()} to {most.tolist()} tokens "
            f"were to be sampled, with {len(failed)} failed rows"
        )
    if tokens.size != counts.sum():
        raise DeviceFailed(f"epoch {done.epoch}: {tokens.size} tokens for counts {counts.tolist()}")
    return counts, tokens
