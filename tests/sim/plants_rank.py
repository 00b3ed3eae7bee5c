"""Faults of a rank: pages, slots, tokens, rounds.

The first line of each docstring says what is wrong, the second in which scenarios it is looked for.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from engine.actors import planning as planning_module
from engine.actors import rank as rank_module
from engine.actors.core import Run
from engine.actors.holdings import Holdings
from engine.actors.intake import Intake
from engine.actors.planning import Planner
from engine.actors.rank import Rank
from engine.actors.requests import Requests, ending
from engine.actors.results import Results
from engine.actors.schedule import decide
from engine.messages import FAILED, GOES_ON, RequestFailed

Patch = pytest.MonkeyPatch


def leaks_a_full_page(patch: Patch) -> None:
    """A request that held two full pages gives one back.
    long-prompts"""
    release = Holdings.release

    def faulty(self: Holdings, rows: Any) -> None:
        for row in rows.tolist():
            del self.full_pages[row][2:]
        release(self, rows)

    patch.setattr(Holdings, "release", faulty)


def leaks_window_pages(patch: Patch) -> None:
    """The window pages of an ended request stay taken.
    steady"""
    release = Holdings.release

    def faulty(self: Holdings, rows: Any) -> None:
        for row in rows.tolist():
            self.window_pages[row] = []
        release(self, rows)

    patch.setattr(Holdings, "release", faulty)


def keeps_the_slot(patch: Patch) -> None:
    """The slot of an ended request is never free again.
    steady"""
    release = Holdings.release

    def faulty(self: Holdings, rows: Any) -> None:
        release(self, rows)
        self.free_slots.pop()

    patch.setattr(Holdings, "release", faulty)


def gives_back_what_a_step_reads(patch: Patch) -> None:
    """An ended request is settled while a step in flight still reads its pages.
    steady leaving-clients"""

    def faulty(self: Requests, rows: Any) -> None:
        done = rows[self.are("ending", rows)]
        if done.size:
            self.fire("Settle", done)

    patch.setattr(Requests, "settle", faulty)


def frees_the_window_too_early(patch: Patch) -> None:
    """Window pages are given back half a window too early.
    steady pressure long-prompts"""
    leave = Results._leave_pages_behind

    def faulty(self: Results, batch: Any) -> None:
        self.window_tokens = 64
        leave(self, batch)

    patch.setattr(Results, "_leave_pages_behind", faulty)


def never_leaves_the_window(patch: Patch) -> None:
    """Window pages out of reach are kept.
    long-prompts pressure"""
    patch.setattr(Results, "_leave_pages_behind", lambda self, batch: None)


def maps_a_page_twice(patch: Patch) -> None:
    """Two logical pages that are taken at once share a window page in the page table.
    long-prompts"""
    take = Holdings.take_pages

    def faulty(self: Holdings, row: int, pages: int) -> Any:
        entries = take(self, row, pages)
        return [(slot, logical, full, entries[0][3]) for slot, logical, full, _ in entries]

    patch.setattr(Holdings, "take_pages", faulty)


def keeps_the_generation(patch: Patch) -> None:
    """A slot is bound to the next request under the generation of the one before.
    steady"""
    take = Holdings.take_slot

    def faulty(self: Holdings, row: int, owner: int, aside: bool) -> None:
        take(self, row, owner, aside)
        slot = int(self.slot[row])
        self.generations[slot] = max(1, self.generations[slot] - 1)

    patch.setattr(Holdings, "take_slot", faulty)


def keeps_a_stale_length(patch: Patch) -> None:
    """A retracted request begins again where it was, in a slot that is empty.
    pressure"""

    def faulty(self: Requests, rows: Any, at: Any, msg: object) -> None:
        for row in rows.tolist():
            self.held.take_slot(row, self.submit_of(row).request_id, aside=False)
        self.feed_to[rows] = self.known[rows]

    patch.setattr(Requests, "hold_slot", faulty)


def forgets_output_at_retraction(patch: Patch) -> None:
    """A retracted request computes its prompt anew, but not what it had generated.
    pressure"""
    hold = Requests.hold_slot

    def faulty(self: Requests, rows: Any, at: Any, msg: object) -> None:
        hold(self, rows, at, msg)
        self.feed_to[rows] = self.prompt[rows]

    patch.setattr(Requests, "hold_slot", faulty)


def never_retracts(patch: Patch) -> None:
    """Nobody gives pages back when they run out: requests wait for each other.
    pressure"""
    patch.setattr(Planner, "_make_room", lambda self, active, lacking: set())
    patch.setattr(Planner, "_unblock", lambda self: False)


def retracts_what_is_in_flight(patch: Patch) -> None:
    """A request is retracted while a step in flight reads its pages.
    pressure"""
    room = Planner._make_room

    def faulty(self: Planner, active: Any, lacking: set[int]) -> set[int]:
        flying = self.requests.in_flight.copy()
        self.requests.in_flight[:] = 0
        leaving = room(self, active, lacking)
        self.requests.in_flight[:] = flying
        return leaving

    patch.setattr(Planner, "_make_room", faulty)


def feeds_an_old_token(patch: Patch) -> None:
    """A step that is planned ahead is fed the last known token instead of the relay's.
    steady"""
    assemble = planning_module.assemble

    def faulty(requests: Requests, epoch: int, draft: Any, graphs: Any) -> Any:
        batch = assemble(requests, epoch, draft, graphs)
        tokens = np.frombuffer(batch.step.tokens, np.int32).copy()
        decodes = tokens[: batch.decodes]
        decodes[decodes < 0] = requests.last_token[batch.rows[: batch.decodes]][decodes < 0]
        batch.step = msgspec.structs.replace(batch.step, tokens=tokens.tobytes())
        return batch

    patch.setattr(planning_module, "assemble", faulty)


def samples_too_early(patch: Patch) -> None:
    """Each chunk of a prompt is sampled, not the last one alone.
    long-prompts"""
    assemble = planning_module.assemble

    def faulty(requests: Requests, epoch: int, draft: Any, graphs: Any) -> Any:
        batch = assemble(requests, epoch, draft, graphs)
        batch.samples = np.ones_like(batch.samples)
        batch.step = msgspec.structs.replace(batch.step, samples=batch.samples.tobytes())
        return batch

    patch.setattr(planning_module, "assemble", faulty)


def keeps_a_token_twice(patch: Patch) -> None:
    """A token is kept twice: the request is a token further than its text.
    steady pressure"""
    keep = Requests.keep_tokens

    def faulty(self: Requests, rows: Any, at: Any, msg: Any) -> None:
        keep(self, rows, at, msg)
        self.known[rows] += 1

    patch.setattr(Requests, "keep_tokens", faulty)


def gives_tokens_to_the_wrong_row(patch: Patch) -> None:
    """The tokens of a step are told with the rows of two requests exchanged.
    steady"""
    tell = Results._step_out

    def faulty(self: Results, batch: Any, done: Any, kept: Any, tokens: Any, finish: Any) -> Any:
        return tell(self, batch, done, kept, np.roll(tokens, 1), finish)

    patch.setattr(Results, "_step_out", faulty)


def tells_of_ended_requests(patch: Patch) -> None:
    """Rows that ended before the step are told of as if they lived.
    steady"""
    tell = Results._step_out

    def faulty(self: Results, batch: Any, done: Any, kept: Any, tokens: Any, finish: Any) -> Any:
        return tell(self, batch, done, kept._replace(live=np.ones_like(kept.live)), tokens, finish)

    patch.setattr(Results, "_step_out", faulty)


def overlooks_eos(patch: Patch) -> None:
    """EOS doesn't end a request.
    steady"""
    init = Results.__init__

    def faulty(self: Results, requests: Any, rank: int, eos_ids: Any, window: int) -> None:
        init(self, requests, rank, (), window)

    patch.setattr(Results, "__init__", faulty)


def allows_one_token_more(patch: Patch) -> None:
    """A request may generate one token more than it asked for.
    steady"""
    accept = Requests.accept

    def faulty(self: Requests, submit: Any, context: int) -> None:
        accept(self, submit, context)
        self.ends_at[self.row_of[submit.request_id]] += 1

    patch.setattr(Requests, "accept", faulty)


def forgets_the_terminal_event(patch: Patch) -> None:
    """A request that fails or is aborted hears nothing.
    bad-rows"""
    patch.setattr(Requests, "tell_end", lambda self, rows, at, msg: None)


def ends_requests_twice(patch: Patch) -> None:
    """The terminal event of a failed request comes twice.
    bad-rows"""
    tell = Requests.tell_end

    def faulty(self: Requests, rows: Any, at: Any, msg: Any) -> None:
        tell(self, rows, at, msg)
        tell(self, rows, at, msg)

    patch.setattr(Requests, "tell_end", faulty)


def fails_the_whole_batch(patch: Patch) -> None:
    """A row that fails takes the other rows of its step with it.
    bad-rows"""
    commit = Results.commit

    def faulty(self: Results, batch: Any, done: Any) -> Any:
        out = commit(self, batch, done)
        if done.failed:
            live = batch.rows[self.requests.are("active", batch.rows)]
            for row in live.tolist():
                self.requests.end("Fail", row, ending(FAILED, 500, "a neighbour failed"))
        return out

    patch.setattr(Results, "commit", faulty)


def swallows_a_bad_row(patch: Patch) -> None:
    """A row that fails is left without token and without end.
    bad-rows"""
    end = Requests.end

    def faulty(self: Requests, event: str, row: int, why: Any) -> None:
        if event != "Fail" or why.status != 500:
            end(self, event, row, why)

    patch.setattr(Requests, "end", faulty)


def decides_from_its_own_want(patch: Patch) -> None:
    """The graph follows from the rank's own size.
    steady"""
    close = Rank._close_round

    def faulty(self: Rank) -> Any:
        assert self.plan is not None
        own = self.plan.want
        patch.setattr(rank_module, "decide", lambda wants, graphs: decide([own], graphs))
        return close(self)

    patch.setattr(Rank, "_close_round", faulty)


def ignores_a_vote(patch: Patch) -> None:
    """Rank 1 takes the graph although a peer has voted against it.
    steady long-prompts"""
    close = Rank._close_round

    def faulty(self: Rank) -> Any:
        if self.setup.rank == 1:
            self.heard = [None if want is None else want._replace(prefill_graph=1) for want in self.heard]
        return close(self)

    patch.setattr(Rank, "_close_round", faulty)


def takes_too_small_a_graph(patch: Patch) -> None:
    """The captured size is chosen for the emptiest rank.
    steady"""

    def faulty(wants: Any, graphs: Any) -> Any:
        decision = decide(wants, graphs)
        return decision._replace(bucket=min(decision.bucket, max(1, min(decision.tokens))))

    patch.setattr(rank_module, "decide", faulty)


def stays_away_when_idle(patch: Patch) -> None:
    """A rank without work doesn't answer a round.
    steady"""

    def faulty(self: Rank, msg: object) -> None:
        self.plan = self.planner.next_batch(self.next_epoch)
        if self.plan is not None:
            self.post("Offer")

    patch.setattr(Rank, "plan_next", faulty)


def runs_no_idle_batch(patch: Patch) -> None:
    """A rank without work agrees, but leaves its device out.
    steady"""
    emit = Rank.emit

    def faulty(self: Rank, effect: Any) -> None:
        if not isinstance(effect, Run) or effect.job.slots:
            emit(self, effect)

    patch.setattr(Rank, "emit", faulty)


def takes_early_wants_as_current(patch: Patch) -> None:
    """What a peer wants of the next round is taken for this one's.
    three-ranks steady"""
    patch.setattr(Rank, "is_early", lambda self, msg: False)


def keeps_old_wants(patch: Patch) -> None:
    """A round begins with what the ranks wanted of the last one.
    steady"""
    close = Rank._close_round

    def faulty(self: Rank) -> Any:
        heard = list(self.heard)
        result = close(self)
        self.heard[(self.setup.rank + 1) % self.setup.ranks] = heard[(self.setup.rank + 1) % self.setup.ranks]
        return result

    patch.setattr(Rank, "_close_round", faulty)


def stops_without_the_others(patch: Patch) -> None:
    """A rank that stops doesn't wait until all ranks want to.
    shutdown steady"""
    patch.setattr(Rank, "everyone_stops", lambda self, msg: True)


def forgets_to_abort_when_it_stops(patch: Patch) -> None:
    """Requests that are left at a stop keep what they hold.
    shutdown"""
    patch.setattr(Intake, "abort_all", lambda self: None)


def overlooks_deadlines(patch: Patch) -> None:
    """A request may take as long as it likes.
    deadlines"""
    patch.setattr(Intake, "check_deadlines", lambda self, now_s: None)


def refuses_a_part_of_a_batch(patch: Patch) -> None:
    """Of requests that arrive together those that find room are taken, the others refused.
    crowd"""

    def faulty(self: Intake, items: Any) -> None:
        for item in items:
            if not self.requests.rows("vacant").size or self.requests.rows("waiting").size >= 1:
                self._tell(RequestFailed(item.request_id, FAILED, 429, "no room"))
            else:
                self.requests.accept(item, self._setup.context_tokens)

    patch.setattr(Intake, "enqueue", faulty)


def says_finished_of_all(patch: Patch) -> None:
    """Every row of a step is told of with a finish code as soon as one ends.
    steady"""
    tell = Results._step_out

    def faulty(self: Results, batch: Any, done: Any, kept: Any, tokens: Any, finish: Any) -> Any:
        ends = finish[finish != GOES_ON]
        return tell(self, batch, done, kept, tokens, np.full_like(finish, ends[0]) if ends.size else finish)

    patch.setattr(Results, "_step_out", faulty)
