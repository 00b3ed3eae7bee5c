"""How much is drafted: budgets from survival two steps old, probes where drafts don't pay, rows told of."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from engine.actors import spec_ledger
from engine.actors.capacity import PROBE_SHARE, choose_budget, probe_period
from engine.actors.schedule import Want, loads
from engine.actors.speculation import CAP_ACCEPT, COMPACT, FRESH, STATIC
from engine.messages import RunStep, StepDone, Tick
from tests.machines.harness import Harness, submit_of
from tests.machines.rounds import CHEAP, DEAR, answer, begun, drafting

RESTLESS = {"ignore_eos": True}


def plain_rounds(h: Harness, rounds: int, survival: float = 0.5) -> list[RunStep]:
    """So many steps of one request that gains a token in each; returns them."""
    ran = []
    for _ in range(rounds):
        step = h.jobs[0][0]
        length = 1 + int(h.rank.requests.known[0]) - 1
        answer(h, [[8]], [length], survival)
        ran.append(step)
    return ran


def wants_of(h: Harness) -> list[Want]:
    return [batch.want for batch in h.rank.flight]


def test_mode_static_drafts_all_it_may_in_every_step() -> None:
    h = drafting(STATIC, DEAR)
    begun(h, submit_of(1, 4, 60, **RESTLESS))
    assert {step.budget for step in plain_rounds(h, 20)} == {-1}


def test_a_step_counts_its_drafts_among_its_rows_and_all_of_them_want_logits() -> None:
    h = drafting(STATIC)
    begun(h, submit_of(1, 4, 60, **RESTLESS), submit_of(2, 4, 60, **RESTLESS))
    assert [(want.tokens, want.logit_rows) for want in wants_of(h)] == [(8, 8), (8, 8)]
    h.submit(submit_of(3, 10, 5))
    answer(h, [[8], [8]], [5, 5])
    assert (wants_of(h)[1].tokens, wants_of(h)[1].logit_rows) == (18, 9)


@pytest.mark.parametrize(("mode", "verify", "rows"), [(COMPACT, [3, 3], 4), (CAP_ACCEPT, [4, 4], 8)])
def test_a_budget_bounds_what_compact_verifies_and_leaves_cap_accept_whole(
    mode: str, verify: list[int], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def two(*args: object) -> object:
        return choose_budget(*args)._replace(budget=2)

    monkeypatch.setattr("engine.actors.speculation.choose_budget", two)
    h = drafting(mode, CHEAP)
    begun(h, submit_of(1, 4, 60), submit_of(2, 4, 60))
    step = h.jobs[0][0]
    assert (step.budget, list(step.verify), h.rank.flight[0].want.tokens) == (2, verify, rows)


def test_the_budget_follows_survival_that_is_two_steps_old() -> None:
    """A step in flight doesn't matter: what it says is used by the step after the next."""
    h = drafting(COMPACT, CHEAP)
    begun(h, submit_of(1, 4, 200, **RESTLESS))
    budgets = [step.budget for step in plain_rounds(h, 6, survival=0.0)]
    epochs_with_drafts = budgets.index(0)
    assert budgets[:epochs_with_drafts] == [3] * epochs_with_drafts
    assert epochs_with_drafts == 2


def test_where_drafts_do_not_pay_probes_come_at_the_period_of_the_cost_table() -> None:
    h = drafting(COMPACT, DEAR)
    begun(h, submit_of(1, 4, 1400, **RESTLESS))
    period = probe_period(DEAR, 1)
    plain_rounds(h, 4, survival=0.01)  # Nothing is known of the first drafts: they are made.
    budgets = [step.budget for step in plain_rounds(h, 3 * period, survival=0.01)]
    probes = [place for place, budget in enumerate(budgets) if budget]
    assert set(budgets) == {0, 1}
    assert np.diff(probes).tolist() == [period] * (len(probes) - 1)
    assert len(probes) >= 2
    extra_s = float(DEAR.seconds(1, 2, True)) - DEAR.plain(1)
    assert extra_s * len(probes) <= PROBE_SHARE * DEAR.plain(1) * len(budgets) * 1.01


def test_one_poor_draft_does_not_keep_a_request_from_drafting_until_the_next_probe() -> None:
    h = drafting(COMPACT, DEAR)
    begun(h, submit_of(1, 4, 1400, **RESTLESS))
    assert {step.budget for step in plain_rounds(h, 20, survival=1.0)} == {3}
    plain_rounds(h, 1, survival=0.0)
    budgets = [step.budget for step in plain_rounds(h, 20, survival=1.0)]
    assert 0 < budgets.count(0) <= FRESH
    assert budgets[-1] == 3
    assert probe_period(DEAR, 1) > 10 * FRESH


def test_a_probe_finds_out_that_drafts_pay_again() -> None:
    h = drafting(COMPACT, CHEAP)
    begun(h, submit_of(1, 4, 1400, **RESTLESS))
    assert {step.budget for step in plain_rounds(h, 20, survival=0.0)[4:]} == {0, 1}
    budgets = [step.budget for step in plain_rounds(h, 3 * probe_period(CHEAP, 1) + 8, survival=1.0)]
    assert budgets[-1] == 3


def test_what_a_slot_promised_is_forgotten_with_its_request() -> None:
    h = drafting(COMPACT, CHEAP, slots=1)
    begun(h, submit_of(1, 4, 8, **RESTLESS))
    plain_rounds(h, 7, survival=0.25)
    drafts = h.rank.planner.drafts
    assert drafts is not None
    generation = h.rank.requests.held.generations[[1]]
    epoch, slot = h.rank.next_epoch + 5, np.array([1])
    assert drafts.history.at(epoch, slot, generation)[0].tolist() == [0.25] * 3
    assert drafts.history.at(epoch, slot, generation + 1)[0].tolist() == drafts.history.prior(epoch).tolist()


def test_decisions_come_back_with_a_snapshot() -> None:
    h = drafting(COMPACT, DEAR)
    begun(h, submit_of(1, 4, 400, **RESTLESS))
    plain_rounds(h, 5, survival=0.3)
    taken = h.rank.snapshot()
    plain_rounds(h, 9, survival=0.9)
    assert h.rank.snapshot() != taken
    h.rank.restore(taken)
    assert h.rank.snapshot() == taken


def test_ranks_that_speculate_do_not_tell_their_requests() -> None:
    wants = [Want(tokens=4, logit_rows=4, mode=2), Want()]
    assert loads(wants) == ((4, 4, 4), (0, 0, 0))
    assert loads(wants, speculates=True) == ((-1, 4, 4), (-1, 0, 0))


def test_a_log_line_says_what_was_expected_and_what_came(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "engine.speculation")
    h = drafting(COMPACT, CHEAP)
    h.tell(Tick(0.0, 0.0))
    begun(h, submit_of(1, 4, 60, **RESTLESS))
    answer(h, [[8, 8, 8, 8]], [8], seconds=0.02)
    h.tell(Tick(spec_ledger.SAY_EVERY_S, 0.0))
    plan = choose_budget(np.ones((1, 3), np.float32), np.array([4]), CHEAP)
    (record,) = caplog.records
    assert "4.00 tokens a round of 4.00 rows, 100% of the verified accepted" in record.getMessage()
    assert f"expected {plan.expected_tokens / plan.expected_s:.0f}," in record.getMessage()
    assert f"without drafts {1 / plan.plain_s:.0f}, measured 200;" in record.getMessage()
    assert h.snapshots[-1].counters["spec_gained_tokens_per_second"] == pytest.approx(200)


def test_drafting_that_drafts_nothing_is_told_of(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.actors.speculation.probe_period", lambda table, rows: 10**9)
    h = drafting(COMPACT, DEAR)
    h.tell(Tick(0.0, 0.0))
    begun(h, submit_of(1, 4, 1400, **RESTLESS))
    plain_rounds(h, spec_ledger.SILENT_STEPS + 10, survival=0.0)
    h.tell(Tick(spec_ledger.SAY_EVERY_S, 0.0))
    assert "drafting is on, but the last" in caplog.text
    assert h.snapshots[-1].counters["spec_steps_without_draft"] > spec_ledger.SILENT_STEPS


def test_a_drafting_step_of_256_requests_costs_the_host_less_than_two_milliseconds() -> None:
    import time

    rows = 256
    h = drafting(
        COMPACT,
        CHEAP,
        slots=rows,
        queued=rows,
        full_pages=4000,
        window_pages=4000,
        chunk_tokens=8192,
        context_tokens=4096,
    )
    h.submit(*[submit_of(number, 2, 1000, **RESTLESS) for number in range(1, rows + 1)])
    lengths, seconds = np.zeros(rows + 1, np.int64), []
    for _ in range(150):
        step = h.jobs[0].popleft()
        slots = np.frombuffer(step.slots, np.int32)
        verify = np.frombuffer(step.verify, np.uint8)
        counts = np.maximum(np.minimum(verify, 3), 1)
        lengths[slots] += np.where(verify > 0, counts, 2)
        done = StepDone(
            step.epoch,
            counts.astype(np.uint8).tobytes(),
            np.full(counts.sum(), 7, np.int32).tobytes(),
            verified=step.verify,
            survival=np.full((slots.size, 3), 0.8, np.float32).tobytes(),
            lengths=lengths[slots].astype(np.int32).tobytes(),
        )
        began = time.thread_time()
        h.tell(done)
        if slots.size == rows:
            seconds.append(time.thread_time() - began)
    assert len(seconds) > 100
    # The best: a busy processor makes some steps dear, never one cheap.
    assert min(seconds) < 0.002
