"""Each monitor of a rank is broken by a planted fault: none of them is vacuous."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engine.actors import rank as rank_module
from engine.actors.batches import Riders
from engine.actors.core import Run
from engine.actors.holdings import Holdings
from engine.actors.intake import Intake
from engine.actors.planning import Planner
from engine.actors.rank import Rank
from engine.actors.requests import Requests
from engine.actors.results import Results
from engine.actors.schedule import Want, decide
from tests.search.planting import explored
from tests.sim import plants_drafts

Plant = Callable[[pytest.MonkeyPatch], None]


def decides_from_its_own_want(patch: pytest.MonkeyPatch) -> None:
    """I2: the graph follows from the rank's own size."""
    close = Rank._close_round

    def faulty(self: Rank) -> Any:
        assert self.plan is not None
        own = self.plan.want
        patch.setattr(rank_module, "decide", lambda wants, graphs: decide([own], graphs))
        return close(self)

    patch.setattr(Rank, "_close_round", faulty)


def gives_back_what_a_step_still_reads(patch: pytest.MonkeyPatch) -> None:
    """I5: an ended request is settled at once."""

    def faulty(self: Requests, rows: Any) -> None:
        done = rows[self.are("ending", rows)]
        if done.size:
            self.fire("Settle", done)

    patch.setattr(Requests, "settle", faulty)


def emits_tokens_of_ended_requests(patch: pytest.MonkeyPatch) -> None:
    """I6: rows that ended before the step are told of as if they lived."""
    tell = Results._step_out

    def faulty(self: Results, batch: Any, done: Any, kept: Any, tokens: Any, finish: Any) -> Any:
        return tell(self, batch, done, kept._replace(live=np.ones_like(kept.live)), tokens, finish)

    patch.setattr(Results, "_step_out", faulty)


def stays_away_when_idle(patch: pytest.MonkeyPatch) -> None:
    """I9: a rank without work doesn't answer a round."""

    def faulty(self: Rank, msg: object) -> None:
        self.plan = self.planner.next_batch(self.next_epoch)
        if self.plan is not None:
            self.post("Offer")

    patch.setattr(Rank, "plan_next", faulty)


def runs_no_idle_batch(patch: pytest.MonkeyPatch) -> None:
    """I9: a rank without work agrees, but leaves the device out."""
    emit = Rank.emit

    def faulty(self: Rank, effect: Any) -> None:
        if not isinstance(effect, Run) or effect.job.slots:
            emit(self, effect)

    patch.setattr(Rank, "emit", faulty)


def leaks_window_pages(patch: pytest.MonkeyPatch) -> None:
    """I10: the window pages of an ended request stay taken."""
    release = Holdings.release

    def faulty(self: Holdings, rows: Any) -> None:
        for row in rows.tolist():
            self.window_pages[row] = []
        release(self, rows)

    patch.setattr(Holdings, "release", faulty)


def keeps_the_slot(patch: pytest.MonkeyPatch) -> None:
    """I10: the slot of an ended request is never free again."""
    release = Holdings.release

    def faulty(self: Holdings, rows: Any) -> None:
        release(self, rows)
        self.free_slots.pop()

    patch.setattr(Holdings, "release", faulty)


def forgets_the_terminal_event(patch: pytest.MonkeyPatch) -> None:
    """I11: an aborted request hears nothing."""
    patch.setattr(Requests, "tell_end", lambda self, rows, at, msg: None)


def ends_requests_twice(patch: pytest.MonkeyPatch) -> None:
    """I11: the terminal event comes twice."""
    tell = Requests.tell_end

    def faulty(self: Requests, rows: Any, at: Any, msg: Any) -> None:
        tell(self, rows, at, msg)
        tell(self, rows, at, msg)

    patch.setattr(Requests, "tell_end", faulty)


def forgets_to_abort_when_it_stops(patch: pytest.MonkeyPatch) -> None:
    """I11: requests that are left at a stop are left in silence."""
    patch.setattr(Intake, "abort_all", lambda self: None)


def never_retracts(patch: pytest.MonkeyPatch) -> None:
    """Somebody always gets on: without retraction two requests wait for each other's pages for ever."""
    patch.setattr(Planner, "_make_room", lambda self, active, lacking: set())
    patch.setattr(Planner, "_unblock", lambda self: False)


def probes_only_when_idle(patch: pytest.MonkeyPatch) -> None:
    """Under load the server's own probe would never run."""
    probe = Planner._probe

    def faulty(self: Planner, riders: Riders) -> None:
        if riders.empty:
            probe(self, riders)

    patch.setattr(Planner, "_probe", faulty)


def says_stop_with_its_old_wants(patch: pytest.MonkeyPatch) -> None:
    """I8: a rank that stops leaves steps on its device."""
    patch.setattr(Rank, "everyone_stops", lambda self, msg: True)


@pytest.mark.parametrize(
    ("search", "plant", "text"),
    [
        ("ranks-two", decides_from_its_own_want, "same_decision"),
        ("rank-requests", gives_back_what_a_step_still_reads, "I5"),
        ("rank-requests", emits_tokens_of_ended_requests, "nothing_after_the_end"),
        ("ranks-serve", stays_away_when_idle, "must leave offered"),
        ("ranks-two", runs_no_idle_batch, "everyone_takes_part"),
        ("rank-requests", leaks_window_pages, "I10"),
        ("rank-requests", keeps_the_slot, "I10"),
        ("rank-requests", forgets_the_terminal_event, "all_ended"),
        ("rank-requests", ends_requests_twice, "one_terminal_event"),
        ("rank-requests", forgets_to_abort_when_it_stops, ""),
        ("rank-pages", never_retracts, "R1"),
        ("rank-probe", probes_only_when_idle, "no_probe_is_passed"),
        ("ranks-two", says_stop_with_its_old_wants, ""),
        ("drafts-requests", plants_drafts.keeps_what_follows_an_end, "nothing_after_the_end"),
        ("drafts-pages", plants_drafts.drops_the_last_token_of_a_round, "DeviceFailed"),
        ("drafts-pages", plants_drafts.has_no_page_for_its_drafts, "I5"),
        ("drafts-ranks", decides_from_its_own_want, "same_decision"),
    ],
)
def test_the_search_notices(search: str, plant: Plant, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert text in explored(search, monkeypatch).text


def test_a_want_is_the_seven_values_in_the_order_of_the_exchange() -> None:
    fields = ("tokens", "logit_rows", "decode_graph", "has_extend", "two_batches", "mode", "prefill_graph")
    assert Want._fields == fields
    assert Want() == (0, 0, 1, 0, 1, 0, 1)
