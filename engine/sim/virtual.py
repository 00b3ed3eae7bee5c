"""The device thread of a simulated rank: takes its time, breaks when told to."""

from __future__ import annotations

from collections.abc import Callable

import anyio

from engine.actors.device import StepRunner, check_room
from engine.errors import DeviceFailed
from engine.messages import RunStep, StepDone
from engine.sim.clock import Agenda


class VirtualDevice:
    """Carries jobs out in virtual time, two at most, one after the other.

    step_s   seconds that the next step takes
    load_s   seconds that loading takes
    stall_s  seconds that the next step takes longer, once
    breaks   the next step ends the device with an error
    dead     its process is gone
    """

    def __init__(
        self,
        make: Callable[[], StepRunner],
        deliver: Callable[[StepDone], None],
        agenda: Agenda,
        step_s: Callable[[], float],
        load_s: float,
    ) -> None:
        self.stall_s = 0.0
        self.breaks = False
        self.dead = False
        self.in_flight = 0
        self._make = make
        self._deliver = deliver
        self._agenda = agenda
        self._step_s = step_s
        self._load_s = load_s
        self._made = anyio.Event()
        self._runner: StepRunner | None = None
        self._free_at_s = 0.0
        self._error: Exception | None = None
        self._ended = anyio.Event()

    def submit(self, job: RunStep) -> None:
        """As Device.submit."""
        check_room(job, self.in_flight)
        self.in_flight += 1
        self._free_at_s = max(self._free_at_s, self._agenda.now_s()) + self._step_s() + self.stall_s
        self.stall_s = 0.0
        self._agenda.at(self._free_at_s, lambda: self._finish(job))

    async def runner(self) -> StepRunner:
        """As Device.runner."""
        await self._made.wait()
        assert self._runner is not None
        return self._runner

    async def run(self, stop_within_s: float) -> None:
        """As Device.run."""
        await anyio.sleep(self._load_s)
        self._runner = self._make()
        self._made.set()
        await self._ended.wait()
        raise DeviceFailed(f"the device ended: {self._error!r}") from self._error

    def _finish(self, job: RunStep) -> None:
        assert self._runner is not None
        if self._error is not None or self.dead:
            return
        if self.breaks:
            self._error = DeviceFailed(f"an illegal address was encountered in step {job.epoch}")
            self._ended.set()
            return
        self.in_flight -= 1
        self._deliver(self._runner.execute(job))
