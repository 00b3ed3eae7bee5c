"""One replay: a plan and an order seed, in a loop of its own, to an outcome that two runs share."""

from __future__ import annotations

import time
import traceback
from dataclasses import dataclass, field

import anyio
import hypothesis  # noqa: F401  (trio schedules by a seeded generator once it is loaded)
import trio.testing
from hypothesis.internal.entropy import deterministic_PRNG

from engine.lifecycle_box import leaves
from engine.sim.faults import point
from engine.sim.scenario import Scenario
from engine.sim.verdict import judge
from engine.sim.watch import Event, Violation, Watch, watching
from engine.sim.world import World

ORDERS = 1 << 32
"""Schedules that trio's generator can be seeded with."""


@dataclass(slots=True)
class Outcome:
    """What a run came to.

    steps      steps of all ranks           events   messages taken by cores
    virtual_s  at the end                   real_s   of this machine
    fates      clients by their fate        hits     fault points reached, by name
    """

    violation: Violation | None
    digest: str
    steps: int = 0
    events: int = 0
    virtual_s: float = 0.0
    real_s: float = 0.0
    fates: dict[str, int] = field(default_factory=dict)
    hits: dict[str, int] = field(default_factory=dict)
    kept: list[Event] = field(default_factory=list)
    reports: list[str] = field(default_factory=list)


def replay(plan: Scenario, order: int, keep_all: bool = False) -> Outcome:
    """Runs a plan under one schedule. Equal arguments give equal digests, in any process.

    raises  ConfigError for a fault of an unknown kind
    """
    for fault in plan.fault:
        point(fault.kind)
    began = time.perf_counter()
    watch = Watch(keep_all)
    clock = trio.testing.MockClock()
    worlds: list[World] = []

    async def main() -> None:
        world = World(plan, order, watch, clock)
        worlds.append(world)
        await _to_its_end(world, watch)

    with deterministic_PRNG(order % ORDERS), watching(watch):
        anyio.run(main, backend="trio", backend_options={"clock": clock})
    world = worlds[0]
    fates: dict[str, int] = {}
    for answer in world.answers:
        fates[answer.fate or "unfinished"] = fates.get(answer.fate or "unfinished", 0) + 1
    return Outcome(
        violation=watch.found,
        digest=watch.digest,
        steps=world.steps.steps,
        events=watch.events,
        virtual_s=world.ended_s,
        real_s=time.perf_counter() - began,
        fates=fates,
        hits=world.hits | world.inherent_hits(),
        kept=list(watch.kept),
        reports=world.reports,
    )


async def _to_its_end(world: World, watch: Watch) -> None:
    """Runs the world and judges it; whatever it raises is a violation."""
    try:
        with anyio.move_on_after(world.plan.bounds.limit_s) as limit:
            await world.run()
        if limit.cancelled_caught and watch.found is None:
            watch.wrong("hang", f"after {world.plan.bounds.limit_s} s: {world.standing()}")
    except Exception as error:
        group = error if isinstance(error, BaseExceptionGroup) else BaseExceptionGroup("", [error])
        first = leaves(group)[0]
        frame = traceback.extract_tb(first.__traceback__)[-1]
        watch.wrong(
            "crash", f"{first!r} at {frame.name} ({frame.filename.rsplit('/', 1)[-1]}:{frame.lineno})"
        )
    world.ended_s = anyio.current_time()
    if watch.found is None:
        judge(world)
