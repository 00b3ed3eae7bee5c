"""Links in memory and in virtual time: delay, loss, rubbish. Nothing here uses a descriptor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
import trio

from engine.actors.links import Addressed, RemoteRef
from engine.actors.mailbox import Mailbox
from engine.messages import Message, PeerDown
from engine.sim.clock import Agenda

BUFFER_BYTES = 1 << 16


class Wire:
    """One end of a byte stream; what is sent arrives after a delay, in order.

    extra_s    seconds that everything sent from now on takes longer
    cut_after  bytes that still pass; then both directions are gone. None: no limit
    """

    def __init__(self, agenda: Agenda, delay_s: Callable[[], float]) -> None:
        self.extra_s = 0.0
        self.cut_after: int | None = None
        self.far = self
        self._agenda = agenda
        self._delay_s = delay_s
        self._inbox = bytearray()
        self._under_way = 0
        self._due_s = 0.0
        self._ended = False
        self._closed = False
        self._changed = trio.Event()

    async def send(self, item: bytes) -> None:
        """As ByteStream.send; waits while the far end has too much unread."""
        far = self.far
        while len(far._inbox) + self._under_way >= BUFFER_BYTES and not (self._closed or self._ended):
            await self._changed.wait()
        if self._closed or self._ended:
            raise anyio.BrokenResourceError
        if self.cut_after is not None:
            item, self.cut_after = item[: self.cut_after], max(self.cut_after - len(item), 0)
        self._under_way += len(item)
        self._later(lambda: self._arrive(item))
        if self.cut_after == 0:
            self.cut()

    def _later(self, act: Callable[[], None]) -> None:
        self._due_s = max(self._due_s, self._agenda.now_s() + self._delay_s() + self.extra_s)
        self._agenda.at(self._due_s, act)

    def _arrive(self, item: bytes) -> None:
        self._under_way -= len(item)
        self.far._inbox += item
        self.far._wake()
        self._wake()

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """As ByteStream.receive."""
        if self._inbox:
            await anyio.lowlevel.checkpoint()
        while not self._inbox:
            if self._closed:
                raise anyio.ClosedResourceError
            if self._ended:
                raise anyio.EndOfStream
            await self._changed.wait()
        taken = bytes(self._inbox[:max_bytes])
        del self._inbox[:max_bytes]
        self.far._wake()
        return taken

    async def aclose(self) -> None:
        """Closes this end; the far end reads what was sent, and then the end."""
        if not self._closed:
            self._closed = True
            self._later(self.far._end)
            self._wake()
        await anyio.lowlevel.checkpoint()

    def cut(self) -> None:
        """The connection is lost: what is under way still arrives, nothing more does."""
        self._later(self.far._end)
        self.far._later(self._end)

    def _end(self) -> None:
        self._ended = True
        self._wake()

    def inject(self, item: bytes) -> None:
        """Bytes that this end never sent arrive at the far end."""
        self._under_way += len(item)
        self._later(lambda: self._arrive(item))

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


def wire_pair(agenda: Agenda, delay_s: Callable[[], float]) -> tuple[Wire, Wire]:
    """Two connected ends."""
    near, far = Wire(agenda, delay_s), Wire(agenda, delay_s)
    near.far, far.far = far, near
    return near, far


class Exchange:
    """The wants of ranks on their way: one value a round and pair, in order, after a delay.

    extra_s  seconds that every message takes longer; lost: ranks whose messages no longer arrive;
    left: ranks that have ended
    """

    def __init__(self, agenda: Agenda, delay_s: Callable[[], float], ranks: int) -> None:
        self.ranks = ranks
        self.left: set[int] = set()
        self.extra_s = 0.0
        self.lost: set[int] = set()
        self.mailboxes: dict[int, Mailbox] = {}
        self._agenda = agenda
        self._delay_s = delay_s
        self._due_s: dict[tuple[int, int], float] = {}
        self._early: dict[int, list[Message]] = {}

    def join(self, rank: int, mailbox: Mailbox) -> None:
        """From now on the rank reads; what its peers have published before is there."""
        self.mailboxes[rank] = mailbox
        for msg in self._early.pop(rank, ()):
            mailbox.tell(msg)

    def ref(self, source: int, target: int) -> RemoteRef:
        """What `source` sends to `target` with."""
        outbox: Any = Published(self, source, target)
        return RemoteRef(f"rank{target}", outbox)

    def publish(self, source: int, target: int, msg: Message) -> None:
        """Never waits."""
        if source in self.lost:
            return
        pair = (source, target)
        due_s = max(self._due_s.get(pair, 0.0), self._agenda.now_s() + self._delay_s() + self.extra_s)
        self._due_s[pair] = due_s
        self._agenda.at(due_s, lambda: self._arrive(target, msg))

    def leave(self, source: int) -> None:
        """The rank has ended: its peers hear of that behind all that it published."""
        if source in self.left:
            return
        self.left.add(source)
        # What it says from now on arrives no more, and nor does its end where its messages are lost.
        for target in range(self.ranks):
            if target != source:
                self.publish(source, target, PeerDown(source, "PeerDead", f"rank {source} is gone"))
        self.lost.add(source)

    def _arrive(self, target: int, msg: Message) -> None:
        mailbox = self.mailboxes.get(target)
        if mailbox is None:
            self._early.setdefault(target, []).append(msg)
        else:
            mailbox.tell(msg)


class Published:
    """In place of a link's outbox: what is told is published."""

    def __init__(self, exchange: Exchange, source: int, target: int) -> None:
        self._exchange, self._source, self._target = exchange, source, target

    def tell(self, item: Addressed) -> None:
        """As Mailbox.tell."""
        self._exchange.publish(self._source, self._target, item.msg)

    async def offer(self, item: Addressed) -> None:
        """As Mailbox.offer."""
        self.tell(item)
