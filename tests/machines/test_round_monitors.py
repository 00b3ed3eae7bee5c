"""Each rule and monitor of a round is broken by a planted fault: none of them is vacuous."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from engine.actors.round import Accepted, Begin, Bind, Committed, Injected, MaskBegun, Round
from engine.fsm.explore import Explorer
from engine.fsm.load import spec_named
from engine.fsm.mutate import drop_rows
from engine.fsm.owners import SPECS
from engine.fsm.search import Search, load_search
from tests.search.planting import explored

SEARCHES = {path.stem: load_search(path) for path in sorted((SPECS / "search").glob("round-*.toml"))}
DEVICE: Any = next(iter(SEARCHES.values())).cores["device0"]().__class__


def always(self: Any, msg: Any) -> bool:
    """Says yes."""
    return True


def nothing(self: Any, msg: Any) -> None:
    """Does nothing."""


# ---- faults of the round itself: what the monitors outside notice ----------------------------------


def commits_every_verified_row(self: Round, msg: Committed) -> None:
    """Rejected rows count as committed."""
    self.lengths[self.slots] += self.most


def injects_what_is_verified(self: Round, msg: Accepted) -> None:
    """Notes rejected rows as injected, so that the right ones never are."""
    self.kept = msg.kept
    self.injected[self.slots] = self.lengths[self.slots] + self.most


def forgets_the_end(self: Round, msg: Any) -> None:
    """Takes in a step as if no request ever ended."""
    self.ends_at[msg.slots] += 5
    Round._take_in(self, msg)
    self.ends_at[msg.slots] -= 5


def shares_the_mask_slot(self: Round, msg: MaskBegun) -> None:
    """Notes the step in both mask slots."""
    self.mask_owners[:] = [self.epoch] * 2
    self.masked = msg.places


def begins_anew(self: Round, msg: Begin) -> None:
    """Forgets what was injected."""
    Round._take_in(self, msg)
    self.injected[msg.slots] = 0


FAULTS: list[tuple[str, str, Callable[..., Any], str]] = [
    ("round-grammar", "commit", commits_every_verified_row, "committed_is_plain_decoding"),
    ("round-budgets", "commit", nothing, "retained_is_plain_decoding"),
    ("round-budgets", "note_kept", injects_what_is_verified, "RD1"),
    ("round-budgets", "begin", forgets_the_end, "RD2"),
    ("round-grammar", "hold_mask_slot", shares_the_mask_slot, "RD3"),
    ("round-budgets", "begin", begins_anew, "injected_once_and_in_order"),
    ("round-grammar", "note_ends", nothing, "nothing_after_the_end"),
]


@pytest.mark.parametrize(("search", "method", "fault", "monitor"), FAULTS)
def test_a_fault_of_the_round_is_noticed(
    search: str, method: str, fault: Callable[..., Any], monitor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Round, method, fault)
    assert monitor in explored(SEARCHES[search], monkeypatch).text


# ---- faults of the step runner: what the round notices -----------------------------------------------


def verifies_a_row_too_many(patch: pytest.MonkeyPatch) -> None:
    forward = DEVICE._forward
    patch.setattr(DEVICE, "_forward", lambda self, lens: forward(self, tuple(n + 1 for n in lens)))


def leaves_an_anchor_out(patch: pytest.MonkeyPatch) -> None:
    forward = DEVICE._forward
    patch.setattr(DEVICE, "_forward", lambda self, lens: forward(self, (0,) * len(lens)))


def does_not_inject(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DEVICE, "_do", replaced(Injected, lambda self, event: None))


def injects_from_the_start(patch: pytest.MonkeyPatch) -> None:
    def again(self: Any, event: Injected) -> Injected:
        return Injected(event.slots, np.zeros_like(event.first), event.first + event.rows)

    patch.setattr(DEVICE, "_do", replaced(Injected, again))


def injects_rejected_rows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DEVICE, "_do", replaced(Injected, lambda self, e: e._replace(rows=e.rows + 1)))


def keeps_what_is_not_verified(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DEVICE, "_do", replaced(Accepted, lambda self, e: e._replace(kept=e.kept + 1)))


def keeps_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DEVICE, "_do", replaced(Accepted, lambda self, e: e._replace(kept=e.kept * 0)))


def commits_twice(patch: pytest.MonkeyPatch) -> None:
    do = DEVICE._do

    def twice(self: Any, event: Any) -> None:
        do(self, event)
        if isinstance(event, Committed):
            do(self, event)

    patch.setattr(DEVICE, "_do", twice)


def takes_a_mask_slot_that_is_read(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DEVICE, "open_mask_slot", property(lambda self: 0))


def does_not_rebind(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DEVICE, "_do", replaced(Bind, lambda self, e: None if e.generation > 1 else e))


def replaced(kind: type, change: Callable[[Any, Any], Any]) -> Callable[[Any, Any], None]:
    """`Device._do` with this kind of event changed, or left out where that gives None."""
    do = DEVICE._do

    def doing(self: Any, event: Any) -> None:
        changed = change(self, event) if isinstance(event, kind) else event
        if changed is not None:
            do(self, changed)

    return doing


RUNNERS: list[tuple[str, Callable[[pytest.MonkeyPatch], None], str]] = [
    ("round-budgets", verifies_a_row_too_many, "LaidOut in begun"),
    ("round-budgets", leaves_an_anchor_out, "LaidOut in begun"),
    ("round-budgets", does_not_inject, "Drafted in begun"),
    ("round-grammar", injects_from_the_start, "Injected in begun"),
    ("round-budgets", injects_rejected_rows, "Injected in begun"),
    ("round-budgets", keeps_what_is_not_verified, "Accepted in judging"),
    ("round-budgets", keeps_nothing, "Accepted in judging"),
    ("round-budgets", commits_twice, "Committed in resting"),
    ("round-grammar", takes_a_mask_slot_that_is_read, "MaskBegun in laid_out"),
    ("round-grammar", does_not_rebind, "Begin in resting"),
]


@pytest.mark.parametrize(("search", "plant", "event"), RUNNERS)
def test_a_fault_of_the_step_runner_is_noticed(
    search: str, plant: Callable[[pytest.MonkeyPatch], None], event: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    text = explored(SEARCHES[search], monkeypatch).text
    assert text.startswith("Unexpected: round:")
    assert event in text


# ---- faults around it ----------------------------------------------------------------------------------


def changed(name: str, **args: Any) -> Search:
    """The search with another environment."""
    search = SEARCHES[name]
    environment = search.environment
    assert isinstance(environment, partial)
    return replace(search, environment=partial(environment.func, **{**environment.keywords, **args}))


@pytest.mark.parametrize("fault", [{"barrier": False}, {"barrier": False, "once": False}])
def test_masks_of_a_matcher_that_stands_elsewhere_are_refused(
    fault: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """I1: without the barrier the matcher is behind; one that advances twice is ahead."""
    text = explored(changed("round-grammar", **fault), monkeypatch).text
    assert "MaskReady in awaiting" in text


def test_a_matcher_that_advances_twice_ends_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were it believed, the end would tell."""
    monkeypatch.setattr(Round, "matchers_stood_at_the_anchors", always)
    search = changed("round-grammar", barrier=False, once=False)
    assert "matchers_have_what_is_retained" in explored(search, monkeypatch).text


def test_an_idle_rank_that_stays_away_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = DEVICE._begin

    def only_work(self: Any) -> None:
        if self.steps[0].groups:
            begin(self)
        else:
            self.steps.pop(0)

    monkeypatch.setattr(DEVICE, "_begin", only_work)
    assert "everyone_takes_part" in explored(SEARCHES["round-ranks"], monkeypatch).text


def test_more_rows_than_were_agreed_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """I2: the drafted rows of a step stay within what every rank was told of it."""
    draft = DEVICE._draft

    def greedy(self: Any, rights: Any) -> None:
        draft(self, rights)
        forward = type(self)._forward
        self._forward = lambda lens: forward(self, tuple(self.most.tolist()))

    monkeypatch.setattr(DEVICE, "_draft", greedy)
    assert "LaidOut in drafted" in explored(SEARCHES["round-budgets"], monkeypatch).text


def test_a_host_that_leaves_a_request_unserved_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    around = SEARCHES["round-grammar"].environment
    assert isinstance(around, partial)
    wants = around.func._wants  # type: ignore[attr-defined]
    monkeypatch.setattr(
        around.func, "_wants", lambda self, key: self.places[key].number == 0 and wants(self, key)
    )
    assert "every_request_has_ended" in explored(SEARCHES["round-grammar"], monkeypatch).text


def test_each_row_is_needed_in_each_of_its_states() -> None:
    spec = spec_named("round")
    results = [(search, Explorer(search).run()) for search in SEARCHES.values() if not search.deep]
    assert all(found.violation is None for _, found in results)
    dropped = list(drop_rows([spec], results, lambda line: None))
    assert len(dropped) == sum(len(row.states) for row in spec.rows)
    assert [one.label() for one in dropped if one.search is None] == []
