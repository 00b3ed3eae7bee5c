"""One rank, one rule a test: limits, chunks, retraction, deadlines, failures, snapshots."""

from __future__ import annotations

import time

import numpy as np
import pytest

from engine.actors.schedule import PASS_LIMIT, RATIO_FIRST, URGENT
from engine.config import PAGE_TOKENS
from engine.messages import ABORTED, FAILED, LENGTH, Abort, RunStep, StepDone, Stop, Submit, Tick
from tests.machines.harness import CONTEXT, Harness, submit_of


def column(data: bytes) -> list[int]:
    """A column of int32."""
    return np.frombuffer(data, np.int32).tolist()


def run_all(h: Harness) -> list[RunStep]:
    """Every step until the end."""
    steps = []
    while h.jobs[0]:
        steps.append(h.jobs[0][0])
        h.step()
    return steps


def test_chunks_that_are_not_the_last_end_on_a_page_boundary() -> None:
    h = Harness(chunk_tokens=300)
    h.submit(submit_of(1, 700, 2), submit_of(2, 600, 2))
    for step in run_all(h):
        for start, count, sampled in zip(column(step.starts), column(step.counts), step.samples, strict=True):
            assert sampled or (start + count) % PAGE_TOKENS == 0
    h.check_texts()


def test_a_budget_below_a_page_still_gets_through_a_prompt() -> None:
    h = Harness(chunk_tokens=100)
    h.submit(submit_of(1, 700, 2))
    assert max(sum(column(step.counts)) for step in run_all(h)) == 100
    h.check_texts()


def test_decode_rows_ride_with_the_chunks_of_a_prompt() -> None:
    h = Harness()
    h.submit(submit_of(1, 5, 40, ignore_eos=True))
    h.step()
    h.submit(submit_of(2, 700, 2))
    steps = run_all(h)
    assert "mixed" in {step.mode for step in steps}
    h.check_texts()


def test_a_step_is_prepared_while_the_one_before_runs_and_names_its_tokens_by_relay() -> None:
    h = Harness()
    h.submit(submit_of(1, 5, 40, ignore_eos=True))
    running, prepared = h.jobs[0]
    assert (running.mode, prepared.mode) == ("extend", "decode")
    assert column(prepared.tokens) == [-1]
    assert column(prepared.starts) == [5]


def test_no_step_is_prepared_for_a_request_that_ends_by_length() -> None:
    h = Harness()
    h.submit(submit_of(1, 5, 1))
    assert len(run_all(h)) == 1
    assert h.ends == {1: [(LENGTH, 200)]}


def test_requests_are_retracted_when_pages_run_out_and_lose_no_token() -> None:
    h = Harness(full_pages=6, window_pages=12)
    h.submit(*[submit_of(number, 250, 500, ignore_eos=True) for number in (1, 2, 3)])
    run_all(h)
    requests, prompts, outputs = h.rank.planner.retracted
    assert requests > 0
    assert prompts == 250 * requests
    assert outputs > 0
    h.check_texts()
    h.check_all_returned()


def test_the_first_in_line_is_never_retracted() -> None:
    h = Harness(full_pages=6, window_pages=12)
    h.submit(*[submit_of(number, 250, 500, ignore_eos=True) for number in (1, 2, 3)])
    first = h.rank.requests.row_of[1]
    while h.jobs[0]:
        h.step()
        assert h.rank.requests.machine.state(first) != "retracted"
    assert h.rank.planner.retracted[0] > 0


def test_a_retraction_raises_what_admission_sets_aside() -> None:
    h = Harness(full_pages=6, window_pages=12)
    h.submit(*[submit_of(number, 250, 500, ignore_eos=True) for number in (1, 2, 3)])
    before = RATIO_FIRST
    while not h.rank.planner.retracted[0]:
        before = h.rank.planner.ratio
        h.step()
    assert h.rank.planner.ratio > before


def test_a_request_that_needs_more_than_the_whole_cache_fails_alone_and_says_so() -> None:
    h = Harness(full_pages=4, window_pages=8)
    h.submit(submit_of(1, 700, 300, ignore_eos=True), submit_of(2, 20, 5, ignore_eos=True))
    run_all(h)
    assert h.ends[1] == [(FAILED, 400)]
    assert len(h.text[1]) == 3 * PAGE_TOKENS - 700 + 1
    h.check_texts()
    h.check_all_returned()


def test_a_group_is_refused_whole_when_the_queue_has_no_room_for_all() -> None:
    """I3."""
    h = Harness(slots=1, queued=3)
    h.submit(submit_of(1, 5, 3))
    h.submit(*[submit_of(number, 5, 3) for number in (2, 3)])
    h.submit(*[submit_of(number, 5, 3) for number in (4, 5)])
    assert h.ends == {4: [(FAILED, 429)], 5: [(FAILED, 429)]}
    run_all(h)
    h.check_texts()


@pytest.mark.parametrize(("prompt", "pages"), [(CONTEXT, 9), (0, 9), (1025, 5)])
def test_a_prompt_that_can_never_run_is_refused_alone(prompt: int, pages: int) -> None:
    h = Harness(full_pages=pages)
    h.submit(submit_of(1, prompt, 3), submit_of(2, 5, 3))
    assert h.ends == {1: [(FAILED, 400)]}
    run_all(h)
    h.check_texts()


def test_output_never_goes_beyond_the_context() -> None:
    h = Harness(full_pages=20, window_pages=20)
    h.submit(submit_of(1, CONTEXT - 4, 100, ignore_eos=True))
    run_all(h)
    assert len(h.text[1]) == 4
    assert h.ends == {1: [(LENGTH, 200)]}


def test_a_deadline_counts_from_the_first_tick_and_ends_the_request_once() -> None:
    h = Harness()
    h.tell(Tick(1.0))
    h.submit(submit_of(1, 5, 400, deadline_s=2.0, ignore_eos=True))
    for now_s, ended in ((2.5, False), (4.4, False), (4.5, True), (9.0, True)):
        h.tell(Tick(now_s))
        assert (1 in h.ends) == ended
    run_all(h)
    assert [reason for reason, _ in h.ends[1]] == [ABORTED]
    h.check_all_returned()


def test_a_row_whose_sampling_fails_harms_no_other_row() -> None:
    """I15."""
    h = Harness()
    h.submit(submit_of(1, 5, 3, ignore_eos=True), submit_of(2, 5, 3, ignore_eos=True))
    step = h.jobs[0][0]
    done = h.devices[0].execute(h.jobs[0].popleft())
    assert len(column(step.slots)) == 2
    h.tell(StepDone(done.epoch, bytes([0, 1]), done.token_ids[4:], ((0, "no token has a probability"),)))
    run_all(h)
    assert h.ends[1] == [(FAILED, 500)]
    assert len(h.text[2]) == 3
    h.check_all_returned()


def test_what_an_aborted_request_holds_is_kept_until_no_step_reads_it() -> None:
    """I5."""
    h = Harness(slots=1)
    h.submit(submit_of(1, 5, 40, ignore_eos=True), submit_of(2, 5, 3))
    h.abort(1)
    assert h.ends == {1: [(ABORTED, 499)]}
    free = h.rank.requests.held.full.free
    h.step()
    assert h.rank.requests.held.full.free == free
    h.step()
    run_all(h)
    h.check_texts()
    h.check_all_returned()


def test_a_late_or_unknown_abort_does_nothing() -> None:
    h = Harness()
    h.submit(submit_of(1, 5, 2))
    run_all(h)
    h.tell(Abort(1))
    h.tell(Abort(77))
    assert len(h.ends[1]) == 1


def test_low_priority_waits_for_at_most_so_many_later_arrivals() -> None:
    h = Harness(slots=1, queued=60)
    h.submit(submit_of(1, 5, 2))
    h.submit(submit_of(2, 5, 2, priority=0))
    later = range(3, 3 + 2 * PASS_LIMIT)
    for number in later:
        h.submit(submit_of(number, 5, 2, priority=9))
    while 2 not in h.ends:
        h.step()
    assert len([number for number in later if number in h.ends]) == PASS_LIMIT


def probe_of(request_id: int, prompt: int = 1, most: int = 1) -> Submit:
    """The server's own request."""
    return submit_of(request_id, prompt, most, URGENT, ignore_eos=True)


def test_a_probe_waits_for_no_slot_no_page_and_no_token_of_the_step() -> None:
    """Every slot decodes, no page is free, the queue is full, a prompt takes each step whole."""
    h = Harness(slots=2, queued=2, full_pages=6, window_pages=12, chunk_tokens=256)
    h.submit(submit_of(1, 5, 250, ignore_eos=True), submit_of(2, 1000, 24, ignore_eos=True))
    h.submit(submit_of(3, 5, 3), submit_of(4, 5, 3))
    h.submit(submit_of(5, 5, 3))
    assert h.ends == {5: [(FAILED, 429)]}
    for probe in range(100, 108):
        h.submit(probe_of(probe))
        for _ in range(3):
            h.step()
        assert h.ends[probe] == [(LENGTH, 200)], "two steps may have been planned before it came"
    assert (h.rank.requests.held.full.free, 2 in h.ends) == (0, False)
    assert h.rank.accounts_agree()
    run_all(h)
    h.check_texts()
    h.check_all_returned()


def test_a_probe_costs_clients_nothing() -> None:
    """Nobody is retracted, held up or told anything else because of probes."""
    texts = []
    for probed in (False, True):
        h = Harness(full_pages=6, window_pages=12)
        h.submit(*[submit_of(number, 250, 500, ignore_eos=True) for number in (1, 2, 3)])
        steps = 0
        while len(h.ends.keys() & {1, 2, 3}) < 3:
            if probed and steps % 2:
                h.submit(probe_of(1000 + steps))
            h.step()
            steps += 1
        run_all(h)
        h.check_texts()
        texts.append((h.rank.planner.retracted, [h.text[number] for number in (1, 2, 3)]))
    assert texts[0] == texts[1]


def test_a_probe_is_in_no_figure_of_the_load() -> None:
    h = Harness(slots=1)
    h.submit(submit_of(1, 5, 400, ignore_eos=True))
    for probe in (100, 101):
        h.submit(probe_of(probe))
    h.step()
    assert h.rank.requests.own("active").size + h.rank.requests.own("waiting").size == 2
    h.tell(Tick(1.0, 1.0))
    counters = h.snapshots[-1].counters
    assert (counters["num_running_reqs"], counters["num_queue_reqs"], counters["utilization"]) == (1, 0, 1.0)


def test_one_probe_runs_one_waits_and_more_are_refused() -> None:
    h = Harness(slots=1)
    h.submit(submit_of(1, 5, 400, ignore_eos=True))
    for probe in (100, 101, 102):
        h.submit(probe_of(probe))
    assert h.ends == {102: [(FAILED, 429)]}
    h.submit(probe_of(103), rank=0)
    run_all(h)
    assert [h.ends[probe][0][1] for probe in (100, 101, 103)] == [200, 200, 429]


def test_a_probe_that_its_step_and_its_page_cannot_hold_is_refused() -> None:
    """It would stay for ever: no later step is planned for it."""
    h = Harness(slots=1)
    for probe, prompt, most in ((100, 1, 2), (101, 257, 1), (102, 256, 1)):
        h.submit(probe_of(probe, prompt, most))
        run_all(h)
    assert h.ends == {100: [(FAILED, 400)], 101: [(FAILED, 400)], 102: [(LENGTH, 200)]}


def test_a_stopping_rank_ends_every_request_and_refuses_new_ones() -> None:
    h = Harness(slots=1)
    h.submit(submit_of(1, 5, 400), submit_of(2, 5, 400))
    h.tell(Stop())
    h.submit(submit_of(3, 5, 5))
    assert {number: ends[0][1] for number, ends in h.ends.items()} == {1: 503, 2: 503, 3: 503}
    run_all(h)
    assert h.stopped == {0: "stopped"}
    h.check_all_returned()


def test_an_idle_rank_publishes_snapshots_with_every_figure() -> None:
    h = Harness()
    h.tell(Tick(1.0, 1000.5))
    h.submit(submit_of(1, 5, 20, ignore_eos=True))
    h.step()
    h.tell(Tick(2.0, 1001.5))
    idle, busy = h.snapshots
    assert (idle.wall_s, idle.state, idle.running) == (1000.5, "idle", 0)
    assert (busy.running, busy.counters["num_running_reqs"]) == (1, 1)
    assert idle.counters.keys() == busy.counters.keys()
    assert busy.counters['realtime_tokens_total{mode="prefill_compute"}'] == 5
    assert busy.counters['realtime_tokens_total{mode="decode"}'] == 1


def test_a_step_of_256_requests_costs_the_host_less_than_a_millisecond() -> None:
    rows = 256
    h = Harness(
        slots=rows, queued=rows, full_pages=2000, window_pages=2000, chunk_tokens=8192, context_tokens=4096
    )
    h.submit(submit_of(1, 10, 1000, ignore_eos=True))
    for number in range(2, rows + 1):
        h.submit(submit_of(number, number, 1000, ignore_eos=True))
    seconds = []
    for _ in range(200):
        step = h.jobs[0].popleft()
        tokens = np.full(sum(step.samples), 7, np.int32).tobytes()
        began = time.thread_time()
        h.tell(StepDone(step.epoch, step.samples, tokens))
        if len(step.slots) == 4 * rows:
            seconds.append(time.thread_time() - began)
    # The best: a busy processor makes some steps dear, never one cheap.
    assert min(seconds) < 0.001
