"""Who rides in the next step: decode rows with their pages, prompt chunks, admissions, retractions.

A plan may be made while the step before it runs. Rows that end in that step ride in vain, and their results
are dropped when they come. How far a row with drafts in flight has come is known only within bounds: it rides
if it may still gain a token at its least, and has pages for its most. A request whose pages others need is
left out of the plan first and retracted by a later one, when no step in flight reads them (I5).

The server's own probe has a slot and a page that nobody else gets, and rides beside the tokens that a step
may have: it waits for no request, and takes nothing from one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.actors.batches import Batch, Riders, assemble, no_riders
from engine.actors.requests import Requests, ending
from engine.actors.schedule import (
    RATIO_FIRST,
    Column,
    Graphs,
    Rows,
    can_admit,
    chunk_end,
    decayed,
    expected_pages,
    line,
    raised,
)
from engine.actors.speculation import Drafts, Speculation
from engine.config import PAGE_TOKENS
from engine.errors import RequestTooLong
from engine.memory.pages import pages_for
from engine.messages import FAILED

DECODE_WINDOW_PAGES = 2
"""Window pages that a decoding request holds at most: a window of one page or less touches two pages."""


class Planner:
    """Forms batches from the request table.

    chunk_tokens  prompt tokens of one step, at most
    drafts, width decides what is drafted, None: nothing is; rows of one request in a step, at most
    ratio         share of what running requests may still generate that admission sets aside, in 1/1024
    retracted     requests, their prompt tokens, their output tokens, since the start
    """

    def __init__(
        self, requests: Requests, chunk_tokens: int, graphs: Graphs, speculation: Speculation | None = None
    ) -> None:
        self.requests = requests
        self.drafts = None if speculation is None else Drafts(speculation, requests)
        self.held = requests.held
        self.chunk_tokens = chunk_tokens
        self.width = 1 if speculation is None else speculation.block + 1
        self.graphs = graphs
        self.ratio = RATIO_FIRST
        self.retracted = [0, 0, 0]

    def next_batch(self, epoch: int) -> Batch | None:
        """The batch of this epoch; None where nothing can run before a step in flight ends.

        With nothing in flight, None means that no request is left.
        """
        while True:
            riders = no_riders()
            leaving = self._decode(riders)
            self._prefill(riders, leaving)
            self._probe(riders)
            if not riders.empty:
                self.ratio = decayed(self.ratio)
                if self.drafts is not None:
                    self.drafts.schedule(epoch, riders)
                return assemble(self.requests, epoch, riders, self.graphs)
            if not self._unblock():
                return None

    def snapshot(self) -> tuple[Any, ...]:
        """What changes, for the search."""
        return self.ratio, tuple(self.retracted), None if self.drafts is None else self.drafts.snapshot()

    def restore(self, taken: tuple[Any, ...]) -> None:
        """Back to a snapshot."""
        self.ratio, self.retracted = taken[0], list(taken[1])
        if self.drafts is not None:
            self.drafts.restore(taken[2])

    def _in_line(self, rows: Rows) -> Rows:
        r = self.requests
        ordered: Rows = rows[line(r.passed[rows], r.priority[rows], r.arrival[rows])]
        return ordered

    # -- decode rows ---------------------------------------------------------------------------

    def _decode(self, riders: Riders) -> set[int]:
        """Every request that may gain a token and has, or gets, a page for it; returns who must leave."""
        r, held = self.requests, self.held
        active = r.clients("active")
        left = r.ends_at[active] - r.known[active] - r.due[active]
        rides = (r.planned[active] >= r.feed_to[active]) & (left > 0)
        rows = active[rides]
        riders.decodes, riders.caps = rows, np.minimum(left[rides], self.width)
        until = np.minimum(r.planned[rows] + riders.caps, r.ends_at[rows] - 1)
        mapped = held.mapped[rows] * PAGE_TOKENS
        short = until > mapped
        if not short.any():
            return set()
        # Whoever may yet turn out to have room takes a free page, but nobody leaves for it.
        must = rows[r.known[rows] + r.due[rows] > mapped]
        leaving = self._make_room(active, set(must.tolist()))
        may = np.setdiff1d(rows[short], must)
        for row in [*self._in_line(must).tolist(), *self._in_line(may).tolist()]:
            if row not in leaving and held.free_pages():
                riders.entries += held.take_pages(row, 1)
        mapped = held.mapped[rows] * PAGE_TOKENS
        caps = np.where(until > mapped, np.minimum(riders.caps, mapped - r.planned[rows]), riders.caps)
        stays = caps > 0
        if leaving:
            stays &= ~np.isin(rows, list(leaving))
        riders.decodes, riders.caps = rows[stays], caps[stays]
        return leaving

    def _make_room(self, active: Rows, lacking: set[int]) -> set[int]:
        """Who must leave, last in line first, so that the lacking rows that stay have a page each.

        Pages that come back when a step in flight ends count, so that nobody leaves in vain.
        """
        r = self.requests
        coming = r.clients("ending").tolist()
        full = self.held.full.free + sum(len(self.held.full_pages[row]) for row in coming)
        window = self.held.window.free + sum(len(self.held.window_pages[row]) for row in coming)
        candidates = self._in_line(active).tolist()
        leaving: set[int] = set()
        while len(lacking - leaving) > min(full, window) and len(candidates) > 1:
            victim = candidates.pop()
            leaving.add(victim)
            full += len(self.held.full_pages[victim])
            window += len(self.held.window_pages[victim])
            if not r.in_flight[victim]:
                self._retract(victim)
        return leaving

    def _retract(self, row: int) -> None:
        """Its pages go back; it waits with its tokens, which are computed anew. Counts as a pass."""
        r = self.requests
        self.ratio = raised(self.ratio)
        counts = (1, int(r.prompt[row]), int(r.known[row] - r.prompt[row]))
        self.retracted = [total + count for total, count in zip(self.retracted, counts, strict=True)]
        r.passed[row] += 1
        r.fire("Retract", np.array([row]))

    # -- prompts -------------------------------------------------------------------------------

    def _prefill(self, riders: Riders, leaving: set[int]) -> None:
        """Chunks of prompts that have begun, then of new requests while tokens of this step are left."""
        r = self.requests
        active = r.clients("active")
        room = self.chunk_tokens
        for row in self._in_line(active[r.planned[active] < r.feed_to[active]]).tolist():
            if row in leaving:
                continue
            taken = self._chunk(riders, row, room)
            if not taken:
                return
            room -= taken
        # Whoever leaves does so for want of pages: then nobody new comes.
        while (
            not leaving
            and room > 0
            and self.held.free_slots
            and (row := self._next_admitted(room)) is not None
        ):
            riders.bound.append(row)
            room -= self._chunk(riders, row, room)

    def _probe(self, riders: Riders) -> None:
        """The server's own probe, whole, in its own slot and page."""
        r = self.requests
        for row in r.own("waiting")[: len(self.held.free_aside)].tolist():
            r.fire("Admit", np.array([row]))
            riders.bound.append(row)
            riders.entries += self.held.take_pages(row, 1)
            riders.chunks.append((row, 0, int(r.known[row])))

    def _chunk(self, riders: Riders, row: int, room: int) -> int:
        """Adds the row's next chunk as far as tokens and pages go; returns its tokens, 0: it must wait."""
        r = self.requests
        start, mapped = int(r.planned[row]), int(self.held.mapped[row])
        end = chunk_end(start, int(r.feed_to[row]), room, self.chunk_tokens)
        end = min(end, (mapped + self.held.free_pages()) * PAGE_TOKENS)
        if end <= start:
            return 0
        if pages_for(end) > mapped:
            riders.entries += self.held.take_pages(row, pages_for(end) - mapped)
        riders.chunks.append((row, start, end))
        return end - start

    def _next_admitted(self, room: int) -> int | None:
        """Admits the first in line that waits; None where there is none or it doesn't fit now."""
        r = self.requests
        waiting = r.clients("waiting")
        if not waiting.size:
            return None
        row = int(self._in_line(waiting)[0])
        if not chunk_end(0, int(r.known[row]), room, self.chunk_tokens) or not self._fits(row):
            return None
        r.passed[waiting[r.arrival[waiting] < r.arrival[row]]] += 1
        r.fire("Admit", np.array([row]))
        return row

    def _fits(self, row: int) -> bool:
        """Whether both pools have pages for it beside what the running ones are expected to need."""
        r = self.requests
        active = r.clients("active")
        own = np.array([row])
        computed = np.maximum(r.planned[active], r.feed_to[active])
        later = expected_pages(computed, r.ends_at[active], self.ratio) - self.held.mapped[active]
        expected = int(expected_pages(r.known[own], r.ends_at[own], self.ratio)[0])
        held = self.held.mapped[active] - self.held.window_first[active]
        nearly = self._window_pages(computed - r.planned[active]) - held
        alone = not active.size
        return can_admit(
            pages_for(int(r.known[row])),
            expected,
            self.held.full.free,
            int(np.maximum(later, 0).sum()),
            alone,
        ) and can_admit(
            1,
            int(self._window_pages(r.known[own])[0]),
            self.held.window.free,
            int(np.maximum(nearly, 0).sum()),
            alone,
        )

    def _window_pages(self, left: Column) -> Column:
        """Window pages that a request with so many prompt tokens before it wants to hold."""
        chunk = np.minimum(left, self.chunk_tokens)
        pages: Column = np.maximum(-(-chunk // PAGE_TOKENS) + 1, DECODE_WINDOW_PAGES)
        return pages

    def _unblock(self) -> bool:
        """With nothing in flight and nothing to run, a request that is left lacks a page of all: it fails.

        It is alone, as others would have been retracted, and a request that waits would have been admitted.
        """
        r = self.requests
        active = r.clients("active")
        if not active.size or r.in_flight.any():
            return False
        row = int(active[0])
        r.end("Fail", row, ending(FAILED, RequestTooLong.http_status, self._too_long(row)))
        return True

    def _too_long(self, row: int) -> str:
        r = self.requests
        return (
            f"the cache of {self.held.full.usable * PAGE_TOKENS} tokens, alone, can't hold the request: "
            f"{int(r.prompt[row])} prompt tokens and {int(r.known[row] - r.prompt[row])} generated"
        )
