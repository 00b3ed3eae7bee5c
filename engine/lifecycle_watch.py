"""Tells a rank that hangs from one that takes long: by its signs of life, never by asking it.

A rank says that its loop turns, since when its step runs, and what a step may take. A long legal step is
within its budget; a step beyond it is for the rank's own watchdog, and only then for this one; a loop that
doesn't turn (a stopped process, a native call that never returns) is for this one alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import anyio

from engine.children import Child
from engine.lifecycle_box import DUMP
from engine.lifecycle_pulse import PulseBoard
from engine.messages import Beat

POLL_S = 0.1
LATE_S = 1.0
"""A look that comes so late says that this process itself, or the host, stood still: nobody is blamed."""

LEAST_S = 4.0
"""No silence that is shorter is a fault: a busy host doesn't run every process at once."""

GRACE_S = 1.0
"""The rank's own watchdog and its peers come first: they know more."""

LOADING_S = 300.0
"""While a model loads, native calls may hold the interpreter for long."""

DUMP_S = 0.3


class HangWatch:
    """Looks at every rank, until it is cancelled.

    silence_s  that a serving rank may keep, at least LEAST_S
    up         ranks that serve
    give_up    called with the rank and the cause; the rank is killed right after
    """

    def __init__(
        self,
        board: PulseBoard,
        children: Mapping[int, Child],
        up: set[int],
        silence_s: float,
        give_up: Callable[[int, str], None],
    ) -> None:
        self._board, self._children, self._up = board, children, up
        self._silence_s = max(silence_s, LEAST_S)
        self._give_up = give_up
        self._changed: dict[int, tuple[float, float]] = {}

    async def run(self) -> None:
        """For ever."""
        before_s = anyio.current_time()
        while True:
            await anyio.sleep(POLL_S)
            now_s = anyio.current_time()
            if now_s - before_s > LATE_S:
                self._changed.clear()
            before_s = now_s
            beats = {beat.slot: beat for beat in self._board.read_all()}
            for rank, child in list(self._children.items()):
                if child.process.returncode is None and rank in beats:
                    cause = self._fault(rank, beats[rank], now_s)
                    if cause:
                        await self._end(rank, child, cause)

    def _fault(self, rank: int, beat: Beat, now_s: float) -> str:
        """Why the rank is given up; empty where it isn't."""
        if beat.torn:
            return ""
        wall_s, since_s = self._changed.get(rank, (-1.0, now_s))
        if beat.wall_s != wall_s:
            since_s = now_s
        self._changed[rank] = (beat.wall_s, since_s)
        silent_s, may_s = now_s - since_s, self._silence_s + GRACE_S if rank in self._up else LOADING_S
        if silent_s > may_s:
            running = f"its step has run for {beat.step_age_s:.1f} s" if beat.step_age_s else "no step runs"
            return f"gave no sign of life for {silent_s:.1f} s, at most {may_s:.1f} are allowed; {running}"
        if silent_s > 2 * LATE_S:
            return ""  # Nobody knows whether the step is over: its own limit counts.
        limit_s = beat.step_budget_s + 2 * GRACE_S
        if beat.step_age_s > limit_s:
            return (
                f"has been in one step for {beat.step_age_s:.1f} s; its budget is {beat.step_budget_s:.1f} s"
            )
        return ""

    async def _end(self, rank: int, child: Child, cause: str) -> None:
        self._changed.pop(rank, None)
        self._give_up(rank, cause)
        child.process.send_signal(DUMP)
        with anyio.move_on_after(DUMP_S):
            await child.process.wait()
        child.kill()
