"""The launcher that ships, over simulated processes, and the HTTP server's life without a socket."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio

from engine.config import Settings
from engine.launch import Launcher
from engine.peers import Mesh

if TYPE_CHECKING:
    from engine.sim.world import World

LAST_ANSWERS_S = 5.0


class SimulatedServer:
    """The HTTP server's life without a socket."""

    def __init__(self) -> None:
        self._exit = anyio.Event()
        self.handlers = 0
        self.idle = anyio.Event()

    @property
    def should_exit(self) -> bool:
        """Whether it was told to close."""
        return self._exit.is_set()

    @should_exit.setter
    def should_exit(self, value: bool) -> None:
        if value:
            self._exit.set()

    async def run_on(self, sock: Any) -> None:
        """Until it is told to close; answers that are under way get their time."""
        await self._exit.wait()
        with anyio.move_on_after(LAST_ANSWERS_S):
            while self.handlers:
                self.idle = anyio.Event()
                await self.idle.wait()


class SimulatedLauncher(Launcher):
    """The launcher that ships, over simulated processes; signals come from the scenario."""

    def __init__(self, settings: Settings, world: World) -> None:
        super().__init__(settings, ())
        self._world = world

    async def start_rank(self, rank: int, mesh: Mesh) -> None:
        child: Any = self._world.start_rank(rank)
        self.children[rank] = child
        link = self._process.link("api", child.name, child.stream)
        self._tasks.start_soon(self._watch, rank, child, link)

    async def listen_to_signals(self) -> None:
        """The fault `signal` tells the shutdown coordinator itself."""
