"""The simulated device of a rank: reads and writes through page tables, takes its time, breaks when told to.

Its tokens are those of chain.py, as far as the rank leads it to the right pages. Whatever doesn't fit
together is a violation, not an error of the device: the machine under test must not be able to hide it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import anyio
import numpy as np

from engine.actors.device import StepRunner, check_room
from engine.config import PAGE_TOKENS
from engine.errors import DeviceFailed
from engine.messages import RunStep, SlotBind, StepDone
from engine.sim.chain import FAILS, START, WINDOW, Rules, following, followings, sampled
from engine.sim.clock import Agenda

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

    wrong  is told what doesn't fit: id of the invariant, text
    """

    def __init__(self, rules: Rules, wrong: Callable[[str, str], None]) -> None:
        self.rules = rules
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
        return self._rows(job)

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

    def _rows(self, job: RunStep) -> StepDone:
        columns = (job.slots, job.generations, job.starts, job.counts)
        rows = list(zip(*[np.frombuffer(column, np.int32).tolist() for column in columns], strict=True))
        fed = np.frombuffer(job.tokens, np.int32).tolist()
        if len({row[0] for row in rows}) != len(rows) or len(fed) != sum(row[3] for row in rows):
            self._wrong("I12", f"step {job.epoch}: {len(fed)} tokens for rows {rows}")
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

    def _slot(self, epoch: int, slot: int, generation: int, start: int) -> Slot:
        state = self.slots[slot]
        if state.bind.generation != generation:
            self._wrong("I5", f"step {epoch} reads slot {slot} under generation {generation}")
        if state.length != start:
            self._wrong("I10", f"step {epoch}: slot {slot} starts at {start}, {state.length} are computed")
        return state

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


class VirtualDevice:
    """Carries jobs out in virtual time, two at most, one after the other.

    step_s   seconds that the next step takes
    load_s   seconds that loading takes
    stall_s  seconds that the next step takes longer, once
    breaks   the next step ends the device with an error
    dead     its process is gone
    """

    def __init__(
        self,
        make: Callable[[], StepRunner],
        deliver: Callable[[StepDone], None],
        agenda: Agenda,
        step_s: Callable[[], float],
        load_s: float,
    ) -> None:
        self.stall_s = 0.0
        self.breaks = False
        self.dead = False
        self.in_flight = 0
        self._make = make
        self._deliver = deliver
        self._agenda = agenda
        self._step_s = step_s
        self._load_s = load_s
        self._made = anyio.Event()
        self._runner: StepRunner | None = None
        self._free_at_s = 0.0
        self._error: Exception | None = None
        self._ended = anyio.Event()

    def submit(self, job: RunStep) -> None:
        """As Device.submit."""
        check_room(job, self.in_flight)
        self.in_flight += 1
        self._free_at_s = max(self._free_at_s, self._agenda.now_s()) + self._step_s() + self.stall_s
        self.stall_s = 0.0
        self._agenda.at(self._free_at_s, lambda: self._finish(job))

    async def runner(self) -> StepRunner:
        """As Device.runner."""
        await self._made.wait()
        assert self._runner is not None
        return self._runner

    async def run(self, stop_within_s: float) -> None:
        """As Device.run."""
        await anyio.sleep(self._load_s)
        self._runner = self._make()
        self._made.set()
        await self._ended.wait()
        raise DeviceFailed(f"the device ended: {self._error!r}") from self._error

    def _finish(self, job: RunStep) -> None:
        assert self._runner is not None
        if self._error is not None or self.dead:
            return
        if self.breaks:
            self._error = DeviceFailed(f"an illegal address was encountered in step {job.epoch}")
            self._ended.set()
            return
        self.in_flight -= 1
        self._deliver(self._runner.execute(job))
