"""Faults of a rank that drafts.

The first line of each docstring says what is wrong, the second in which scenarios it is looked for.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from engine.actors import planning as planning_module
from engine.actors import rank as rank_module
from engine.actors.planning import Planner
from engine.actors.requests import Requests
from engine.actors.results import Results
from engine.actors.speculation import Drafts
from engine.sim.drafting import Drafter

Patch = pytest.MonkeyPatch


def keeps_what_follows_an_end(patch: Patch) -> None:
    """A round's tokens count to its last one, although one before ends the request.
    drafts-two drafts"""
    kept = Results._kept

    def faulty(self: Results, rows: Any, live: Any, counts: Any, tokens: Any, grammars: bytes) -> Any:
        found, finish = kept(self, rows, live, counts, tokens, grammars)
        return found._replace(counts=counts, within=np.ones_like(found.within)), finish

    patch.setattr(Results, "_kept", faulty)


def overlooks_an_end_within_a_round(patch: Patch) -> None:
    """Only the last token of a round is looked at for an end.
    drafts-two drafts"""
    finish = Results._finish

    def faulty(self: Results, rows: Any, nth: Any, tokens: Any) -> Any:
        codes = finish(self, rows, nth, tokens)
        last = np.append(rows[1:] != rows[:-1], True) if rows.size else np.zeros(0, bool)
        return np.where(last, codes, 0).astype(np.uint8)

    patch.setattr(Results, "_finish", faulty)


def drops_the_last_token_of_a_round(patch: Patch) -> None:
    """The token behind the accepted drafts is not kept: the host is a token behind its device.
    drafts-two drafts"""
    kept = Results._kept

    def faulty(self: Results, rows: Any, live: Any, counts: Any, tokens: Any, grammars: Any) -> Any:
        found, finish = kept(self, rows, live, counts, tokens, grammars)
        fewer = np.where(counts > 1, np.minimum(found.counts, counts - 1), found.counts).astype(np.uint8)
        nth = np.arange(tokens.size) - (np.cumsum(counts, dtype=np.int64) - counts)[found.places]
        return found._replace(counts=fewer, within=nth < fewer[found.places]), finish

    patch.setattr(Results, "_kept", faulty)


def never_looks_at_lengths(patch: Patch) -> None:
    """What a row with drafts has at most is never brought down to what it has.
    drafts-two drafts"""
    patch.setattr(Results, "_settle_lengths", lambda self, batch, done: None)


def plans_one_row_a_round(patch: Patch) -> None:
    """A row's position is planned as if no draft were ever accepted.
    drafts drafts-two"""
    assemble = planning_module.assemble

    def faulty(requests: Requests, epoch: int, riders: Any, graphs: Any) -> Any:
        before = requests.planned[riders.decodes]
        batch = assemble(requests, epoch, riders, graphs)
        requests.planned[riders.decodes] = before + 1
        return batch

    patch.setattr(planning_module, "assemble", faulty)


def has_no_page_for_its_drafts(patch: Patch) -> None:
    """Pages are taken for the anchor alone; drafts are verified where they happen to fall.
    drafts drafts-two"""
    decode = Planner._decode

    def faulty(self: Planner, riders: Any) -> Any:
        width, self.width = self.width, 1
        leaving = decode(self, riders)
        self.width = width
        r, rows = self.requests, riders.decodes
        riders.caps = np.minimum(r.ends_at[rows] - r.known[rows] - r.due[rows], width)
        return leaving

    patch.setattr(Planner, "_decode", faulty)


def leaves_behind_what_may_be_read_again(patch: Patch) -> None:
    """Window pages are given back by the most that a row may have, and not by what it has.
    drafts-two"""
    leave = Results._leave_pages_behind

    def faulty(self: Results, batch: Any) -> None:
        known = self.requests.known.copy()
        self.requests.known[batch.rows] = self.requests.planned[batch.rows] + 1
        leave(self, batch)
        self.requests.known[:] = known

    patch.setattr(Results, "_leave_pages_behind", faulty)


def goes_beyond_its_end(patch: Patch) -> None:
    """A bind allows as many tokens as the context, whatever the request asked for.
    drafts-two drafts"""
    assemble = planning_module.assemble

    def faulty(requests: Requests, epoch: int, riders: Any, graphs: Any) -> Any:
        batch = assemble(requests, epoch, riders, graphs)
        binds = tuple(msgspec.structs.replace(bind, ends_at=1500) for bind in batch.step.binds)
        batch.step = msgspec.structs.replace(batch.step, binds=binds)
        return batch

    patch.setattr(planning_module, "assemble", faulty)


def names_an_anchor_that_is_in_flight(patch: Patch) -> None:
    """The anchor is taken from the host although a step in flight will bring another one.
    drafts-two drafts"""
    assemble = planning_module.assemble

    def faulty(requests: Requests, epoch: int, riders: Any, graphs: Any) -> Any:
        due = requests.due.copy()
        requests.due[riders.decodes] = np.where(requests.due[riders.decodes] == 1, 0, 2)
        known = requests.due.copy()
        batch = assemble(requests, epoch, riders, graphs)
        requests.due += due - known
        return batch

    patch.setattr(planning_module, "assemble", faulty)


def tells_its_peers_of_anchors_alone(patch: Patch) -> None:
    """A rank's wants don't count its drafts: its peers pad to fewer rows than it runs.
    drafts-two"""
    assemble = planning_module.assemble

    def faulty(requests: Requests, epoch: int, riders: Any, graphs: Any) -> Any:
        batch = assemble(requests, epoch, riders, graphs)
        drafts = 0 if batch.drafting is None else batch.drafting.drafts
        batch.want = batch.want._replace(tokens=batch.want.tokens - drafts)
        return batch

    patch.setattr(planning_module, "assemble", faulty)


def accepts_a_draft_that_is_wrong(patch: Patch) -> None:
    """The device emits the draft that it rejects, and goes on behind it.
    drafts-two drafts"""
    run = Drafter.run

    def faulty(self: Drafter, follows: Any, anchor: int, rows: int, limit: int) -> Any:
        tokens = run(self, follows, anchor, rows, limit)
        if 1 < len(tokens) < rows:
            tokens[-1] = self._other(tokens[-1])
        return tokens

    patch.setattr(Drafter, "run", faulty)


def keeps_rows_of_rejected_drafts(patch: Patch) -> None:
    """The device counts every verified row as committed.
    drafts-two drafts"""
    from engine.sim.device import PagedModel

    verified = PagedModel._verified

    def faulty(self: PagedModel, state: Any, anchor: int, rows: int, limit: int) -> Any:
        start = state.length
        tokens = verified(self, state, anchor, rows, limit)
        state.length = start + rows
        return tokens

    patch.setattr(PagedModel, "_verified", faulty)


def has_a_budget_of_its_own_in_each_round(patch: Patch) -> None:
    """The budget that a step is sent with is one more than the one that its wants told of.
    drafts-two"""
    agreed = rank_module.agreed

    def faulty(batch: Any, wants: Any, decision: Any, speculates: bool) -> Any:
        step = agreed(batch, wants, decision, speculates)
        return msgspec.structs.replace(step, budget=step.budget + 1) if step.budget > 0 else step

    patch.setattr(rank_module, "agreed", faulty)


def verifies_without_a_limit(patch: Patch) -> None:
    """Whatever the budget is, the device is told to verify all that it may.
    drafts-poor drafts-two"""
    schedule = Drafts.schedule

    def faulty(self: Drafts, epoch: int, riders: Any) -> None:
        caps = riders.caps
        schedule(self, epoch, riders)
        if riders.drafting.budget > 0:
            riders.drafting = riders.drafting._replace(budget=-1)
            riders.caps = caps

    patch.setattr(Drafts, "schedule", faulty)
