"""The actor `launcher`: starts the ranks' processes, sees who has gone, and does what it is told."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Sequence
from tempfile import TemporaryDirectory
from typing import Protocol

import anyio
import msgspec
from anyio.abc import TaskGroup

from api.handle import Engine
from engine.actors.links import Link
from engine.actors.process import Process
from engine.children import Child, how_it_ended, spawn
from engine.config import Settings
from engine.errors import ConfigError, EngineError, Unexpected
from engine.exchange.native import new_session, remove
from engine.lifecycle_box import create as create_box
from engine.lifecycle_box import words_in
from engine.lifecycle_pulse import PulseBoard
from engine.lifecycle_report import EndReport, PhaseTimes
from engine.lifecycle_watch import HangWatch
from engine.messages import (
    Beat,
    CloseServer,
    KillRanks,
    Message,
    PhaseBegan,
    RankDown,
    RankEnded,
    RankUp,
    Signalled,
    Stop,
)
from engine.peers import Mesh
from engine.rank_interface import Told
from engine.rank_process import GREET_S
from engine.threads import environment

UNLINKED_S = 10.0
"""A rank whose link has ended gets so long to end itself."""

CLEAN, FAILED, REFUSED = 0, 1, 2
"""Exit codes: ended as asked; something failed; the settings can't be served. A fourth one, FORCED, is the
shutdown coordinator's: nothing failed, but ranks had to be killed."""


class Closing(Protocol):
    """An HTTP server that ends when it is told to."""

    should_exit: bool

    async def run_on(self, sock: socket.socket) -> None:
        """Serves until `should_exit` is set and the last answers have left."""


class Launcher:
    """The actor `launcher`: starts, watches, and does what the shutdown coordinator says."""

    _process: Process
    _tasks: TaskGroup

    def __init__(
        self,
        settings: Settings,
        command: Sequence[str],
        url: str = "",
        board: int = -1,
        pulse: int = -1,
    ) -> None:
        self.children: dict[int, Child] = {}
        self.exit_code = CLEAN
        self._settings = settings
        self._command = command
        self._url = url
        self._engine: Engine | None = None
        self._server: Closing | None = None
        self._closed = anyio.Event()
        self._up: set[int] = set()
        self._board = board
        self.phases = PhaseTimes(settings.metrics_prefix)
        self._pulse = pulse
        self._pulses = None if pulse < 0 else PulseBoard(pulse, settings.dp_size)
        self._end = EndReport()
        self._given_up: dict[int, str] = {}
        self._killed = False
        self._native = new_session() if settings.dp_exchange == "native" else ""
        self._groups = settings.ep_size > 1 or settings.enable_dp_lm_head
        self._collective = settings.dp_exchange == "collective"
        meets = self._groups or self._collective
        self._meeting = TemporaryDirectory(prefix="engine-") if meets else None

    def join(self, process: Process, tasks: TaskGroup, engine: Engine, server: Closing) -> None:
        """Becomes an actor of this process; from now on there is something to close."""
        self._process = process
        self._tasks = tasks
        self._engine = engine
        self._server = server
        process.refs["launcher"] = self

    def tell(self, msg: Message) -> None:
        """Takes RankUp, PhaseBegan, KillRanks and CloseServer; never waits."""
        if isinstance(msg, RankUp):
            self._up.add(msg.rank)
            self._process.refs["health"].tell(msg)
            if len(self._up) == self._settings.dp_size:
                self._process.report(f"api: {self._settings.model_name} is served on {self._url}")
        elif isinstance(msg, PhaseBegan):
            self.phases.enter(msg.phase)
        elif isinstance(msg, KillRanks):
            self._killed = True
            for child in self.children.values():
                child.kill()
        elif isinstance(msg, CloseServer):
            self.exit_code = max(self.exit_code, msg.code)
            if self._server is not None:
                self._server.should_exit = True
            if "grammar" in self._process.refs:
                # Who still waits for a grammar is answered, and doesn't hold up the end.
                self._process.refs["grammar"].tell(Stop("the server closes"))
        else:
            raise Unexpected(f"launcher: {type(msg).__name__} isn't among its messages")

    async def offer(self, msg: Message) -> None:
        """As `tell`."""
        self.tell(msg)

    async def start_rank(self, rank: int, mesh: Mesh) -> None:
        """Starts a rank's process and its link; `mesh` has the ends of the links between ranks."""
        settings = self._settings
        name = f"rank{rank}"
        folder = self._meeting.name if self._meeting else ""
        session = f"{folder}/exchange" if self._collective else self._native
        peers = {} if session else mesh.ends_of(rank)
        box = create_box()
        meeting = folder if self._groups else ""
        told = Told(rank, settings, peers, session, meeting, self._board, self._pulse, box)
        shared = [descriptor for descriptor in (self._board, self._pulse, box) if descriptor >= 0]
        child = self.children[rank] = await spawn(
            name,
            self._command,
            msgspec.json.encode(told),
            {**environment(settings.threads, settings.dp_size), **device_of(settings, rank)},
            (*peers.values(), *shared),
        )
        link = self._process.link("api", name, child.stream)
        self._tasks.start_soon(self._watch, rank, child, link, box)

    async def _watch(self, rank: int, child: Child, link: Link, box: int = -1) -> None:
        """Until the rank's process has ended; whatever it sent has then been taken from the link."""
        try:
            await link.greet(GREET_S)
            await self._process.run_link(link)
        except EngineError as error:
            self._process.report(f"link to {child.name}: {error}")
        with anyio.move_on_after(UNLINKED_S):
            await child.process.wait()
        child.kill()
        code = await child.process.wait()
        self._note_end(rank, child.name, code, words_in(box))
        for listener in ("health", "ingress"):
            await self._process.refs[listener].offer(RankDown(rank, how_it_ended(code)))
        await self._process.refs["shutdown"].offer(RankEnded(rank, code))

    def beats(self) -> tuple[Beat, ...]:
        """The ranks' signs of life."""
        return () if self._pulses is None else self._pulses.read_all()

    def pids(self) -> tuple[tuple[int, int], ...]:
        """Process of each rank that was started."""
        return tuple((rank, child.process.pid) for rank, child in self.children.items())

    def _note_end(self, rank: int, name: str, code: int, words: str) -> None:
        """For the report; whoever was killed on purpose at the end is no cause of it."""
        if code and not self._killed:
            given_up = self._given_up.get(rank, "")
            how = f"{how_it_ended(code)}: it {given_up}" if given_up else how_it_ended(code)
            self._end.note_death(name, how, words)
        else:
            self._end.note_words(name, words)

    def _give_up(self, rank: int, cause: str) -> None:
        self._given_up[rank] = cause
        self._process.report(f"api: rank{rank} {cause}; it is ended")

    async def listen_to_signals(self) -> None:
        """Tells the shutdown coordinator of each SIGINT and SIGTERM."""
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async for _ in signals:
                await self._process.refs["shutdown"].offer(Signalled())

    async def run(self) -> None:
        """Starts the ranks; returns when the server has closed."""
        self._tasks.start_soon(self.listen_to_signals)
        if self._pulses is not None:
            silence_s = self._settings.watchdog_s
            watch = HangWatch(self._pulses, self.children, self._up, silence_s, self._give_up)
            self._tasks.start_soon(watch.run)
        with Mesh(self._settings.dp_size) as mesh:
            for rank in range(self._settings.dp_size):
                await self.start_rank(rank, mesh)
        await self._closed.wait()

    async def serve(self, sock: socket.socket) -> None:
        """Serves until it is told to close and the last answers have left."""
        assert self._server is not None
        await self._server.run_on(sock)
        self._closed.set()

    def fail(self, error: EngineError) -> None:
        """The actors of this process have ended: clients hear it, and the server closes."""
        self.exit_code = FAILED
        if self._engine is not None and self._server is not None:
            self._engine.fail(error)
            self._server.should_exit = True

    async def end_children(self) -> None:
        """Whatever happened: no process is left, and nothing that they shared."""
        with anyio.CancelScope(shield=True):
            for child in self.children.values():
                child.kill()
                await child.process.wait()
        self.phases.end()
        if not self._end.is_empty:
            recorders = self._process.recorders() if self._end.deaths else ""
            self._process.report(f"api: how it ended\n{self._end.text(recorders)}")
        if self._native:
            remove(self._native)
        if self._meeting:
            self._meeting.cleanup()


def device_of(settings: Settings, rank: int) -> dict[str, str]:
    """Environment that names a rank's own device 0, of those that this process may use.

    The others come behind it: the driver hands over memory only of devices that a process sees.
    """
    if settings.device != "cuda" or settings.dp_size == 1:
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else [str(number) for number in range(settings.dp_size)]
    if len(devices) < settings.dp_size:
        raise ConfigError(
            f"--dp-size is {settings.dp_size}, but CUDA_VISIBLE_DEVICES names {len(devices)} devices"
        )
    others = (device for device in devices[: settings.dp_size] if device != devices[rank])
    return {"CUDA_VISIBLE_DEVICES": ",".join((devices[rank], *others))}
