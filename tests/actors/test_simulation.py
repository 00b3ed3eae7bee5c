"""The whole engine in virtual time: clients that come, dawdle and leave; a device that takes its time."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from api.handle import Engine
from api.served import load_served
from engine.actors.core import Core
from engine.actors.device import JOBS, Device, SimulatedDevice
from engine.actors.rank import Rank
from engine.actors.rank_checks import accounts_agree
from engine.actors.timers import Timers
from engine.config import Settings
from engine.errors import QueueFull
from engine.local import engine_of
from engine.messages import ABORTED, GOES_ON, LENGTH, Entry, RunStep, Sampling, StepDone
from tests.actors.trivial import TOKEN, TrivialParts

pytestmark = pytest.mark.anyio
STEP_S = 0.02
CLIENTS = 120


class AtOnce:
    """Answers every sampled row with one token."""

    def execute(self, job: RunStep) -> StepDone:
        sampled = int(np.frombuffer(job.samples, np.uint8).sum())
        return StepDone(job.epoch, job.samples, np.full(sampled, TOKEN, np.int32).tobytes())


class SimulatedParts(TrivialParts):
    """A rank whose device takes 20 ms of virtual time a step, without a thread; so is the wall clock.

    scheduler  the rank's core, once it is up
    """

    scheduler: Rank

    def core(self, settings: Settings, rank: int, runner: object) -> Core:
        core = super().core(settings, rank, runner)
        assert isinstance(core, Rank)
        self.scheduler = core
        return core

    def load(self, settings: Settings, say: Callable[[str], None]) -> Any:
        return AtOnce()

    def device(self, load: Callable[[], Any], deliver: Callable[[StepDone], None], timers: Timers) -> Device:
        return SimulatedDevice(load, deliver, timers, lambda job: STEP_S)

    def wall_s(self) -> float:
        return anyio.current_time()


def holds_nothing(rank: Rank) -> bool:
    """Whether no step runs, every request is over, and every page and slot is free."""
    requests, held = rank.requests, rank.requests.held
    free = [pool.free == pool.usable for pool in (held.full, held.window)]
    over = [requests.is_over(request_id) for request_id in requests.row_of]
    return rank.state == "idle" and all(over + free) and accounts_agree(requests)


def entry(tokens: int, prompt: int = 10) -> Entry:
    ids = np.arange(10, 10 + prompt, dtype=np.int32).tobytes()
    return Entry(sink=0, prompt=ids, sampling=Sampling(max_new_tokens=tokens, ignore_eos=True))


async def test_a_step_takes_exactly_its_virtual_time(model: Path) -> None:
    settings = Settings(model_path=str(model))
    async with engine_of(settings, load_served(settings, 0), SimulatedParts()) as engine:
        began = anyio.current_time()
        group = await engine.submit([entry(50)])
        while await group.take():
            pass
        # One step for the prompt and its first token, and one for each token after it.
        assert anyio.current_time() - began == pytest.approx(50 * STEP_S)


@pytest.mark.parametrize("order", [0, 2])
async def test_clients_of_every_temper_get_one_end_each_and_hold_up_nobody(model: Path, order: int) -> None:
    settings, parts = Settings(model_path=str(model), stream_buffer=16), SimulatedParts()
    draw = random.Random(7)
    ends: Counter[str] = Counter()

    async def client(engine: Engine, number: int) -> None:
        temper = ("reads", "leaves", "dawdles")[number % 3]
        await anyio.sleep(draw.uniform(0, 30))
        try:
            group = await engine.submit([entry(draw.randint(1, 60), draw.randint(1, 900))])
        except QueueFull:
            ends["refused"] += 1
            return
        seen: list[int] = []
        while taken := await group.take():
            seen += [delta.finish for delta in taken]
            if temper == "leaves" and draw.random() < 0.1:
                break
            if temper == "dawdles":
                await anyio.sleep(draw.uniform(0, 3))
        engine.close(group)
        assert seen.count(GOES_ON) >= len(seen) - 1
        if temper != "leaves":
            assert seen[-1] in (LENGTH, ABORTED)
        ends["over"] += 1

    async with engine_of(settings, load_served(settings, 0), parts) as engine:
        async with anyio.create_task_group() as clients:
            for number in range(CLIENTS):
                clients.start_soon(client, engine, number)
        # Whoever leaves last leaves the steps behind that were on the device, and nothing else.
        await anyio.sleep(JOBS * STEP_S)
        await anyio.wait_all_tasks_blocked()
        assert holds_nothing(parts.scheduler)
        # So a request alone takes as long as in an empty engine.
        began = anyio.current_time()
        group = await engine.submit([entry(10)])
        while await group.take():
            pass
        assert anyio.current_time() - began == pytest.approx(10 * STEP_S)
    assert sum(ends.values()) == CLIENTS
    assert ends["over"] > CLIENTS // 2
