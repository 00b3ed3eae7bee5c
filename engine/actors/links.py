"""A link between two processes: a writing loop, a reading loop, and a `Hello` before anything else.

The writing loop sends everything that waits in its outbox at once. The reading loop posts into the receivers'
mailboxes and waits where one is full, so that a slow actor slows its senders and nobody's memory grows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import anyio
import anyio.lowlevel

from engine.actors.mailbox import Mailbox
from engine.actors.wire import ByteStream, Codec, FrameReader
from engine.errors import BadMessage, LinkRefused
from engine.messages import Hello, Message, Stop

VERSION = 1
"""Version of the wire: frames and messages; raised with each change of either."""


class Ref(Protocol):
    """Where messages for one actor go: its mailbox, or a link's outbox."""

    def tell(self, msg: Message) -> None:
        """Never waits; raises MailboxFull."""

    async def offer(self, msg: Message) -> None:
        """Waits for room where the policy is `wait`."""


@dataclass(frozen=True, slots=True)
class Addressed:
    """A message on its way out, with its receiver."""

    to: str
    msg: Message


@dataclass(frozen=True, slots=True)
class RemoteRef:
    """An actor at the far end of a link."""

    name: str
    outbox: Mailbox

    def tell(self, msg: Message) -> None:
        """As Ref.tell; `Stop` keeps its priority on this side, too."""
        if isinstance(msg, Stop):
            self.outbox.tell_first(Addressed(self.name, msg))
        else:
            self.outbox.tell(Addressed(self.name, msg))

    async def offer(self, msg: Message) -> None:
        """As Ref.offer."""
        if isinstance(msg, Stop):
            self.outbox.tell_first(Addressed(self.name, msg))
        else:
            await self.outbox.offer(Addressed(self.name, msg))


class Link:
    """One end of a connection.

    name    of this end, as the far end prints it
    outbox  of Addressed; its policy is `wait`
    """

    def __init__(self, name: str, spec_hash: str, stream: ByteStream, codec: Codec, outbox: Mailbox) -> None:
        self.codec = codec
        self.outbox = outbox
        self.peer = ""
        self._sending = False
        self._flushed = anyio.Event()
        self._hello = Hello(version=VERSION, spec_hash=spec_hash, name=name)
        self._stream = stream
        self._reader = FrameReader(stream)

    def ref(self, to: str) -> RemoteRef:
        """The far end's actor `to`."""
        return RemoteRef(to, self.outbox)

    async def greet(self, within_s: float) -> Hello:
        """Sends this end's Hello and returns the far end's; raises LinkRefused.

        Both ends check, so that the refusing one needs no answer.
        """
        await self._stream.send(self.codec.encode("", self._hello))
        try:
            with anyio.fail_after(within_s):
                frame = await self._reader.next()
        except TimeoutError as error:
            raise LinkRefused(f"{self._hello.name}: the far end sent no Hello within {within_s} s") from error
        if frame is None:
            raise LinkRefused(f"{self._hello.name}: the far end closed before its Hello")
        theirs = self._as_hello(frame)
        if (theirs.version, theirs.spec_hash) != (VERSION, self._hello.spec_hash):
            raise LinkRefused(
                f"{self._hello.name} has version {VERSION} and specs {self._hello.spec_hash[:12]}, but "
                f"{theirs.name} has version {theirs.version} and specs {theirs.spec_hash[:12]}"
            )
        self.peer = theirs.name
        return theirs

    def _as_hello(self, frame: bytes) -> Hello:
        try:
            _, theirs = self.codec.decode(frame)
        except BadMessage as error:
            raise LinkRefused(f"{self._hello.name}: the first frame isn't a Hello: {error}") from error
        if not isinstance(theirs, Hello):
            raise LinkRefused(
                f"{self._hello.name}: the first frame is a {type(theirs).__name__}, not a Hello"
            )
        return theirs

    async def run(self, local: Mapping[str, Ref], on_bad: Callable[[BadMessage], None]) -> None:
        """Moves messages both ways until the far end closes or dies; then returns.

        local   the actors of this process that the far end may address
        on_bad  is told of each frame that didn't decode; the frame is skipped
        raises  BadMessage where the stream can't be cut into frames any more
        """
        broken: BadMessage | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._write)
            try:
                await self._read(local, on_bad)
            except BadMessage as error:  # kept whole: a task group would wrap it
                broken = error
            finally:
                self.outbox.close()
                self._flushed.set()
                tasks.cancel_scope.cancel()
        if broken is not None:
            raise broken

    async def _read(self, local: Mapping[str, Ref], on_bad: Callable[[BadMessage], None]) -> None:
        while (frame := await self._reader.next()) is not None:
            try:
                to, msg = self.codec.decode(frame)
            except BadMessage as error:
                on_bad(error)
                continue
            if isinstance(msg, Hello):
                on_bad(BadMessage(f"a second Hello from {self.peer}"))
                continue
            await local[to].offer(msg)

    async def _write(self) -> None:
        encode = self.codec.encode
        while True:
            waiting = await self.outbox.take()
            self._sending = True
            try:
                await self._stream.send(b"".join([encode(item.to, item.msg) for item in waiting]))
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                # The reading loop sees the same end, after the messages that are still in the stream.
                return
            finally:
                self._sending = False
                self._flushed.set()
                self._flushed = anyio.Event()

    async def flush(self) -> None:
        """Waits until everything that was told so far is in the transport, or the link has ended."""
        while (len(self.outbox) or self._sending) and not self.outbox.closed:
            await self._flushed.wait()

    async def close(self) -> None:
        """Closes the transport."""
        with anyio.CancelScope(shield=True):
            await self._stream.aclose()


class MemoryStream:
    """One end of an in-memory byte stream with a bounded buffer, for links within one process."""

    def __init__(self, buffer_bytes: int) -> None:
        self._inbox = bytearray()
        self._buffer_bytes = buffer_bytes
        self._far = self
        self._closed = False
        self._changed = anyio.Event()

    async def send(self, item: bytes) -> None:
        """As ByteStream.send."""
        far = self._far
        await anyio.lowlevel.checkpoint()
        while len(far._inbox) >= far._buffer_bytes and not (far._closed or self._closed):
            await far._changed.wait()
        if far._closed or self._closed:
            raise anyio.BrokenResourceError
        far._inbox += item
        far._wake()

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """As ByteStream.receive."""
        await anyio.lowlevel.checkpoint()
        while not self._inbox:
            if self._closed:
                raise anyio.ClosedResourceError
            if self._far._closed:
                raise anyio.EndOfStream
            await self._changed.wait()
        taken = bytes(self._inbox[:max_bytes])
        del self._inbox[:max_bytes]
        self._wake()
        return taken

    async def aclose(self) -> None:
        """Closes both directions; the far end may still read what was sent."""
        self._closed = True
        self._wake()
        self._far._wake()
        await anyio.lowlevel.checkpoint()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


def memory_pair(buffer_bytes: int = 1 << 18) -> tuple[MemoryStream, MemoryStream]:
    """Two connected ends; `send` waits while the far end holds `buffer_bytes` or more unread."""
    near, far = MemoryStream(buffer_bytes), MemoryStream(buffer_bytes)
    near._far, far._far = far, near
    return near, far
