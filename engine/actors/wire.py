"""Frames on a byte stream: 4 bytes of length, 1 byte of receiver, a msgpack body.

length    uint32 little-endian, of receiver and body together
receiver  index into the list of receivers, which both ends take from the same system description
body      one message, array-like and tagged; each receiver has one decoder over the union of its messages,
          so that an unknown tag or a wrong type never passes the wire
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Union

import anyio
import msgspec

from engine.errors import BadMessage
from engine.messages import Hello, Message

FRAME_BYTES = 64 << 20
"""Longest frame; a prompt of a million tokens takes 4 MiB."""

KEPT_BYTES = 1024
"""How much of an undecodable frame is kept for its report."""

HEAD_BYTES = 4
HELLO_INDEX = 255
"""Receiver index of the first frame of a link."""


class ByteStream(Protocol):
    """What a link needs of its transport; anyio's socket streams and `MemoryStream` have it."""

    async def send(self, item: bytes) -> None:
        """Sends all bytes, waiting while the far end doesn't read; BrokenResourceError when it is gone."""

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """At least one byte; EndOfStream when the far end has closed."""

    async def aclose(self) -> None:
        """Closes both directions."""


@dataclass(slots=True)
class BadFrames:
    """Frames that didn't decode: how many, and the first bytes of the last one."""

    count: int = 0
    kept: bytes = b""
    error: str = ""

    def note(self, frame: bytes, error: Exception) -> None:
        """Counts one and keeps its first kilobyte."""
        self.count += 1
        self.kept = bytes(frame[:KEPT_BYTES])
        self.error = str(error)


@dataclass(slots=True)
class Codec:
    """Encodes for any receiver, decodes for those of this process.

    receivers  every actor kind, in the order that both ends share; at most 255
    accepts    receiver -> the message types that it takes
    """

    receivers: Sequence[str]
    accepts: Mapping[str, tuple[type[Message], ...]]
    bad: BadFrames = field(default_factory=BadFrames)
    _index: dict[str, int] = field(init=False)
    _decoders: dict[int, tuple[str, msgspec.msgpack.Decoder[Any]]] = field(init=False)
    _encoder: msgspec.msgpack.Encoder = field(init=False)

    def __post_init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._index = {name: at for at, name in enumerate(self.receivers)}
        self._decoders = {HELLO_INDEX: ("", msgspec.msgpack.Decoder(Hello))}
        for name, kinds in self.accepts.items():
            union: Any = Union[kinds]  # noqa: UP007 - built from a tuple
            self._decoders[self._index[name]] = (name, msgspec.msgpack.Decoder(union))

    def encode(self, to: str, msg: Message) -> bytes:
        """One frame for receiver `to`; "" is the link itself, for Hello. Raises BadMessage when too long."""
        body = self._encoder.encode(msg)
        length = len(body) + 1
        if length > FRAME_BYTES:
            raise BadMessage(f"a {type(msg).__name__} of {length} bytes exceeds a frame's {FRAME_BYTES}")
        index = self._index[to] if to else HELLO_INDEX
        return length.to_bytes(HEAD_BYTES, "little") + bytes((index,)) + body

    def decode(self, frame: bytes) -> tuple[str, Message]:
        """(receiver, message) of a frame without its length. Raises BadMessage and notes its first bytes."""
        try:
            name, decoder = self._decoders[frame[0]]
            return name, decoder.decode(memoryview(frame)[1:])
        except (KeyError, IndexError, msgspec.MsgspecError) as error:
            self.bad.note(frame, error)
            raise BadMessage(f"frame of {len(frame)} bytes, beginning {frame[:16]!r}: {error!r}") from error


class FrameReader:
    """Cuts a byte stream into frames; holds at most one unfinished frame."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._held = bytearray()

    async def next(self) -> bytes | None:
        """The next frame without its length, or None at the stream's end.

        Raises BadMessage for a length of zero or beyond FRAME_BYTES, and for a stream that ends within a
        frame: no later frame could be found.
        """
        held = self._held
        while True:
            if len(held) >= HEAD_BYTES:
                length = int.from_bytes(held[:HEAD_BYTES], "little")
                if not 0 < length <= FRAME_BYTES:
                    raise BadMessage(
                        f"a frame says {length} bytes, 1 to {FRAME_BYTES} are allowed: {bytes(held[:16])!r}"
                    )
                if len(held) >= HEAD_BYTES + length:
                    frame = bytes(held[HEAD_BYTES : HEAD_BYTES + length])
                    del held[: HEAD_BYTES + length]
                    return frame
            try:
                held += await self._stream.receive()
            except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError) as end:
                if held:
                    raise BadMessage(f"the stream ended within a frame, after {len(held)} bytes") from end
                return None
