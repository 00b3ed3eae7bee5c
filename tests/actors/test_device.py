"""The device thread: order, the bound of two, failure, and a loop that never waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
import pytest

from engine.actors.device import JOBS, DeviceThread, SimulatedDevice
from engine.actors.mailbox import Mailbox
from engine.actors.timers import Timers
from engine.errors import DeviceFailed
from engine.messages import RunStep, StepDone
from tests.actors.loops import both_loops

pytestmark = pytest.mark.anyio


def job(epoch: int) -> RunStep:
    return RunStep(epoch, "idle", b"", b"", b"", b"", b"", b"")


class Answers:
    """A runner that answers at once and notes the threads that it ran on."""

    def __init__(self) -> None:
        self.threads: set[str] = set()

    def execute(self, job: RunStep) -> StepDone:
        self.threads.add(threading.current_thread().name)
        return StepDone(job.epoch, b"", b"")


class Waits(Answers):
    """A runner that answers once it is let go on."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()

    def execute(self, job: RunStep) -> StepDone:
        assert self.go_on.wait(60)
        return super().execute(job)


class Breaks(Answers):
    """A runner that fails at epoch 2."""

    def execute(self, job: RunStep) -> StepDone:
        if job.epoch == 2:
            raise RuntimeError("an illegal address")
        return super().execute(job)


async def started(tasks: Any, runner: Any) -> tuple[DeviceThread, Mailbox]:
    box = Mailbox("rank", 8, "wait")
    device = DeviceThread(lambda: runner, box.tell_first)
    tasks.start_soon(device.run, 60.0)
    await device.runner()
    return device, box


async def answer_both(device: DeviceThread, box: Mailbox, go_on: threading.Event) -> None:
    """Two steps are in flight: a third is an error, the two come in order, and then there is room again."""
    with pytest.raises(DeviceFailed, match="epoch 2 is a third step"):
        device.submit(job(2))
    go_on.set()
    got: list[int] = []
    while len(got) < JOBS:
        got += [done.epoch for done in await box.take()]
    assert got == [0, 1]
    device.submit(job(3))
    assert [done.epoch for done in await box.take()] == [3]


@both_loops
async def test_steps_are_answered_in_order_on_the_device_thread() -> None:
    runner = Answers()
    async with anyio.create_task_group() as tasks:
        device, box = await started(tasks, runner)
        for epoch in range(50):
            device.submit(job(epoch))
            assert [done.epoch for done in await box.take()] == [epoch]
        tasks.cancel_scope.cancel()
    assert runner.threads == {"device"}


@both_loops
async def test_two_steps_are_in_flight_and_a_third_is_an_error() -> None:
    runner = Waits()
    async with anyio.create_task_group() as tasks:
        device, box = await started(tasks, runner)
        for epoch in range(JOBS):
            device.submit(job(epoch))
        await answer_both(device, box, runner.go_on)
        tasks.cancel_scope.cancel()


@both_loops
async def test_the_loop_runs_while_the_device_works() -> None:
    runner = Waits()
    async with anyio.create_task_group() as tasks:
        device, box = await started(tasks, runner)
        device.submit(job(0))
        for _ in range(100):
            await anyio.lowlevel.checkpoint()
        assert len(box) == 0
        runner.go_on.set()
        assert [done.epoch for done in await box.take()] == [0]
        tasks.cancel_scope.cancel()


@both_loops
async def test_an_error_on_the_device_ends_its_task_with_the_cause() -> None:
    async def fail() -> None:
        async with anyio.create_task_group() as tasks:
            device, _ = await started(tasks, Breaks())
            device.submit(job(1))
            device.submit(job(2))
            await anyio.sleep_forever()

    with pytest.raises(BaseExceptionGroup) as raised:
        await fail()
    (error,) = raised.value.exceptions
    assert isinstance(error, DeviceFailed)
    assert "an illegal address" in str(error)
    assert isinstance(error.__cause__, RuntimeError)


class Overlaps(Answers):
    """Launches at once; a step's results are there when it is let go on. Odd ones are waited for at once."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[int] = []
        self.second = threading.Event()
        self.go_on = threading.Event()

    def launch(self, job: RunStep) -> StepDone | Callable[[], StepDone]:
        self.launched.append(job.epoch)
        if len(self.launched) == JOBS:
            self.second.set()
        return self.execute(job) if job.epoch % 2 else partial(self._wait, job)

    def _wait(self, job: RunStep) -> StepDone:
        if job.epoch == 4:
            raise RuntimeError("an illegal address")
        assert self.go_on.wait(60)
        return self.execute(job)


@both_loops
async def test_a_step_is_launched_while_the_results_of_the_one_before_are_awaited() -> None:
    runner, before = Overlaps(), set(threading.enumerate())
    async with anyio.create_task_group() as tasks:
        device, box = await started(tasks, runner)
        device.submit(job(0))
        device.submit(job(1))
        # The second one has its results before the first one; they come in order all the same.
        await anyio.to_thread.run_sync(runner.second.wait, 60)
        assert runner.launched == [0, 1]
        for _ in range(100):
            await anyio.lowlevel.checkpoint()
        assert len(box) == 0
        await answer_both(device, box, runner.go_on)
        tasks.cancel_scope.cancel()
    assert runner.threads == {"device", "arrivals"}
    left = set(threading.enumerate()) - before
    assert not {"device", "arrivals"} & {thread.name for thread in left}


@both_loops
async def test_an_error_of_results_that_are_awaited_ends_the_task_with_the_cause() -> None:
    async def fail() -> None:
        async with anyio.create_task_group() as tasks:
            device, _ = await started(tasks, Overlaps())
            device.submit(job(4))
            await anyio.sleep_forever()

    with pytest.raises(BaseExceptionGroup) as raised:
        await fail()
    assert "an illegal address" in str(raised.value.exceptions[0])
    assert isinstance(raised.value.exceptions[0].__cause__, RuntimeError)


@both_loops
async def test_leaving_joins_the_thread() -> None:
    before = set(threading.enumerate())
    async with anyio.create_task_group() as tasks:
        await started(tasks, Answers())
        assert [thread.name for thread in set(threading.enumerate()) - before] == ["device"]
        tasks.cancel_scope.cancel()
    assert set(threading.enumerate()) <= before


async def test_a_simulated_device_answers_exactly_after_its_virtual_delay() -> None:
    timers, box = Timers(), Mailbox("rank", 8, "wait")
    device = SimulatedDevice(Answers, box.tell_first, timers, lambda job: 0.02)
    began = anyio.current_time()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(timers.run)
        tasks.start_soon(device.run, 1.0)
        await device.runner()
        device.submit(job(0))
        device.submit(job(1))
        with pytest.raises(DeviceFailed):
            device.submit(job(2))
        assert [done.epoch for done in await box.take()] == [0]
        assert anyio.current_time() == pytest.approx(began + 0.02)
        assert [done.epoch for done in await box.take()] == [1]
        assert anyio.current_time() == pytest.approx(began + 0.04)
        tasks.cancel_scope.cancel()


@both_loops
async def test_a_runner_that_cant_be_made_ends_the_task_with_the_cause() -> None:
    def no_runner() -> Any:
        raise ValueError("tensor embed.weight is missing")

    async def fail() -> None:
        async with anyio.create_task_group() as tasks:
            device = DeviceThread(no_runner, lambda done: None)
            tasks.start_soon(device.run, 5.0)
            await device.runner()

    with pytest.raises(BaseExceptionGroup) as raised:
        await fail()
    assert "tensor embed.weight is missing" in str(raised.value.exceptions[0])
