"""The header that travels with each descriptor, and the answer that ends a batch: one fixed layout."""

from __future__ import annotations

import struct
import zlib
from dataclasses import astuple, dataclass

from engine.errors import DescriptorFrame, DescriptorVersion

MAGIC = b"fdbatch\0"
VERSION = 1
"""Raised with each change of the layout or of the rules."""

ANSWER = 0
"""In place of a kind: a frame without a descriptor that says how the batch ended."""

_PREFIX = struct.Struct("<8sHH")
_BODY = struct.Struct("<HH16sIIIIQQQQQ16sIQ")
_CHECK = struct.Struct("<I")
FRAME_BYTES = _PREFIX.size + _BODY.size + _CHECK.size


@dataclass(frozen=True, slots=True)
class Frame:
    """All of one frame but magic, version and checksum; integers are little-endian on the wire.

    kind              a Kind, or ANSWER
    code              of an answer: 0 for success, else the number of an error
    session           16 bytes
    source, target    ranks
    index, count      which frame of how many
    offset, size      the span in its pool, bytes
    pid, start_ticks  who sends, as /proc has it
    """

    kind: int
    code: int
    session: bytes
    source: int
    target: int
    index: int
    count: int
    generation: int
    offset: int
    size: int
    pool_bytes: int
    granularity: int
    device: bytes
    pid: int
    start_ticks: int

    def encode(self) -> bytes:
        """FRAME_BYTES bytes."""
        head = _PREFIX.pack(MAGIC, VERSION, FRAME_BYTES) + _BODY.pack(*astuple(self))
        return head + _CHECK.pack(zlib.crc32(head))

    @staticmethod
    def decode(data: bytes) -> Frame:
        """raises DescriptorFrame, DescriptorVersion."""
        if len(data) < _PREFIX.size:
            raise DescriptorFrame(f"a frame of {len(data)} bytes; {FRAME_BYTES} are due")
        magic, version, length = _PREFIX.unpack_from(data)
        if magic != MAGIC:
            raise DescriptorFrame(f"a frame begins with {magic.hex()}, not {MAGIC.hex()}")
        if version != VERSION:
            raise DescriptorVersion(f"the far end speaks version {version}, this one {VERSION}")
        if len(data) != FRAME_BYTES or length != FRAME_BYTES:
            raise DescriptorFrame(f"a frame of {len(data)} bytes says {length}; {FRAME_BYTES} are due")
        found, due = _CHECK.unpack_from(data, FRAME_BYTES - _CHECK.size)[0], zlib.crc32(data[: -_CHECK.size])
        if found != due:
            raise DescriptorFrame(f"a frame's checksum is {found:#010x}, not {due:#010x}")
        return Frame(*_BODY.unpack_from(data, _PREFIX.size))
