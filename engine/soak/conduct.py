"""The course of a soak: warm-up, then traffic with bursts and rests, samples, and the end."""

from __future__ import annotations

import signal
import sys
import time

import anyio
from anyio.abc import TaskGroup

from engine.errors import ConfigError
from engine.soak.crowd import Crowd
from engine.soak.ledger import Ledger
from engine.soak.options import FULL, Options, Outcome
from engine.soak.pace import Pace
from engine.soak.plan import FORMS, WEIGHTS, Plan, Served
from engine.soak.samples import Samples, settled_after_s
from engine.soak.server import Server
from engine.soak.start import canaries, left_out
from engine.soak.structured import Forms
from engine.soak.traffic import Traffic
from engine.soak.watch import BROKEN, LOOK_S, Watch

DRAIN_WITHIN_S = 120.0
ADJUST_S = 5.0
BURSTS = (1, 2, 4)
"""Sizes of a burst, one after the other until the queues were full: a fast server empties them meanwhile."""


class Soak:
    """One soak of one server that takes requests."""

    def __init__(self, server: Server, options: Options) -> None:
        self._server, self._options = server, options
        self.ledger = Ledger()
        self.watch = Watch(server, self.ledger, options.prefix)
        self.samples = Samples(self.ledger, self.watch)
        self.outcome = Outcome(self.ledger, self.watch, self.samples, options)
        self._pace = Pace()
        self._stop = anyio.Event()
        self._resting = False
        self._crowds: Crowd | None = None

    async def run(self) -> Outcome:
        """Until the time is over, the server has ended, or someone interrupts."""
        await self.watch.begin()
        traffic, plan = await self._prepare()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._listen)
            await self._warm_up(traffic, plan, tasks)
            await self._work(traffic, plan, tasks)
            tasks.cancel_scope.cancel()
        return self.outcome

    async def _prepare(self) -> tuple[Traffic, Plan]:
        """What is known of the server and its answers. raises ConfigError"""
        options = self._options
        kinds = list(options.kinds or WEIGHTS)
        if unknown := set(kinds) - set(WEIGHTS):
            raise ConfigError(f"--kinds: {sorted(unknown)} are not among {sorted(WEIGHTS)}")
        try:
            card = (await self.watch.get("/v1/models")).json()["data"][0]
        except (*BROKEN, KeyError, ValueError) as error:
            raise ConfigError(f"/v1/models can't be read: {error!r}") from error
        first = self.watch.first
        if not first.ranks():
            raise ConfigError(f"/metrics has no {options.prefix}num_running_reqs with a dp_rank")
        drafts = first.total("spec_num_draft_tokens") > 0
        served = Served(len(first.ranks()), int(card["max_model_len"]), options.vocabulary, drafts)
        forms = Forms() if set(FORMS) & set(kinds) else None
        probing = Traffic(self._server, Plan(0, served, ()), self.ledger, self._pace, False)
        self.outcome.left_out = await left_out(probing, kinds, forms)
        if "seeded" in kinds and not options.repeatable:
            self.outcome.left_out["seeded: equal texts"] = (
                "a seed alone decides a text on row-invariant servers; others are checked for their form"
            )
        kept = [kind for kind in kinds if kind not in self.outcome.left_out]
        plan = Plan(options.seed, served, kept)
        self._crowds = Crowd(options.seed, served, kept)
        traffic = Traffic(self._server, plan, self.ledger, self._pace, options.repeatable)
        if "canary" in kinds:
            plan.canaries = await canaries(traffic, options.seed)
            self._crowds.plan.canaries = plan.canaries
            self.outcome.canaries = len(plan.canaries)
        return traffic, plan

    async def _warm_up(self, traffic: Traffic, plan: Plan, tasks: TaskGroup) -> None:
        """Each bad request, a burst, and some of everything: the first rest is what later ones must equal."""
        if "bad" in (self._options.kinds or WEIGHTS):
            for item in plan.each_bad():
                await traffic.send(item)
        await self._burst(traffic, plan)
        for _ in range(self._options.clients):
            tasks.start_soon(traffic.client)
        traffic.open()
        await self._wait(min(10.0, self._options.work_s))
        await self._rest(traffic)

    async def _work(self, traffic: Traffic, plan: Plan, tasks: TaskGroup) -> None:
        began_s = time.monotonic()
        end_s = began_s + self._options.minutes * 60
        self._say("traffic begins")
        self.samples.begin()
        self.samples.take()
        tasks.start_soon(self._look)
        tasks.start_soon(self._sample)
        tasks.start_soon(self._adjust, plan)
        number = 0
        while time.monotonic() < end_s and not self._stop.is_set():
            traffic.open()
            await self._wait(min(self._options.work_s, end_s - time.monotonic()))
            if time.monotonic() - began_s < settled_after_s(self._options.minutes * 60):
                await self._crowd(traffic)
            if number % 2 == 0 and not self._stop.is_set():
                await self._burst(traffic, plan)
            await self._rest(traffic)
            number += 1
            minutes = (time.monotonic() - began_s) / 60
            self._say(
                f"{minutes:.1f} of {self._options.minutes:g} minutes, {self.ledger.requests} requests, "
                f"{self.ledger.violation_count} violations"
            )
        self.outcome.minutes = (time.monotonic() - began_s) / 60
        self.outcome.stopped_early = time.monotonic() < end_s
        traffic.end()
        self.samples.take()

    def _say(self, text: str) -> None:
        print(f"soak: {text}", file=sys.stderr, flush=True)

    async def _wait(self, seconds: float) -> None:
        with anyio.move_on_after(max(0.0, seconds)):
            await self._stop.wait()

    async def _burst(self, traffic: Traffic, plan: Plan) -> None:
        """More completions at once than slots and queues take: the rest must get 429."""
        options = self._options
        if not options.burst:
            return
        refused = self.ledger.refused_busy
        for times in BURSTS:
            traffic.crowded += 1
            async with anyio.create_task_group() as tasks:
                for item in plan.burst(options.burst * times, options.group):
                    tasks.start_soon(traffic.send, item)
            traffic.crowded -= 1
            self.outcome.bursts += 1
            if self.ledger.refused_busy > refused or self.watch.ended:
                return
        self.ledger.violate("burst", f"none of {options.burst * BURSTS[-1]} completions at once was refused")

    async def _crowd(self, traffic: Traffic) -> None:
        """The largest requests of every kind at once, as many as slots and queues take.

        What a server needs at its busiest it has needed before growth is judged.
        """
        assert self._crowds is not None
        if not self._options.burst or self._stop.is_set():
            return
        traffic.crowded += 1
        async with anyio.create_task_group() as tasks:
            for item in self._crowds.items(self._options.burst // FULL):
                tasks.start_soon(traffic.send, item)
        traffic.crowded -= 1
        self.outcome.crowds += 1

    async def _rest(self, traffic: Traffic) -> None:
        """Closes the gate, waits for all answers, checks that nothing is held."""
        traffic.close()
        self._resting = True
        deadline_s = time.monotonic() + DRAIN_WITHIN_S
        while traffic.under_way and time.monotonic() < deadline_s:
            await anyio.sleep(0.05)
        if traffic.under_way:
            self.ledger.violate(
                "rest", f"{traffic.under_way} requests have no end after {DRAIN_WITHIN_S:g} s"
            )
        elif not self.watch.ended:
            await self.watch.rest()
            self.outcome.rests += 1
            await self._wait(self._options.rest_s)
        self._resting = False

    async def _look(self) -> None:
        """Every second; a server that has ended ends the soak."""
        while not self._stop.is_set():
            await self.watch.look()
            if self.watch.ended:
                self.ledger.violate("server", f"the server has ended: {self._server.tail()[-1000:]}")
                self._stop.set()
            await anyio.sleep(LOOK_S)

    async def _sample(self) -> None:
        while True:
            await anyio.sleep(self._options.sample_s)
            self.samples.take()

    async def _adjust(self, plan: Plan) -> None:
        """The pace, from what the last seconds of traffic brought."""
        watch, ledger = self.watch, self.ledger
        while True:
            requests, polls, busy, began_s = ledger.requests, watch.polls, dict(watch.busy), time.monotonic()
            await anyio.sleep(ADJUST_S)
            if self._resting or watch.polls == polls:
                continue
            shares = [(watch.busy[rank] - busy.get(rank, 0)) / (watch.polls - polls) for rank in watch.busy]
            rate = (ledger.requests - requests) / (time.monotonic() - began_s)
            self._pace.adjust(rate, min(shares, default=0.0))
            plan.size = self._pace.size

    async def _listen(self) -> None:
        """Ctrl-C and SIGTERM end the soak early; it still reports."""
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async for _ in signals:
                self._stop.set()
