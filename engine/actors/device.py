"""The device thread: steps in, results out; the loop never waits for a device.

One thread of a rank process owns the model, its streams and its graphs. It takes jobs from a queue that holds
at most two (one running, one prepared). A runner that launches a step without waiting for it gives what
waits: a second thread calls that and posts the result to the loop, while the first one plans and launches the
step that was prepared. Only these two may wait for a device. An error ends the rank process: after it nothing
on the device can be trusted, so nothing is restarted in place.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, cast, runtime_checkable

import anyio
import anyio.lowlevel

from engine.actors.timers import Timers
from engine.errors import DeviceFailed
from engine.messages import RunStep, StepDone

JOBS = 2
"""One step running and one prepared: enough to hide the host's work."""

PR_SET_NAME = 15


class StepRunner(Protocol):
    """What owns the model: plans and runs one step, waits for it, brings its results to the host."""

    def execute(self, job: RunStep) -> StepDone:
        """Runs on the device thread. Any exception ends the rank."""


@runtime_checkable
class Launches(Protocol):
    """A runner that needn't wait for a step before it plans the next one."""

    def launch(self, job: RunStep) -> StepDone | Callable[[], StepDone]:
        """Runs on the device thread, in order: the step's results, or what waits for them.

        What waits is called once, in order, on another thread; the next job may be launched before. Any
        exception of either ends the rank.
        """


class Device(Protocol):
    """Where a rank's `Run` effects go."""

    def submit(self, job: RunStep) -> None:
        """Never waits. Raises DeviceFailed for a third job."""

    async def runner(self) -> StepRunner:
        """Waits until the runner is made; for reading what it says of itself, not for running anything."""

    async def run(self, stop_within_s: float) -> None:
        """Works until the task is cancelled. Raises DeviceFailed with a job's error as its cause."""


class DeviceThread:
    """Runs jobs in order on a thread of its own.

    make     builds the runner, on the thread: whoever makes a model's streams and graphs owns them
    deliver  is called on the loop with each StepDone
    """

    def __init__(self, make: Callable[[], StepRunner], deliver: Callable[[StepDone], None]) -> None:
        self._make = make
        self._deliver = deliver
        self._made = anyio.Event()
        self._runner: StepRunner | None = None
        self._jobs: queue.SimpleQueue[RunStep | None] = queue.SimpleQueue()
        self._launched: queue.SimpleQueue[Callable[[], StepDone] | None] = queue.SimpleQueue()
        self._arrivals: threading.Thread | None = None
        self._in_flight = 0
        self._error: BaseException | None = None
        self._ended = anyio.Event()
        self._post: Callable[..., object] = _no_loop

    def submit(self, job: RunStep) -> None:
        """As Device.submit."""
        if self._in_flight >= JOBS:
            raise DeviceFailed(
                f"epoch {job.epoch} is a third step: {self._in_flight} of {JOBS} are in flight"
            )
        self._in_flight += 1
        self._jobs.put(job)

    async def runner(self) -> StepRunner:
        """As Device.runner."""
        await self._made.wait()
        assert self._runner is not None
        return self._runner

    async def run(self, stop_within_s: float) -> None:
        """Starts the thread and stays until it ends or the task is cancelled; then joins it.

        raises  DeviceFailed with the job's error as its cause
        """
        self._post = loop_poster()
        thread = threading.Thread(target=self._work, name="device", daemon=True)
        thread.start()
        try:
            await self._ended.wait()
        finally:
            self._jobs.put(None)
            if self._made.is_set() and self._error is None:
                thread.join(stop_within_s)
        if self._error is not None:
            raise DeviceFailed(f"the device thread ended: {self._error!r}") from self._error

    def _work(self) -> None:
        name_thread("device")
        try:
            runner = self._runner = self._make()
            self._post(self._made.set)
            launch = runner.launch if isinstance(runner, Launches) else runner.execute
            while (job := self._jobs.get()) is not None:
                self._hand_on(launch(job))
        except BaseException as error:
            self._fail(error)
        finally:
            if self._arrivals is not None:
                self._launched.put(None)
                self._arrivals.join()

    def _hand_on(self, step: StepDone | Callable[[], StepDone]) -> None:
        """Results go to the loop; what waits for some, and all that comes after it, to the second thread."""
        if self._arrivals is None:
            if isinstance(step, StepDone):
                self._post(self._finish, step)
                return
            self._arrivals = threading.Thread(target=self._await_results, name="arrivals", daemon=True)
            self._arrivals.start()
        self._launched.put(partial(_given, step) if isinstance(step, StepDone) else step)

    def _await_results(self) -> None:
        name_thread("arrivals")
        try:
            while (wait := self._launched.get()) is not None:
                self._post(self._finish, wait())
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Nobody above the thread's first frame could report it: the loop's side raises it anew."""
        # One error leads to others: the first one is the cause.
        self._error = self._error or error
        # Without a loop the process is ending, and nobody is left to tell.
        with contextlib.suppress(RuntimeError):
            self._post(self._ended.set)

    def _finish(self, done: StepDone) -> None:
        self._in_flight -= 1
        self._deliver(done)


class SimulatedDevice:
    """A device in virtual time, without a thread: each step is answered `step_s` after it could begin.

    step_s  seconds that the next step takes
    """

    def __init__(
        self,
        make: Callable[[], StepRunner],
        deliver: Callable[[StepDone], None],
        timers: Timers,
        step_s: Callable[[RunStep], float],
    ) -> None:
        self._make = make
        self._deliver = deliver
        self._timers = timers
        self._step_s = step_s
        self._made = anyio.Event()
        self._runner: StepRunner | None = None
        self._in_flight = 0
        self._free_at_s = 0.0

    def submit(self, job: RunStep) -> None:
        """As Device.submit."""
        check_room(job, self._in_flight)
        self._in_flight += 1
        self._free_at_s = max(self._free_at_s, anyio.current_time()) + self._step_s(job)
        self._timers.at(self._free_at_s, lambda: self._finish(job))

    async def runner(self) -> StepRunner:
        """As Device.runner."""
        await self._made.wait()
        assert self._runner is not None
        return self._runner

    async def run(self, stop_within_s: float) -> None:
        """As Device.run; an error of a step ends the timers' task instead of this one."""
        self._runner = self._make()
        self._made.set()
        await anyio.sleep_forever()

    def _finish(self, job: RunStep) -> None:
        assert self._runner is not None
        self._in_flight -= 1
        self._deliver(self._runner.execute(job))


def _given(done: StepDone) -> StepDone:
    return done


def check_room(job: RunStep, in_flight: int) -> None:
    """Raises DeviceFailed where the device has two jobs already."""
    if in_flight >= JOBS:
        raise DeviceFailed(f"epoch {job.epoch} is a third step: {in_flight} of {JOBS} are in flight")


def loop_poster() -> Callable[..., object]:
    """A function (act, *args) that any thread may call: the running loop then calls `act(*args)` soon.

    anyio's own `from_thread` makes the thread wait for the loop, which a device thread must not.
    """
    native = cast(Any, anyio.lowlevel.current_token().native_token)
    for name in ("call_soon_threadsafe", "run_sync_soon"):
        if hasattr(native, name):
            return cast(Callable[..., object], getattr(native, name))
    raise DeviceFailed(f"the event loop {native!r} can't be posted to")


def name_thread(name: str) -> None:
    """Gives the calling thread a name that `top` and `perf` show; Python's own name stays in the process."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode()[:15], 0, 0, 0)
    except (OSError, AttributeError):
        # Not Linux: the name is a comfort, nothing depends on it.
        return


def _no_loop(*args: object) -> object:
    raise DeviceFailed("a step ended before the device thread had a loop")
