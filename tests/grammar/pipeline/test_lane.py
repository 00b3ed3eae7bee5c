"""A lane does jobs one at a time and in order, whoever does them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from engine.grammar.lane import Lane

NAME = "a lane"


@pytest.fixture
def lane() -> Iterator[Lane]:
    made = Lane(NAME)
    yield made
    made.close()


def name() -> str:
    return threading.current_thread().name


def test_a_job_that_is_handed_over_is_done_by_the_lanes_thread(lane: Lane) -> None:
    assert lane.submit(name).result() == NAME


def test_a_job_at_once_is_done_by_who_asks(lane: Lane) -> None:
    assert lane.at_once(name) == name()


def test_a_job_at_once_comes_behind_those_handed_over(lane: Lane) -> None:
    """The lane's thread is held in the first one; the others are done by who asks, or by that thread."""
    held, begun, order = threading.Event(), threading.Event(), list[int]()

    def first() -> None:
        begun.set()
        held.wait()
        order.append(0)

    lane.submit(first)
    begun.wait()
    others = [lane.submit(order.append, number) for number in (1, 2, 3)]
    asking = threading.Thread(target=lane.at_once, args=(order.append, 4))
    asking.start()
    held.set()
    asking.join()
    assert all(one.done() for one in others)
    assert order == [0, 1, 2, 3, 4]


def test_jobs_of_several_threads_never_overlap(lane: Lane) -> None:
    """A sum that is read, and written a moment later, in which any other thread may run, loses nothing."""
    total = [0]

    def add() -> None:
        before = total[0]
        time.sleep(0)
        total[0] = before + 1

    def ask() -> None:
        for _ in range(200):
            lane.at_once(add)
            lane.submit(add)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    lane.at_once(lambda: None)
    assert total == [1200]


def test_what_a_job_raises_is_its_askers(lane: Lane) -> None:
    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        lane.at_once(fail)
    handed = lane.submit(fail)
    with pytest.raises(ValueError, match="no"):
        handed.result()
    assert lane.submit(name).result() == NAME


def test_a_closed_lane_has_done_all_its_jobs_and_takes_none() -> None:
    lane, done = Lane(NAME), list[int]()
    for number in range(50):
        lane.submit(done.append, number)
    lane.close()
    assert done == [*range(50)]
    with pytest.raises(RuntimeError, match="is closed"):
        lane.submit(name)
