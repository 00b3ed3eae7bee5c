"""Signs of life of all ranks in shared memory: a slot a rank, written by its loop, read without waiting.

Neither inference, nor a device, nor a lock is needed to read: a rank that is stuck holds up nobody. A line
(see shared_lines.py) is: rank, pid, wall clock (us), step began (us, monotonic; 0: none), its budget (us),
steps done, phase of the end.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from engine.actors.timers import Timers
from engine.messages import Beat, RunStep, StepDone
from engine.shared_lines import SharedLines

MICRO = 1_000_000

BEAT_S = 0.25
"""Between two signs of life."""

PHASES = ("running", "graphs", "caches", "barrier", "groups", "processes")
"""Of a rank's end, in their order; the number of one is its place."""


class PulseBoard(SharedLines):
    """The file in this process's memory. raises ConfigError"""

    NAME, MAGIC, FIELDS, TRIES = "signs of life", 0x65736C7570, 7, 5

    def read(self, slot: int, now_s: float) -> Beat | None:
        """The slot's newest sign of life; None where there was none.

        now_s  monotonic clock of the host, for the age of a step
        """
        found = self.get(slot)
        if found is None:
            return Beat(slot, torn=True)
        number, values = found
        if number == 0:
            return None
        rank, pid, wall_us, began_us, budget_us, done, phase = values
        age_s = now_s - began_us / MICRO if began_us else 0.0
        return Beat(slot, rank, pid, wall_us / MICRO, max(age_s, 0.0), budget_us / MICRO, done, phase)

    def read_all(self) -> tuple[Beat, ...]:
        """What can be read now."""
        now_s = time.monotonic()
        beats = (self.read(slot, now_s) for slot in range(self.ranks))
        return tuple(beat for beat in beats if beat is not None)


class Pulse:
    """A rank's own slot; every call is on its loop's thread. Without a board nothing is written.

    budget_s  time that a step may take, unless another is declared for it
    """

    def __init__(self, board: PulseBoard | None, rank: int, budget_s: float) -> None:
        self._board, self._rank = board, rank
        self._budget_us = int(budget_s * MICRO)
        self._began_us: list[int] = []
        self._done = 0
        self._phase = 0
        self._pid = os.getpid()
        self._wall_us = 0

    def beat(self, wall_s: float) -> None:
        """The loop turns."""
        self._wall_us = int(wall_s * MICRO)
        self._write()

    def step_began(self) -> None:
        """A step was given to the device."""
        self._began_us.append(time.monotonic_ns() // 1000)
        self._write()

    def step_ended(self) -> None:
        """Its results are here. The next one, if there is one, runs from now on."""
        self._began_us.pop(0)
        if self._began_us:
            self._began_us[0] = time.monotonic_ns() // 1000
        self._done += 1
        self._write()

    def enter(self, phase: int) -> None:
        """The next phase of the end has begun."""
        self._phase = phase
        self._write()

    def peers(self) -> list[tuple[int, int]]:
        """(pid, phase) of all ranks that can be read; empty without a board."""
        if self._board is None:
            return []
        beats = [self._board.read(slot, 0.0) for slot in range(self._board.ranks)]
        return [(beat.pid, beat.phase) for beat in beats if beat is not None and not beat.torn]

    def _write(self) -> None:
        if self._board is not None:
            began = self._began_us[0] if self._began_us else 0
            values = (self._rank, self._pid, self._wall_us, began, self._budget_us, self._done, self._phase)
            self._board.put(self._rank, *values)


def pulse_of(descriptor: int, rank: int, ranks: int, budget_s: float) -> Pulse:
    """The slot of a rank; descriptor -1: nobody reads. raises ConfigError"""
    return Pulse(None if descriptor < 0 else PulseBoard(descriptor, ranks), rank, budget_s)


def timed_submission(pulse: Pulse, submit: Callable[[RunStep], None]) -> Callable[[RunStep], None]:
    """`submit` of a device that also says that a step began."""

    def submitting(job: RunStep) -> None:
        submit(job)
        pulse.step_began()

    return submitting


def timed_delivery(pulse: Pulse, deliver: Callable[[StepDone], None]) -> Callable[[StepDone], None]:
    """`deliver` of a device that also says that a step ended."""

    def delivering(done: StepDone) -> None:
        pulse.step_ended()
        deliver(done)

    return delivering


def begin_to_beat(timers: Timers, pulse: Pulse, wall_s: Callable[[], float]) -> None:
    """From now on the loop says that it turns."""

    def act() -> None:
        pulse.beat(wall_s())
        timers.after(BEAT_S, act)

    act()
