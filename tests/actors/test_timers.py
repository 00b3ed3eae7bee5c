"""The heap of deadlines: exact, stable, cancellable."""

from __future__ import annotations

import anyio
import pytest

from engine.actors.timers import COMPACT_AT, Timers

pytestmark = pytest.mark.anyio


async def test_timers_fire_exactly_at_their_deadlines_and_ties_in_the_order_of_arming() -> None:
    timers = Timers()
    began = anyio.current_time()
    fired: list[tuple[str, float]] = []

    def note(name: str) -> None:
        fired.append((name, anyio.current_time() - began))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(timers.run)
        for name, wait_s in (("c", 3.0), ("a", 1.0), ("c2", 3.0), ("b", 2.0)):
            timers.after(wait_s, lambda name=name: note(name))
        await anyio.sleep(10)
        tasks.cancel_scope.cancel()
    assert fired == [("a", 1.0), ("b", 2.0), ("c", 3.0), ("c2", 3.0)]


async def test_a_deadline_armed_while_the_task_sleeps_for_a_later_one_isnt_late() -> None:
    timers = Timers()
    began = anyio.current_time()
    fired: list[float] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(timers.run)
        timers.after(100, lambda: fired.append(anyio.current_time() - began))
        await anyio.sleep(1)
        timers.after(0.5, lambda: fired.append(anyio.current_time() - began))
        await anyio.sleep(200)
        tasks.cancel_scope.cancel()
    assert fired == [1.5, 100.0]


async def test_cancelled_timers_dont_fire_and_dont_pile_up() -> None:
    timers = Timers()
    fired: list[int] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(timers.run)
        for number in range(10_000):
            timers.cancel(timers.after(300, lambda number=number: fired.append(number)))
        assert len(timers) == 0
        assert len(timers._heap) <= 2 * COMPACT_AT
        await anyio.sleep(1000)
        tasks.cancel_scope.cancel()
    assert fired == []


async def test_cancelling_a_fired_timer_changes_nothing() -> None:
    timers = Timers()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(timers.run)
        timer = timers.after(1, lambda: None)
        await anyio.sleep(2)
        timers.cancel(timer)
        assert len(timers) == 0
        tasks.cancel_scope.cancel()
