"""The policy as values: who is first, where chunks end, what is set aside, what all ranks decide."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.actors.schedule import (
    DECODE,
    EXTEND,
    IDLE,
    MIXED,
    PASS_LIMIT,
    RATIO_LEAST,
    RATIO_ONE,
    Graphs,
    Want,
    can_admit,
    chunk_end,
    decayed,
    decide,
    expected_pages,
    line,
    mode_of,
    raised,
)
from engine.config import PAGE_TOKENS

GRAPHS = Graphs(decode=(1, 2, 4, 8), prefill=(64, 256, 1024))


def column(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def test_the_line_goes_by_passes_then_priority_then_arrival() -> None:
    passed = column(0, 0, PASS_LIMIT, 0, PASS_LIMIT - 1)
    priority = column(0, 5, -3, 5, 9)
    arrival = column(0, 3, 4, 1, 2)
    assert line(passed, priority, arrival).tolist() == [2, 4, 3, 1, 0]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(0, 3), st.randoms())
def test_nobody_is_passed_more_often_than_the_limit(later: list[int], own: int, order: random.Random) -> None:
    """No starvation: one admission a round from a queue that gains a request a round."""
    passed, priority, arrival = column(0), column(own), column(0)
    for number, more in enumerate([*later, *[3] * 4 * PASS_LIMIT], 1):
        passed, priority = np.append(passed, 0), np.append(priority, more)
        arrival = np.append(arrival, number)
        first = line(passed, priority, arrival)[0]
        if arrival[first] == 0:
            return
        passed[arrival < arrival[first]] += 1
        passed, priority, arrival = (np.delete(c, first) for c in (passed, priority, arrival))
        assert number <= PASS_LIMIT
    raise AssertionError("never served")


@given(st.integers(0, 3000), st.integers(1, 3000), st.integers(0, 2048), st.integers(1, 2048))
def test_a_chunk_is_whole_or_ends_on_a_page_and_never_exceeds_its_room(
    start: int, left: int, room: int, budget: int
) -> None:
    room = min(room, budget)
    end = chunk_end(start, start + left, room, budget)
    assert start <= end <= min(start + left, start + room)
    if start < end < start + left:
        cannot_reach = room == budget and (start + room) // PAGE_TOKENS * PAGE_TOKENS <= start
        assert end % PAGE_TOKENS == 0 or cannot_reach
    if room == budget:
        assert end > start, "a prompt that has the whole budget always gets on"


def test_expected_pages_count_what_is_computed_and_a_share_of_the_rest() -> None:
    computed, ends = column(256, 256, 1, 700), column(257, 769, 1, 701)
    assert expected_pages(computed, ends, RATIO_ONE).tolist() == [1, 3, 1, 3]
    assert expected_pages(computed, ends, RATIO_ONE // 2).tolist() == [1, 2, 1, 3]


@pytest.mark.parametrize(
    ("need", "expected", "free", "reserved", "alone", "answer"),
    [
        (3, 9, 3, 0, True, True),
        (4, 4, 3, 0, True, False),
        (1, 2, 5, 3, False, True),
        (1, 3, 5, 3, False, False),
    ],
)
def test_admission_leaves_what_is_reserved(
    need: int, expected: int, free: int, reserved: int, alone: bool, answer: bool
) -> None:
    assert can_admit(need, expected, free, reserved, alone) is answer


@given(st.integers(RATIO_LEAST, RATIO_ONE))
def test_the_reserved_share_stays_between_its_bounds(ratio: int) -> None:
    assert RATIO_LEAST <= decayed(ratio) <= ratio <= raised(ratio) <= RATIO_ONE


@pytest.mark.parametrize(
    ("decodes", "chunks", "mode"), [(0, 0, IDLE), (0, 2, EXTEND), (3, 0, DECODE), (3, 1, MIXED)]
)
def test_the_mode_says_what_rides(decodes: int, chunks: int, mode: int) -> None:
    assert mode_of(decodes, chunks) == mode


def extend(tokens: int, vote: int = 1) -> Want:
    """A rank that computes prompts."""
    return Want(tokens=tokens, logit_rows=1, has_extend=1, mode=EXTEND, prefill_graph=vote)


def decode(tokens: int, vote: int = 1) -> Want:
    """A rank that decodes."""
    return Want(tokens=tokens, logit_rows=tokens, decode_graph=vote, mode=DECODE)


@pytest.mark.parametrize(
    ("wants", "bucket", "reason"),
    [
        ([decode(3), decode(1)], 4, "ok"),
        ([decode(3), Want()], 4, "ok"),
        ([decode(9), decode(1)], 0, "no_bucket"),
        ([decode(3, vote=0), decode(1)], 0, "vote"),
        ([extend(200), decode(1)], 256, "ok"),
        ([extend(200), Want()], 0, "inactive_rank"),
        ([extend(200, vote=0), decode(1)], 0, "vote"),
        ([extend(15), decode(1)], 0, "padding"),
        ([extend(16), decode(1)], 64, "ok"),
        ([extend(2000), decode(1)], 0, "no_bucket"),
    ],
)
def test_the_decision_is_a_table(wants: list[Want], bucket: int, reason: str) -> None:
    decision = decide(wants, GRAPHS)
    assert (decision.bucket, decision.reason, decision.runs) == (bucket, reason, True)
    assert decision.tokens == tuple(want.tokens for want in wants)


def test_without_graphs_every_step_is_eager_and_without_tokens_nobody_runs() -> None:
    assert decide([decode(3)], Graphs()).bucket == 0
    assert not decide([Want(), Want()], GRAPHS).runs
