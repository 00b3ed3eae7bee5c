"""How ranks reach each other: ends of links made by the launcher, joined in each rank's process.

What a rank wants of a step goes out as `Send("rankK", Peer(...))`, whatever carries it; when a peer is out of
reach for good the core gets `PeerDown`, behind all that the peer sent. Nothing here has a name in the file
system but the native exchange's page, which its ranks unlink, and which the launcher removes after them.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import anyio
import anyio.to_thread

from engine.actors.links import Link
from engine.actors.mailbox import Mailbox
from engine.actors.process import Process
from engine.actors.wire import ByteStream
from engine.errors import EngineError, ExchangeClosed, ExchangeError, PeerDead
from engine.exchange import STEP, Exchange
from engine.exchange.lines import PeerLines
from engine.exchange.meter import ExchangeMeter
from engine.messages import Message, Peer, PeerDown
from engine.tap import Tap

GREET_S = 60.0
"""Ranks are started one after the other, and each needs a second or two before it can greet."""


class Mesh(AbstractContextManager["Mesh"]):
    """A connected socket pair for every two ranks; the launcher lets go of them when all are handed out."""

    def __init__(self, ranks: int) -> None:
        self._ends: dict[tuple[int, int], socket.socket] = {}
        for low in range(ranks):
            for high in range(low + 1, ranks):
                self._ends[low, high], self._ends[high, low] = socket.socketpair()

    def ends_of(self, rank: int) -> dict[int, int]:
        """Descriptor to each peer of this rank."""
        return {to: end.fileno() for (own, to), end in self._ends.items() if own == rank}

    def __exit__(self, *exc: object) -> None:
        """Only the ranks hold their ends now: whoever dies is heard by its peers."""
        for end in self._ends.values():
            end.close()
        self._ends.clear()


def join_by_links(
    rank: int, streams: Mapping[int, ByteStream], meter: ExchangeMeter | None = None
) -> Callable[[Process], None]:
    """A link to each peer: any number of ranks.

    streams  by peer
    meter    is told of each offer
    """
    noted = meter or ExchangeMeter()

    def offered(msg: Message) -> Message:
        noted.offered()
        return msg

    def join(process: Process) -> None:
        name = f"rank{rank}"
        for peer, stream in streams.items():
            link = process.link(name, f"rank{peer}", stream)
            process.reach(f"rank{peer}", Tap(process.refs[f"rank{peer}"], offered))
            process.spawn(_run_link, process, link, peer, process.mailbox(name))

    return join


async def _run_link(process: Process, link: Link, peer: int, mailbox: Mailbox) -> None:
    cause = "its link has ended"
    try:
        await link.greet(GREET_S)
        await process.run_link(link)
    except EngineError as error:
        cause = str(error)
    await mailbox.offer(PeerDown(peer, PeerDead.__name__, f"rank {peer} is gone: {cause}"))


def join_by_exchange(
    rank: int, ranks: int, opened: Callable[[], Exchange], meter: ExchangeMeter | None = None
) -> Callable[[Process], anyio.Event]:
    """An exchange for all peers.

    opened  makes it; it may take long and runs on a thread
    meter   measures it
    returns what sets its event when the exchange is open, or has failed
    """

    def join(process: Process) -> anyio.Event:
        line = ExchangeRef(process.mailbox(f"rank{rank}"), meter or ExchangeMeter())
        for peer in range(ranks):
            if peer != rank:
                process.reach(f"rank{peer}", line)
        process.spawn(line.run, opened, process.timers)
        return line.ready

    return join


class ExchangeRef:
    """Stands for every peer: one publication reaches them all.

    ready  set when it can, or never will
    """

    def __init__(self, mailbox: Mailbox, meter: ExchangeMeter) -> None:
        self._mailbox = mailbox
        self._meter = meter
        self._lines: PeerLines | None = None
        self.ready = anyio.Event()
        self._epoch = -1
        self._left = False

    def tell(self, msg: Message) -> None:
        """Publishes what this rank wants, once an epoch; a failure comes back to the core as `PeerDown`.

        So does one that nobody is left to answer: a rank that fails between two rounds leaves in good order.
        """
        if not isinstance(msg, Peer) or msg.epoch == self._epoch:
            return
        if self._lines is None:
            if self._left:
                text = f"the other ranks have left, and none answers in epoch {msg.epoch}"
                self._mailbox.tell(PeerDown(-1, ExchangeClosed.__name__, text))
            return
        self._epoch = msg.epoch
        self._meter.offered()
        try:
            self._lines.offer(STEP, msg.epoch, msg.values)
        except ExchangeError as error:
            self._meter.failed(error)
            self._mailbox.tell(_down(error))

    async def offer(self, msg: Message) -> None:
        """As `tell`, once the exchange is open."""
        await self.ready.wait()
        self.tell(msg)

    async def run(self, opened: Callable[[], Exchange], timers: Any) -> None:
        """Opens the exchange and hears the peers, until they have left or one of them is lost."""
        try:
            exchange = await anyio.to_thread.run_sync(opened, abandon_on_cancel=True)
            self._meter.opened(exchange)
            self._lines = PeerLines(exchange, {STEP: lambda heard: self._mailbox.tell(Peer(*heard))}, timers)
            self.ready.set()
            await self._lines.run()
            self._left = True
        except EngineError as error:
            self._meter.failed(error)
            await self._mailbox.offer(_down(error))
        finally:
            self._lines = None
            self.ready.set()


def _down(error: EngineError) -> PeerDown:
    # The error knows who found the fault, not who is to blame.
    return PeerDown(-1, type(error).__name__, str(error))
