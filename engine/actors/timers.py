"""One heap of deadlines and one sleeping task a process.

A time-out round each wait costs more than the message that it guards; here arming is a heap push.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import anyio

COMPACT_AT = 64
"""Cancelled entries that may stay in the heap; beyond it and beyond half of the heap they are removed."""


class Timer:
    """One armed deadline; `due_s` is on the loop's monotonic clock."""

    __slots__ = ("act", "due_s", "number")

    def __init__(self, due_s: float, number: int, act: Callable[[], None]) -> None:
        self.due_s = due_s
        self.number = number
        self.act: Callable[[], None] | None = act

    def __lt__(self, other: Timer) -> bool:
        # Equal deadlines fire in the order in which they were armed, so that a simulated run is one run.
        return (self.due_s, self.number) < (other.due_s, other.number)


class Timers:
    """Deadlines of one process. `run` must be running for anything to fire."""

    def __init__(self) -> None:
        self._heap: list[Timer] = []
        self._armed = 0
        self._cancelled = 0
        self._sleeps_until = float("-inf")
        self._earlier: anyio.Event | None = None

    def __len__(self) -> int:
        return len(self._heap) - self._cancelled

    def after(self, wait_s: float, act: Callable[[], None]) -> Timer:
        """Calls `act` once, `wait_s` seconds from now, on the loop; `act` must not raise."""
        return self.at(anyio.current_time() + wait_s, act)

    def at(self, due_s: float, act: Callable[[], None]) -> Timer:
        """Calls `act` once at `due_s` of the loop's clock."""
        self._armed += 1
        timer = Timer(due_s, self._armed, act)
        heapq.heappush(self._heap, timer)
        if self._earlier is not None and due_s < self._sleeps_until:
            self._earlier.set()
        return timer

    def cancel(self, timer: Timer) -> None:
        """Drops a timer; one that has fired or was dropped before is left as it is."""
        if timer.act is None:
            return
        timer.act = None
        self._cancelled += 1
        if self._cancelled > COMPACT_AT and 2 * self._cancelled > len(self._heap):
            self._heap = [kept for kept in self._heap if kept.act is not None]
            heapq.heapify(self._heap)
            self._cancelled = 0

    async def run(self) -> None:
        """Sleeps until the earliest deadline, fires what is due, for ever."""
        while True:
            self._fire_due()
            self._earlier = anyio.Event()
            self._sleeps_until = self._heap[0].due_s if self._heap else float("inf")
            with anyio.CancelScope(deadline=self._sleeps_until):
                await self._earlier.wait()
            self._earlier = None

    def _fire_due(self) -> None:
        now_s = anyio.current_time()
        while self._heap and (self._heap[0].act is None or self._heap[0].due_s <= now_s):
            timer = heapq.heappop(self._heap)
            act, timer.act = timer.act, None
            if act is None:
                self._cancelled -= 1
            else:
                act()
