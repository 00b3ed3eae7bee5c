"""The model of a simulated rank: reads and writes through page tables.

Its tokens are those of chain.py, as far as the rank leads it to the right pages. Whatever doesn't fit
together is a violation, not an error of the device: the machine under test must not be able to hide it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from engine.actors.batches import RELAY
from engine.config import PAGE_TOKENS
from engine.messages import RunStep, SlotBind, StepDone
from engine.sim.chain import FAILS, START, WINDOW, Rules, following, followings, sampled
from engine.sim.drafting import Drafter, Layout

POISON = -7
"""Token of a cell that was never written since its page changed hands."""

VECTOR_FROM = 12
"""Positions of a row from which on numpy is the faster way."""


@dataclass(slots=True)
class Slot:
    """What the device knows of one slot; `full` and `window` are page ids by logical page."""

    bind: SlotBind
    length: int = 0
    relay: int = -1
    full: dict[int, int] = field(default_factory=dict)
    window: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class Page:
    """One physical page: who wrote it (slot, generation), its tokens and its numbers."""

    owner: tuple[int, int] = (0, 0)
    tokens: list[int] = field(default_factory=lambda: [POISON] * PAGE_TOKENS)
    numbers: list[int] = field(default_factory=lambda: [0] * PAGE_TOKENS)


class PagedModel:
    """Runs steps in order.

    wrong    is told what doesn't fit: id of the invariant, text
    drafter  None: it doesn't speculate
    """

    def __init__(
        self, rules: Rules, wrong: Callable[[str, str], None], drafter: Drafter | None = None
    ) -> None:
        self.rules = rules
        self.drafter = drafter
        self.slots: dict[int, Slot] = {}
        self.full: dict[int, Page] = {}
        self.window: dict[int, Page] = {}
        self.steps = 0
        self.failed_rows = 0
        self._wrong = wrong

    def execute(self, job: RunStep) -> StepDone:
        """The results of one step."""
        self.steps += 1
        for bind in job.binds:
            before = self.slots.get(bind.slot)
            if before is not None and before.bind.generation >= bind.generation:
                self._wrong("I5", f"slot {bind.slot} is bound again under generation {bind.generation}")
            self.slots[bind.slot] = Slot(bind)
        self._map(job)
        return self._round(job) if job.verify else self._rows(job)

    def _map(self, job: RunStep) -> None:
        """New page table entries; a page that changes hands loses its content."""
        entries = np.frombuffer(job.pages, np.int32).reshape(-1, 4).tolist() if job.pages else ()
        for slot, logical, full, window in entries:
            state = self.slots[slot]
            owner = (slot, state.bind.generation)
            if full <= 0 or window <= 0:
                self._wrong("I10", f"slot {slot} is given the reserved page 0")
            self.full[full], self.window[window] = Page(owner), Page(owner)
            state.full[logical], state.window[logical] = full, window

    def _columns(self, job: RunStep) -> list[tuple[int, int, int, int]]:
        """(slot, generation, start, count) of each row group."""
        columns = (job.slots, job.generations, job.starts, job.counts)
        rows = list(zip(*[np.frombuffer(column, np.int32).tolist() for column in columns], strict=True))
        fed = len(job.tokens) // 4
        if len({row[0] for row in rows}) != len(rows) or fed != sum(row[3] for row in rows):
            self._wrong("I12", f"step {job.epoch}: {fed} tokens for rows {rows}")
        return rows

    def _rows(self, job: RunStep) -> StepDone:
        rows = self._columns(job)
        fed = np.frombuffer(job.tokens, np.int32).tolist()
        counts, tokens, failed = bytearray(), [], []
        at = 0
        for place, (slot, generation, start, count) in enumerate(rows):
            state = self._slot(job.epoch, slot, generation, start)
            number = self._feed(state, fed[at : at + count])
            at += count
            token = -1
            if job.samples[place]:
                how = state.bind.sampling
                token = sampled(number, how.seed, state.bind.child, self.rules)
            counts.append(token >= 0)
            if token >= 0:
                tokens.append(token)
            elif token == FAILS:
                failed.append((place, "no token has a probability"))
                self.failed_rows += 1
            # After a failed row a step that is queued already runs on, in vain.
            state.relay = max(token, 0)
        return StepDone(job.epoch, bytes(counts), np.array(tokens, np.int32).tobytes(), tuple(failed))

    def _slot(self, epoch: int, slot: int, generation: int, start: int, most: int = 0) -> Slot:
        """The slot of a row. With `most` rows to verify `start` is an upper bound: the step before might have
        accepted all.
        """
        state = self.slots[slot]
        if state.bind.generation != generation:
            self._wrong("I5", f"step {epoch} reads slot {slot} under generation {generation}")
        loose = self.drafter.block if most and self.drafter is not None else 0
        if not state.length <= start <= state.length + loose:
            self._wrong("I10", f"step {epoch}: slot {slot} starts at {start}, {state.length} are computed")
        return state

    def _follows(self, state: Slot, tokens: list[int]) -> int:
        """Computes these positions; returns the token that follows them, or FAILS."""
        how = state.bind.sampling
        return sampled(self._feed(state, tokens), how.seed, state.bind.child, self.rules)

    def _round(self, job: RunStep) -> StepDone:
        """A step that may verify drafts."""
        assert self.drafter is not None
        rows = self._columns(job)
        fed = np.frombuffer(job.tokens, np.int32).tolist()
        states = [self._slot(job.epoch, *row[:3], most) for row, most in zip(rows, job.verify, strict=True)]
        caps = [
            max(0, min(most, state.bind.ends_at - state.length - 1))
            for state, most in zip(states, job.verify, strict=True)
        ]
        layout = self.drafter.layout(job, caps)
        runs: list[list[int]] = []
        for place, (state, row) in enumerate(zip(states, rows, strict=True)):
            given, fed = fed[: row[3]], fed[row[3] :]
            if not job.verify[place]:
                token = self._follows(state, given)
                runs.append([token] if job.samples[place] else [])
            else:
                runs.append(self._verified(state, given[0], layout.rows[place], layout.limits[place]))
            state.relay = max(runs[-1][-1], 0) if runs[-1] else state.relay
        return self._done(job, states, runs, layout)

    def _verified(self, state: Slot, anchor: int, rows: int, limit: int) -> list[int]:
        """Tokens of one request's round; its length grows by as many."""
        assert self.drafter is not None
        if anchor not in (RELAY, state.relay):
            self._wrong("I13", f"slot {state.bind.slot} is fed {anchor} behind {state.relay}")
        start = state.length
        tokens = self.drafter.run(lambda token: self._follows(state, [token]), state.relay, rows, limit)
        state.length = start + len(tokens)
        return tokens

    def _done(self, job: RunStep, states: list[Slot], runs: list[list[int]], layout: Layout) -> StepDone:
        failed = [place for place, run in enumerate(runs) if run == [FAILS]]
        self.failed_rows += len(failed)
        tokens = [token for run in runs for token in run if token != FAILS]
        return StepDone(
            job.epoch,
            bytes([0 if run == [FAILS] else len(run) for run in runs]),
            np.array(tokens, np.int32).tobytes(),
            tuple((place, "no token has a probability") for place in failed),
            seconds=0.02,
            verified=bytes(layout.rows),
            survival=b"" if layout.survival is None else layout.survival.tobytes(),
            lengths=np.array([state.length for state in states], np.int32).tobytes(),
            phases=(0.0 if layout.survival is None else 0.002, 0.017, 0.001),
        )

    def _feed(self, state: Slot, tokens: list[int]) -> int:
        """Computes these positions; returns the last one's number."""
        start = state.length
        end = start + len(tokens)
        if tokens[0] < 0:
            tokens = [state.relay, *tokens[1:]]
        if min(tokens) < 0:
            self._wrong("I6", f"slot {state.bind.slot} is fed {min(tokens)} at {start}")
        before = self._number_before(state, start)
        self._write(state, start, tokens)
        first = start - WINDOW + 1
        leaving = [-1] * min(max(-first, 0), len(tokens))
        leaving += self._tokens(state, state.window, self.window, max(first, 0), max(end - WINDOW + 1, 0))
        behind = self._tokens(state, state.full, self.full, start // 2, (end - 1) // 2 + 1)
        far = [behind[at // 2 - start // 2] if at else -1 for at in range(start, end)]
        if len(tokens) < VECTOR_FROM:
            numbers = []
            for token, left, back in zip(tokens, leaving, far, strict=True):
                before = following(before, token, left, back)
                numbers.append(before)
        else:
            numbers = followings(before, tokens, leaving, far)
        for at, number in enumerate(numbers, start):
            self.full[state.full[at // PAGE_TOKENS]].numbers[at % PAGE_TOKENS] = number
        state.length = end
        return numbers[-1]

    def _number_before(self, state: Slot, start: int) -> int:
        if not start:
            return START
        at = start - 1
        return self._page(state, state.full, self.full, at // PAGE_TOKENS).numbers[at % PAGE_TOKENS]

    def _page(self, state: Slot, table: dict[int, int], pool: dict[int, Page], logical: int) -> Page:
        page = pool.get(table.get(logical, -1))
        owner = (state.bind.slot, state.bind.generation)
        if page is None or page.owner != owner:
            self._wrong("I5", f"slot {owner[0]} reads logical page {logical}, which isn't its own any more")
            return Page()
        return page

    def _write(self, state: Slot, start: int, tokens: list[int]) -> None:
        end = start + len(tokens)
        for logical in range(start // PAGE_TOKENS, (end - 1) // PAGE_TOKENS + 1):
            low, high = max(start, logical * PAGE_TOKENS), min(end, (logical + 1) * PAGE_TOKENS)
            part = tokens[low - start : high - start]
            base = low - logical * PAGE_TOKENS
            for table, pool in ((state.full, self.full), (state.window, self.window)):
                self._page(state, table, pool, logical).tokens[base : base + len(part)] = part

    def _tokens(
        self, state: Slot, table: dict[int, int], pool: dict[int, Page], start: int, end: int
    ) -> list[int]:
        """Tokens at positions start..end-1, as the pages have them."""
        found: list[int] = []
        while start < end:
            logical = start // PAGE_TOKENS
            stop = min(end, (logical + 1) * PAGE_TOKENS)
            page = self._page(state, table, pool, logical)
            found += page.tokens[start - logical * PAGE_TOKENS : stop - logical * PAGE_TOKENS]
            start = stop
        return found
