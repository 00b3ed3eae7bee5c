"""Routing policies as pure functions, and budgets between two looks at the ranks' loads."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.actors.core import Reply
from engine.actors.ingress import Ingress
from engine.actors.routing import PREFIX_KEPT, PREFIX_SLACK, REFRESH_S, Budgets, Router, Unit, units_of
from engine.board import LoadBoard, board_of
from engine.config import PAGE_TOKENS
from engine.errors import ConfigError
from engine.messages import Accepted, Enqueue, Entry, RankLoad, RankUp, Sampling
from engine.shared_lines import LINE_BYTES


def unit(tokens: int = 1, route: int = -1, start: int = 0, count: int = 1, salt: str = "") -> Unit:
    """Requests with one prompt that begins with token `start` and goes on alike for equal starts."""
    prompt = np.arange(start, start + tokens, dtype=np.int32).tobytes()
    return Unit(0, count, route, tokens * count, prompt, salt)


def spread(router: Router, *units: Unit, requests: tuple[int, ...] = (0, 0)) -> list[int]:
    """Where the units go; they are noted as sent."""
    live = list(range(router.ranks))
    ranks = router.assign(units, live, dict(enumerate(requests)), router.budgets.tokens)
    router.note(units, ranks)
    return ranks


def test_round_robin_takes_ranks_in_turn_over_batches_and_skips_what_is_demanded() -> None:
    router = Router("round_robin", 3)
    assert spread(router, unit(), unit(), requests=(9, 0, 0)) == [0, 1]
    assert spread(router, unit(route=2), unit(), unit(), requests=(0, 0, 0)) == [2, 2, 0]


def test_a_batch_is_spread_over_the_emptiest_ranks_one_by_one() -> None:
    assert spread(Router("total_requests", 2), *[unit()] * 5, requests=(2, 0)) == [1, 1, 0, 1, 0]


def test_completions_of_one_prompt_count_as_many() -> None:
    assert spread(Router("total_requests", 2), unit(count=3), unit(), unit()) == [0, 1, 1]


def test_total_tokens_weighs_prompts_and_breaks_ties_by_requests() -> None:
    router = Router("total_tokens", 2)
    assert spread(router, unit(100), unit(10), unit(10), unit(10)) == [0, 1, 1, 1]
    assert spread(Router("total_tokens", 2), unit(), requests=(1, 0)) == [1]


def test_a_known_beginning_goes_where_it_was_unless_that_rank_is_much_fuller() -> None:
    router = Router("prefix_aware", 2)
    page = PAGE_TOKENS
    assert spread(router, unit(page + 5, start=7), requests=(1, 0)) == [1]
    assert spread(router, unit(page + 90, start=7), requests=(0, PREFIX_SLACK)) == [1]
    assert spread(router, unit(page + 90, start=7), requests=(0, PREFIX_SLACK + 1)) == [0]
    assert spread(router, unit(page + 90, start=8), requests=(0, 3)) == [0]
    assert spread(router, unit(page + 90, start=7, salt="other"), requests=(0, 3)) == [0]


def test_the_longest_known_beginning_decides_and_a_batch_follows_its_first() -> None:
    router = Router("prefix_aware", 2)
    spread(router, unit(PAGE_TOKENS), requests=(0, 1))
    spread(router, unit(2 * PAGE_TOKENS, route=1))
    assert spread(router, unit(2 * PAGE_TOKENS + 1), requests=(0, 0)) == [1]
    fresh = [unit(PAGE_TOKENS, start=900)] * 3
    assert len(set(spread(router, *fresh))) == 1


def test_remembered_beginnings_are_bounded_and_the_oldest_go_first() -> None:
    router = Router("prefix_aware", 2)
    for start in range(PREFIX_KEPT + 10):
        spread(router, unit(PAGE_TOKENS, start=start))
    assert len(router.known) == PREFIX_KEPT
    assert spread(router, unit(PAGE_TOKENS, start=PREFIX_KEPT + 5, route=1)) == [1]


# ---- budgets --------------------------------------------------------------------------------------


def test_between_two_looks_only_what_is_sent_counts_so_that_a_burst_spreads() -> None:
    budgets = Budgets(2)
    stale_view = (RankLoad(0, 1, 50, 0), RankLoad(1, 1, 60, 0))
    assert budgets.refresh(stale_view, 1.0) == "refreshed"
    budgets.add(0, 30)
    assert budgets.refresh((RankLoad(0, 2, 50, 0), RankLoad(1, 2, 60, 0)), 1.0 + REFRESH_S / 2) == "throttled"
    assert budgets.tokens == [80, 60]


def test_a_load_that_was_written_before_a_request_arrived_doesnt_forget_it() -> None:
    budgets = Budgets(1)
    budgets.add(0, 30)
    assert budgets.refresh((RankLoad(0, 1, 5, 10),), 1.0) == "refreshed"
    assert budgets.tokens == [5 + 20]
    assert budgets.refresh((RankLoad(0, 2, 35, 30),), 2.0) == "refreshed"
    assert budgets.tokens == [35]


def test_a_load_that_was_seen_changes_nothing() -> None:
    budgets = Budgets(1)
    budgets.refresh((RankLoad(0, 4, 5, 0),), 1.0)
    before = budgets.snapshot()
    assert budgets.refresh((RankLoad(0, 4, 5, 0),), 9.0) == "stale"
    assert budgets.refresh((), 9.0) == ""
    assert budgets.snapshot() == before


def test_without_published_loads_ended_requests_give_their_tokens_back() -> None:
    budgets = Budgets(1)
    budgets.add(0, 30)
    budgets.remove(0, 30)
    assert budgets.tokens == [0]
    budgets.refresh((RankLoad(0, 1, 7, 30),), 1.0)
    budgets.remove(0, 30)
    assert budgets.tokens == [7]


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(1, 100), st.booleans()), max_size=30))
def test_an_estimate_is_never_below_what_a_rank_holds_for_certain(
    events: list[tuple[int, int, bool]],
) -> None:
    """Ranks that keep what they get, and publish at any moment: nothing that was sent is ever forgotten."""
    budgets, sent, held, now_s = Budgets(2), [0, 0], [0, 0], 0.0
    for number, (rank, tokens, arrives) in enumerate(events):
        now_s += 0.011
        budgets.add(rank, tokens)
        sent[rank] += tokens
        if arrives:
            held[rank] = sent[rank]
        loads = tuple(RankLoad(one, number, held[one], held[one]) for one in range(2))
        budgets.refresh(loads, now_s)
        assert budgets.tokens == sent


# ---- units and ingress ----------------------------------------------------------------------------


def test_a_demanded_group_is_one_unit_and_a_prompts_completions_are_one_otherwise() -> None:
    entries = tuple(Entry(0, b"\0\0\0\0", Sampling(1), child=child) for child in (0, 1, 0, 0, 1, 2))
    assert [(one.first, one.count) for one in units_of(Enqueue(entries, 1))] == [(0, 6)]
    assert [(one.first, one.count) for one in units_of(Enqueue(entries))] == [(0, 2), (2, 1), (3, 3)]


@pytest.mark.parametrize("policy", ["round_robin", "total_requests", "total_tokens", "prefix_aware"])
def test_limit_and_acceptance_see_the_same_assignment(policy: str) -> None:
    core = Ingress(2, 2, policy)
    for rank in range(2):
        core.receive(RankUp(rank))
    loads = (RankLoad(0, 1, 9, 0), RankLoad(1, 1, 0, 0))
    entry = Entry(0, b"\0\0\0\0", Sampling(1))
    for now_s in (1.0, 2.0, 3.0, 4.0):
        reply = core.receive(Enqueue((entry,), slot="slot", now_s=now_s, loads=loads))[-1]
        assert isinstance(reply, Reply)
        if isinstance(reply.value, Accepted):
            assert reply.value.refresh == ("refreshed" if now_s == 1.0 else "stale")
        assert core.loads_are_within_limits()


# ---- the shared memory of loads -------------------------------------------------------------------


def test_what_a_rank_publishes_is_read_and_numbered() -> None:
    file = LoadBoard.create(2)
    writer, reader = LoadBoard(file, 2), LoadBoard(file, 2)
    assert reader.read_all() == ()
    board_of(file, 2).tell(RankLoad(1, 0, 300, 20))
    writer.write(1, 400, 21)
    assert reader.read_all() == (RankLoad(1, 2, 400, 21),)
    os.close(file)


def test_a_slot_in_change_or_torn_is_not_believed() -> None:
    file = LoadBoard.create(1)
    board = LoadBoard(file, 1)
    for number in (1, 2, 3):
        board.write(0, number, number)
    board.lines[2, 0] -= 1
    assert board.read(0) == RankLoad(0, 2, 2, 2)
    for _ in range(2):
        board.lines[1, 0] += 1
        assert board.read(0) is None
    os.close(file)


class HeldUp(LoadBoard):
    """A reader that is held up behind the first copy: two loads are written, the second not to its end."""

    held = False

    def _whole(self, line: NDArray[np.int64]) -> tuple[int, tuple[int, ...]] | None:
        found = super()._whole(line)
        if not self.held:
            self.held = True
            for number in (4, 5):
                self.write(0, number, number)
            self.lines[2, 0] -= 1
        return found


def test_no_reader_goes_back_to_what_was_before() -> None:
    file = LoadBoard.create(1)
    board = HeldUp(file, 1)
    for number in (1, 2, 3):
        board.write(0, number, number)
    assert board.read(0) == RankLoad(0, 4, 4, 4)
    os.close(file)


def test_a_reader_beside_a_busy_writer_sees_only_whole_loads() -> None:
    file = LoadBoard.create(1)
    writer, reader = LoadBoard(file, 1), LoadBoard(file, 1)

    def write() -> None:
        for number in range(1, 5000):
            writer.write(0, number, 2 * number)

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(write)
        last = 0
        while not done.done():
            load = reader.read(0)
            if load is not None:
                assert load.received == 2 * load.tokens
                assert load.number >= last
                last = load.number
        done.result()
    os.close(file)


def test_another_file_is_refused() -> None:
    file = LoadBoard.create(2)
    with pytest.raises(ConfigError, match=f"has {5 * LINE_BYTES} bytes"):
        LoadBoard(file, 3)
    os.pwrite(file, b"\1", 8)
    os.pwrite(file, b"\7", 0)
    with pytest.raises(ConfigError, match="begins with"):
        LoadBoard(file, 2)
    os.close(file)
