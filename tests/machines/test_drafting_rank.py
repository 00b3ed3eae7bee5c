"""Ranks that draft, against random work: no text differs by a token from that of plain decoding."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from engine.actors.capacity import CostTable
from engine.actors.schedule import Graphs
from engine.actors.speculation import COMPACT, STATIC, Speculation
from engine.errors import ConfigError, DeviceFailed
from engine.messages import (
    FAILED,
    LENGTH,
    STOP_EOS,
    STOP_TOKEN,
    LogprobColumns,
    Stop,
    Tick,
)
from tests.machines.harness import Harness, setup_of, submit_of
from tests.machines.rounds import CHEAP, DEAR, answer, begun, drafting
from tests.machines.test_rank import OneRank


class OneDraftingRank(OneRank):
    """Everything that may reach a rank, in any order, while it drafts."""

    @initialize(
        full=st.integers(3, 12),
        window=st.integers(3, 12),
        chunk=st.sampled_from([64, 256, 300, 700]),
        slots=st.integers(1, 4),
        block=st.integers(1, 7),
        table=st.sampled_from([None, CHEAP, DEAR]),
    )
    def begin(
        self, full: int, window: int, chunk: int, slots: int, block: int, table: CostTable | None
    ) -> None:
        how = Speculation(block, COMPACT, table)
        self.h = Harness(
            full_pages=full, window_pages=window, chunk_tokens=chunk, slots=slots, speculation=how
        )
        self.ids = 0
        self.now_s = 0.0


OneDraftingRank.TestCase.settings = settings(
    max_examples=30, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
TestOneDraftingRank = OneDraftingRank.TestCase


@settings(max_examples=20, deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 600), st.integers(1, 60)), min_size=1, max_size=8
    ),
    aborts=st.lists(st.integers(0, 7), max_size=2),
    table=st.sampled_from([None, CHEAP]),
    order=st.randoms(use_true_random=False),
)
def test_ranks_that_draft_agree_and_stop_together(
    requests: list[tuple[int, int, int]], aborts: list[int], table: CostTable | None, order: random.Random
) -> None:
    """I2, I9, I10, I11: the same decision everywhere, and never more rows than were agreed on."""
    how = Speculation(3, COMPACT, table)
    h = Harness(2, graphs=Graphs(decode=(1, 2, 4, 8), prefill=(256, 600)), speculation=how)
    work = [("submit", index) for index in range(len(requests))]
    work += [("abort", index % len(requests)) for index in aborts]
    order.shuffle(work)
    told: dict[int, set[object]] = {}
    while work or h.moves():
        moves = h.moves()
        if work and (not moves or order.random() < 0.1):
            kind, index = work.pop()
            rank, prompt, most = requests[index]
            if kind == "submit":
                h.submit(submit_of(index + 1, prompt, most), rank=rank % 2)
            else:
                if index + 1 not in h.ends:
                    h.aborted.add(index + 1)
                h.abort(index + 1, rank=rank % 2)
            continue
        move = order.choice(moves)
        if isinstance(move, int):
            job = h.jobs[move][0]
            told.setdefault(job.epoch, set()).add((job.bucket, job.ranks))
            h.move(move)
            ran = h.devices[move].ran[-1]
            assert ran <= job.ranks[move][1]
            assert sum(job.samples) <= job.ranks[move][2]
        else:
            h.move(move)
    h.check_texts()
    h.check_all_returned()
    assert all(len(one) == 1 for one in told.values())
    for rank in order.sample(range(2), 2):
        h.tell(Stop(), rank)
    h.finish()
    assert h.stopped == {0: "stopped", 1: "stopped"}


# ---- rounds whose results are given by hand --------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "run", "kept", "finish"),
    [
        ({}, [8, 1, 9, 9], [8, 1], STOP_EOS),
        ({"ignore_eos": True}, [8, 1, 9, 9], [8, 1, 9, 9], None),
        ({"min_new_tokens": 3}, [8, 1, 1, 9], [8, 1, 1], STOP_EOS),
        ({"stop_token_ids": (9,)}, [8, 9, 1, 9], [8, 9], STOP_TOKEN),
        ({"stop_token_ids": (9,), "min_new_tokens": 2}, [9, 9, 9, 9], [9, 9], STOP_TOKEN),
        ({"stop_token_ids": (1,)}, [1, 9, 9, 9], [1], STOP_EOS),
        ({}, [8, 8, 8, 1], [8, 8, 8, 1], STOP_EOS),
    ],
)
def test_a_round_counts_up_to_the_token_that_ends_its_request(
    how: dict[str, object], run: list[int], kept: list[int], finish: int | None
) -> None:
    h = drafting()
    begun(h, submit_of(1, 4, 40, **how))
    answer(h, [run], [8])
    assert h.text[1] == [7, *kept]
    assert h.ends.get(1) == (None if finish is None else [(finish, 200)])


def test_a_round_behind_the_end_is_dropped() -> None:
    """I6: the step was queued before the host knew."""
    h = drafting()
    begun(h, submit_of(1, 4, 40))
    answer(h, [[8, 1]], [6])
    answer(h, [[9, 9, 9, 9]], [10])
    assert h.text[1] == [7, 8, 1]
    assert not h.jobs[0]
    h.check_all_returned()


def test_a_request_ends_by_length_within_a_round_and_the_next_step_has_no_row_for_it() -> None:
    h = drafting()
    begun(h, submit_of(1, 4, 5))
    first, second = h.jobs[0]
    assert (list(first.verify), list(second.verify)) == ([4], [3])
    answer(h, [[8, 8, 8, 8]], [8])
    assert h.ends == {1: [(LENGTH, 200)]}
    answer(h, [[]], [8])
    h.check_all_returned()


def test_what_may_be_verified_shrinks_towards_the_end_of_a_request() -> None:
    h = drafting()
    begun(h, submit_of(1, 4, 4))
    assert list(h.jobs[0][0].verify) == [3]
    assert list(h.jobs[0][1].verify) == [2]
    answer(h, [[8]], [5])
    answer(h, [[8]], [6])
    assert list(h.jobs[0][0].verify) == [1]
    assert h.jobs[0][0].budget == 0


def test_log_probabilities_are_cut_with_their_tokens() -> None:
    h = drafting()
    begun(h, submit_of(1, 4, 40, logprobs=1), submit_of(2, 4, 40))
    tops = np.arange(6, dtype=np.int32)
    columns = LogprobColumns(
        tops.astype(np.float32).tobytes(),
        bytes([1, 1, 1, 1, 0, 0]),
        tops[:4].tobytes(),
        tops[:4].astype(np.float32).tobytes(),
    )
    answer(h, [[8, 1, 9, 9], [8, 8]], [8, 6], logprobs=columns)
    out = h.outs[-1]
    assert list(out.counts) == [2, 2]
    assert np.frombuffer(out.logprobs.chosen, np.float32).tolist() == [0, 1, 4, 5]
    assert np.frombuffer(out.logprobs.top_ids, np.int32).tolist() == [0, 1]
    assert (list(out.verified), list(out.accepted)) == ([3, 3], [3, 1])


def test_a_device_that_is_not_as_far_as_the_host_is_given_up() -> None:
    h = drafting()
    begun(h, submit_of(1, 4, 40))
    with pytest.raises(DeviceFailed, match=r"computed \[7\] positions, the host counts \[6\]"):
        answer(h, [[8, 8]], [7])


def test_a_live_request_without_a_token_or_with_too_many_is_the_devices_fault() -> None:
    for run in ([], [8] * 5):
        h = drafting()
        begun(h, submit_of(1, 4, 40))
        with pytest.raises(DeviceFailed, match="were to be sampled"):
            answer(h, [run], [4 + len(run)])


def test_the_anchor_is_named_only_where_no_step_in_flight_has_it() -> None:
    h = drafting()
    begun(h, submit_of(1, 4, 40))
    first, second = h.jobs[0]
    assert np.frombuffer(second.tokens, np.int32).tolist() == [-1]
    assert np.frombuffer(second.starts, np.int32).tolist() == [8]
    assert first.binds == ()


def test_a_bind_says_where_its_request_ends() -> None:
    h = drafting()
    h.submit(submit_of(1, 4, 40))
    assert [bind.ends_at for bind in h.jobs[0][0].binds] == [44]
    plain = Harness()
    plain.submit(submit_of(1, 4, 40))
    assert (plain.jobs[0][0].binds[0].ends_at, plain.jobs[0][0].verify) == (0, b"")


def test_a_block_that_reaches_beyond_two_window_pages_is_refused() -> None:
    setup_of(speculation=Speculation(64, STATIC))
    with pytest.raises(ConfigError, match="must be 1 to 64"):
        setup_of(speculation=Speculation(65, STATIC))


def test_a_failed_row_ends_alone_also_with_drafts() -> None:
    """I15."""
    h = drafting()
    begun(h, submit_of(1, 4, 40), submit_of(2, 4, 40))
    answer(h, [[], [8, 8]], [5, 6], failed=((0, "no token has a probability"),))
    assert h.ends == {1: [(FAILED, 500)]}
    assert h.text[2] == [7, 8, 8]


def test_snapshots_count_what_drafts_brought_and_where_rounds_were_cut() -> None:
    h = drafting()
    h.tell(Tick(1.0, 1.0))
    begun(h, submit_of(1, 4, 40), submit_of(2, 4, 40))
    answer(h, [[8, 8, 1, 8], [8]], [8, 5])
    h.tell(Tick(2.0, 2.0))
    before, after = (snapshot.counters for snapshot in h.snapshots)
    assert before.keys() == after.keys()
    names = ("drafts", "draft_tokens", "verified_tokens", "accepted_tokens", "emitted_tokens")
    assert [after[f"spec_{name}_total"] for name in names] == [2, 6, 6, 3, 5]
    assert [after[f'spec_accepted_tokens_per_pos_total{{position="{place}"}}'] for place in (1, 2, 3)] == [
        1
    ] * 3
    assert after['spec_verify_length_total{rows="4"}'] == 2
    assert after['spec_rows_truncated_total{reason="stop"}'] == 1
    assert after['spec_steps_total{kind="draft"}'] == 1
    assert after['spec_verify_tier_total{tier="eager"}'] == 1
    assert after["spec_accept_length"] == 2.5
    assert "spec_drafts_total" not in Harness().rank._ledger.counters(h.rank.requests, h.rank.planner, {})


def test_snapshots_count_the_captured_sizes_that_verified_drafts_ran_at() -> None:
    h = drafting(graphs=Graphs(decode=(4, 8, 16)))
    h.tell(Tick(1.0, 1.0))
    begun(h, submit_of(1, 4, 40), submit_of(2, 4, 40))
    answer(h, [[8, 8, 1, 8], [8]], [8, 5])
    h.tell(Tick(2.0, 2.0))
    before, after = (tiers_of(snapshot.counters) for snapshot in h.snapshots)
    assert before == {"eager": 0, "4": 0, "8": 0, "16": 0}
    # Two requests with three drafts each; the prompts before them ran eagerly, and had no drafts.
    assert after == {"eager": 0, "4": 0, "8": 1, "16": 0}


def tiers_of(counters: dict[str, float]) -> dict[str, float]:
    """Steps by tier."""
    name = "spec_verify_tier_total"
    return {key.split('"')[1]: value for key, value in counters.items() if key.startswith(name)}
