"""A rank's process without an operating system: the life that ships, a simulated device, and a way to be
killed.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import anyio

from engine.actors.core import Core
from engine.actors.device import Device, StepRunner
from engine.actors.intake import RankSetup
from engine.actors.links import Ref
from engine.actors.mailbox import Mailbox
from engine.actors.no_matchers import NoMatchers
from engine.actors.process import Process
from engine.actors.rank import Rank
from engine.actors.schedule import Graphs
from engine.actors.speculation import Speculation
from engine.actors.timers import Timers
from engine.config import Settings
from engine.messages import StepDone
from engine.rank_interface import Told
from engine.rank_process import live
from engine.sim.chain import EOS, WINDOW, Rules
from engine.sim.device import PagedModel
from engine.sim.drafting import Drafter, costs
from engine.sim.virtual import VirtualDevice
from engine.sim.wires import Wire

if TYPE_CHECKING:
    from engine.sim.world import World


class SimulatedProcess:
    """What the launcher sees of a child: its exit code, once it has one."""

    def __init__(self) -> None:
        self.returncode: int | None = None
        self._ended = anyio.Event()

    def end(self, code: int) -> None:
        """The first end counts."""
        if self.returncode is None:
            self.returncode = code
            self._ended.set()

    async def wait(self) -> int:
        """The exit code."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode


class SimulatedRank:
    """A child of the launcher.

    stream   the api process's end of the link
    scheduler, device, joined   its core, its device and its process, once they are made
    """

    def __init__(self, world: World, rank: int, stream: Wire, own: Wire) -> None:
        self.name = f"rank{rank}"
        self.rank = rank
        self.stream = stream
        self.process = SimulatedProcess()
        self.device: VirtualDevice | None = None
        self.model: PagedModel | None = None
        self.scheduler: Rank | None = None
        self.joined: Process | None = None
        self._world = world
        self._own = own
        self._scope = anyio.CancelScope()

    async def run(self) -> None:
        """The process, from its start to its exit."""
        world = self._world
        with self._scope:
            code = await live(
                Told(self.rank, world.settings),
                self._own,
                Parts(world, self),
                world.wiring,
                world.report,
                self._join,
            )
            self.process.end(code)
            world.exchange.leave(self.rank)
            if code and not world.harmful:
                world.watch.wrong("crash", f"{self.name} ended with exit code {code}: {world.reports[-1:]}")
        await self._own.aclose()

    def kill(self) -> None:
        """Ends it at once; what is in the link's buffers still arrives."""
        if self.process.returncode is None:
            self.process.end(-signal.SIGKILL)
            self._world.exchange.leave(self.rank)
            self._own.cut()
            if self.device is not None:
                self.device.dead = True
            self._scope.cancel()

    def _join(self, process: Process) -> None:
        world = self._world
        self.joined = process
        world.exchange.join(self.rank, process.mailbox(self.name))
        for peer in range(world.plan.bounds.ranks):
            if peer != self.rank:
                process.reach(f"rank{peer}", world.exchange.ref(self.rank, peer))


class Parts:
    """What the rank is made of: engine.rank_interface.Parts."""

    def __init__(self, world: World, child: SimulatedRank) -> None:
        self._world = world
        self._child = child

    def place(self, rank: int, meeting: str) -> None:
        """It was made for its rank."""

    def device(
        self, load: Callable[[], StepRunner], deliver: Callable[[StepDone], None], timers: Timers
    ) -> Device:
        """In virtual time."""
        world = self._world
        made = VirtualDevice(
            load,
            deliver,
            world.agenda,
            lambda: world.draw(world.plan.bounds.step_ms) / 1000,
            world.load_s[self._child.rank],
        )
        self._child.device = made
        return made

    def load(self, settings: Settings, say: Callable[[str], None]) -> StepRunner:
        """The paged model."""
        bounds = self._world.plan.bounds
        drafter = None
        if bounds.drafts:
            drafter = Drafter(bounds.drafts, bounds.verify_mode, bounds.draft_right, self._world.order.random)
        model = PagedModel(Rules(bounds.eos, bounds.failing), self._world.watch.wrong, drafter)
        self._child.model = model
        return model

    def matchers(self, settings: Settings, runner: StepRunner, mailbox: Mailbox, timers: Timers) -> Ref:
        """No request has a grammar."""
        return NoMatchers(mailbox.tell_first)

    def wall_s(self) -> float:
        """The simulated one."""
        return self._world.wall_s()

    def settle(self) -> None:
        """Nothing is kept for the process's life."""

    def dump(self) -> None:
        """There are no threads."""

    async def release(self, part: str) -> None:
        """Python does."""

    def core(self, settings: Settings, rank: int, runner: Any) -> Core:
        """The scheduler."""
        bounds = self._world.plan.bounds
        setup = RankSetup(
            rank=rank,
            ranks=bounds.ranks,
            slots=bounds.slots,
            queued=bounds.queued,
            chunk_tokens=bounds.chunk_tokens,
            context_tokens=bounds.context_tokens,
            window_tokens=WINDOW,
            full_pages=bounds.full_pages,
            window_pages=bounds.window_pages,
            eos_ids=(EOS,),
            watchdog_ms=bounds.watchdog_ms,
            graphs=Graphs(decode=bounds.graphs, prefill=bounds.graphs),
            speculation=Speculation(bounds.drafts, bounds.verify_mode, costs(bounds.draft_ms))
            if bounds.drafts
            else None,
        )
        scheduler = Rank(setup)
        self._child.scheduler = scheduler
        return scheduler
