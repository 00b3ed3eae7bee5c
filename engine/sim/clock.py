"""Virtual time: a clock that stands while anything can run, and an agenda of what happens next.

Timers of the engine sleep on the loop's clock as ever. What the simulated world does (bytes that arrive,
steps that end, faults) stands on the agenda, in order of its time and then of its entry.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

import trio
import trio.testing


class Agenda:
    """What the world does next. `run` moves the clock of the loop that it runs in."""

    def __init__(self, clock: trio.testing.MockClock) -> None:
        self._clock = clock
        self._items: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()

    def now_s(self) -> float:
        """Virtual seconds."""
        return self._clock.current_time()

    def at(self, due_s: float, act: Callable[[], None]) -> None:
        """Calls `act` at this time; it must not raise."""
        heapq.heappush(self._items, (due_s, next(self._number), act))

    def after(self, wait_s: float, act: Callable[[], None]) -> None:
        """Calls `act` so much later."""
        self.at(self.now_s() + wait_s, act)

    def leap(self, by_s: float) -> None:
        """The clock leaps; whatever was due meanwhile happens at the new time."""
        self._clock.jump(by_s)

    async def run(self) -> None:
        """For ever: waits until no task can run, then lets the next thing happen."""
        clock, items = self._clock, self._items
        while True:
            await trio.testing.wait_all_tasks_blocked()
            next_s = trio.lowlevel.current_statistics().seconds_to_next_deadline
            now_s = clock.current_time()
            if items and items[0][0] <= now_s + next_s:
                due_s = items[0][0]
                if due_s > now_s:
                    clock.jump(due_s - now_s)
                # All of one instant at once: who of them is served first is the schedule's choice.
                while items and items[0][0] <= due_s:
                    heapq.heappop(items)[2]()
            elif next_s == float("inf"):
                raise RuntimeError("nothing can happen any more, and nobody has ended the run")
            elif next_s > 0:
                clock.jump(next_s)
