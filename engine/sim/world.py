"""One run: the api process and its ranks as they are launched, links in memory, clients and faults.

Cores, shells, mailboxes, timers, links, supervision, launcher, rank processes and the HTTP application are
those that ship. Simulated are the device, the wires' bytes in flight, the operating system's processes, and
the clocks.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import anyio
import trio.testing
from anyio.abc import TaskGroup

from api.app import App
from api.handle import Engine
from engine.actors.core import Core
from engine.actors.ingress import Ingress
from engine.actors.mailbox import Mailbox
from engine.actors.process import Process
from engine.actors.speculation import CAP_ACCEPT
from engine.launch import start_api
from engine.messages import Signalled
from engine.sim.agreement import SameSteps
from engine.sim.clients import Answer, HttpClient, by_handle, fresh_answer
from engine.sim.clock import Agenda
from engine.sim.faults import point
from engine.sim.launcher import SimulatedLauncher, SimulatedServer
from engine.sim.monitors import EndInOrder, OneEnd, OwnInvariants, WholeGroups
from engine.sim.prober import Probed, probe_often
from engine.sim.ranks import SimulatedRank
from engine.sim.scenario import Client, Fault, Range, Scenario, drawn
from engine.sim.settings import served_of, settings_of, wiring_of
from engine.sim.watch import Event, Watch
from engine.sim.wires import Exchange, wire_pair

QUIET_S = 1.0
"""After the last client everything must come to rest within so much."""


class World:
    """The state of one run.

    order        draws delays and durations, by the order seed
    answers      of the clients, in the plan's order
    hits         faults that happened, by name
    harmful      (name, seconds from which requests may fail for it)
    refusing_s   from here on requests may be refused as not served
    """

    def __init__(self, plan: Scenario, order: int, watch: Watch, clock: trio.testing.MockClock) -> None:
        self.plan = plan
        self.watch = watch
        self.order = random.Random(f"order {order}")
        self.settings = settings_of(plan)
        self.wiring = wiring_of(plan)
        self.agenda = Agenda(clock)
        self.exchange = Exchange(self.agenda, self._delays(plan.bounds.exchange_ms), plan.bounds.ranks)
        self.ranks: list[SimulatedRank] = []
        self.load_s = {rank: self.draw(plan.bounds.load_ms) / 1000 for rank in range(plan.bounds.ranks)}
        self.answers: list[Answer] = []
        self.probes: list[Probed] = []
        self.reports: list[str] = []
        self.hits: dict[str, int] = {}
        self.harmful: list[tuple[str, float]] = []
        self.refusing_s = float("inf")
        self.crowded_until_s = -1.0
        self.leapt_s = 0.0
        self.signals = 0
        self.wall_offset_s = 1e9
        self.steps = SameSteps(watch, plan.bounds.ranks, plan.bounds.verify_mode == CAP_ACCEPT)
        self.ends = OneEnd(watch)
        self.audits = OwnInvariants(watch)
        self.server = SimulatedServer()
        self.launcher = SimulatedLauncher(self.settings, self)
        self.ended_s = 0.0
        self.all_up_s = float("inf")
        self.closed = anyio.Event()
        whole, order_ = WholeGroups(watch), EndInOrder(watch, plan.bounds.ranks)
        watch.monitors = {
            "rank": [self.steps, whole, self.ends, order_, self.audits],
            "ingress": [self._note_start, whole, self.ends, self.audits],
            "detok": [self.ends, self.audits],
            "shutdown": [order_, self.audits],
            "health": [self.audits],
        }

    # -- what faults and parts ask for -----------------------------------------------------------

    def draw(self, value: Range) -> float:
        """A whole number of the range, by the order seed: in whole milliseconds events meet."""
        return self.order.randint(int(value[0]), int(value[1])) if isinstance(value, tuple) else value

    def _delays(self, ms: Range) -> Callable[[], float]:
        return lambda: self.draw(ms) / 1000

    def now_s(self) -> float:
        """Virtual seconds."""
        return anyio.current_time()

    def wall_s(self) -> float:
        """The simulated wall clock."""
        return anyio.current_time() + self.wall_offset_s

    def leap(self, by_s: float) -> None:
        """Every clock leaps."""
        self.leapt_s += by_s
        self.agenda.leap(by_s)

    def hit(self, name: str) -> None:
        """A declared point was reached."""
        self.hits[name] = self.hits.get(name, 0) + 1
        self.watch.note("fault", name)

    def inherent_hits(self) -> dict[str, int]:
        """Points that were reached without a fault that says so."""
        mailboxes = [ref for ref in self.process.refs.values() if isinstance(ref, Mailbox)]
        found = {
            "row_failure": sum(rank.model.failed_rows for rank in self.ranks if rank.model is not None),
            "retraction": sum(
                rank.scheduler.planner.retracted[0] for rank in self.ranks if rank.scheduler is not None
            ),
            "small_mailbox": sum(mailbox.stats.refused + mailbox.stats.waited for mailbox in mailboxes),
        }
        return {name: count for name, count in found.items() if count}

    def harm(self, name: str, after_s: float = 0.0) -> None:
        """From now on, or so much later, requests may fail because of this fault."""
        self.harmful.append((name, self.now_s() + after_s))
        self.refuses_from(self.now_s())

    def refuses_from(self, from_s: float) -> None:
        """Requests may be refused from here on."""
        self.refusing_s = min(self.refusing_s, from_s)

    def failing_from_s(self) -> float:
        """From here on a request may fail."""
        return min((from_s for _, from_s in self.harmful), default=float("inf"))

    def _note_start(self, core: Core, event: Event) -> None:
        """When every rank takes requests; until then a client may be told that none does."""
        if isinstance(core, Ingress) and len(core.up) == core.ranks:
            self.all_up_s = min(self.all_up_s, event.at_s)

    def standing(self) -> str:
        """Who waits where."""
        ranks = [f"{rank.name} {rank.scheduler and rank.scheduler.state}" for rank in self.ranks]
        waiting = [answer.client for answer in self.answers if not answer.fate]
        return f"{ranks}, {len(waiting)} clients wait, the first: {waiting[:1]}; reports: {self.reports[-2:]}"

    def report(self, text: str) -> None:
        """What the processes print."""
        self.reports.append(text)

    # -- the run -------------------------------------------------------------------------------

    def start_rank(self, rank: int) -> SimulatedRank:
        """The launcher starts a rank's process."""
        near, far = wire_pair(self.agenda, self._delays(self.plan.bounds.link_ms))
        child = SimulatedRank(self, rank, near, far)
        self.ranks.append(child)
        self._tasks.start_soon(child.run)
        return child

    async def run(self) -> None:
        """Everything, until all processes have ended and all clients are done."""
        async with anyio.create_task_group() as http, anyio.create_task_group() as tasks:
            self._tasks: TaskGroup = tasks
            self.watch.on_found = http.cancel_scope.cancel
            tasks.start_soon(self.agenda.run)
            self.process = Process("api", self.wiring, tasks, self.report)
            engine, app = self._start_api()
            no_socket: Any = None
            self.launcher.join(self.process, tasks, engine, self.server)
            for fault in self.plan.fault:
                self._plan_fault(fault)
            http.start_soon(self.launcher.serve, no_socket)
            tasks.start_soon(self._launch)
            if self.plan.bounds.probe_s:
                tasks.start_soon(probe_often, app, self.plan.bounds.probe_s, self.probes)
            await self._clients(engine, app)
            self.refuses_from(self.now_s())
            if not self.signals:
                self.process.mailbox("shutdown").tell(Signalled())
            await self.closed.wait()
            await anyio.sleep(QUIET_S)
            tasks.cancel_scope.cancel()

    async def _launch(self) -> None:
        await self.launcher.run()
        self.closed.set()

    def _start_api(self) -> tuple[Engine, App]:
        numbers = iter(range(1, 1 << 30))
        return start_api(
            self.process,
            self.settings,
            served_of(self.plan.bounds.context_tokens),
            self.wall_s,
            draw_seed=lambda: next(numbers),
            fresh_id=lambda prefix: f"{prefix}{next(numbers)}",
        )

    def _plan_fault(self, fault: Fault) -> None:
        act = point(fault.kind).act
        assert act is not None
        if drawn(fault.at_s) <= 0 and fault.kind == "slow_start":
            act(self, fault)
            self.hit(fault.kind)
            return

        def happen() -> None:
            if fault.rank < len(self.ranks) and not self.closed.is_set():
                self.hit(fault.kind)
                act(self, fault)

        self.agenda.after(drawn(fault.at_s), happen)

    async def _clients(self, engine: Engine, app: App) -> None:
        async with anyio.create_task_group() as clients:
            for number, client in enumerate(self.plan.client):
                clients.start_soon(self._client, number, client, engine, app)

    async def _client(self, number: int, client: Client, engine: Engine, app: App) -> None:
        await anyio.sleep(client.at_s)
        answer = fresh_answer(client)
        self.answers.append(answer)
        if client.kind == "handle":
            await by_handle(engine, client, answer)
        else:
            self.server.handlers += 1
            try:
                await HttpClient(client, answer).run(app)
            finally:
                self.server.handlers -= 1
                self.server.idle.set()
        answer.ended_s = self.now_s()
        ends = " ".join(f"{one.finish} {one.text!r}" for one in answer.completions)
        self.watch.note(f"client {number}", f"{answer.fate} {answer.status} {ends}")
        self._note_temper(client, answer)

    def _note_temper(self, client: Client, answer: Answer) -> None:
        http = client.kind != "handle"
        if answer.fate == "left":
            self.hit("disconnect" if http else "client_leaves")
        elif client.pause_s:
            self.hit("slow_reader" if http else "client_dawdles")
