"""What a frame must be to belong to the batch that is expected, and how errors are told to the far end."""

from __future__ import annotations

from collections.abc import Sequence

from engine import errors
from engine.errors import DescriptorError
from engine.transport import Layout, Region, check_apart, check_span
from engine.transport.connections import Connection
from engine.transport.frames import ANSWER, Frame

CODES: tuple[type[DescriptorError], ...] = (
    DescriptorError,
    errors.DescriptorFrame,
    errors.DescriptorVersion,
    errors.DescriptorSession,
    errors.DescriptorGeneration,
    errors.DescriptorKind,
    errors.DescriptorCount,
    errors.DescriptorTruncated,
    errors.DescriptorDuplicate,
    errors.DescriptorSize,
    errors.DescriptorSpan,
    errors.DescriptorUnsealed,
    errors.DescriptorDevice,
    errors.DescriptorForeign,
    errors.DescriptorPeerDead,
    errors.DescriptorPeerReplaced,
    errors.DescriptorForked,
    errors.DescriptorClosed,
    errors.DescriptorTimeout,
    errors.DescriptorSyscall,
    errors.RegionInUse,
    errors.CudaCallFailed,
)
"""By code of an answer; 0 is success."""


def check_frame(connection: Connection, expected: Layout, frame: Frame, before: Sequence[Frame]) -> None:
    """Against the layout and the frames that came `before`, the next one is due. raises DescriptorError."""
    check_origin(connection, frame)
    if frame.kind == ANSWER:
        raise told_by(connection, frame)
    if frame.generation != expected.generation:
        raise errors.DescriptorGeneration(f"generation {frame.generation}, not {expected.generation}")
    if frame.kind != expected.kind:
        raise errors.DescriptorKind(f"a frame of kind {frame.kind}, not {int(expected.kind)}")
    if frame.device != expected.device:
        raise errors.DescriptorDevice(f"memory of device {frame.device.hex()}, not {expected.device.hex()}")
    if frame.count != len(expected.spans):
        raise errors.DescriptorCount(f"a batch of {frame.count}, not of {len(expected.spans)}")
    if frame.index < len(before):
        raise errors.DescriptorDuplicate(f"frame {frame.index} came twice")
    if frame.index > len(before):
        raise errors.DescriptorCount(f"frame {frame.index} came where {len(before)} was due")
    if (frame.pool_bytes, frame.granularity) != (expected.pool_bytes, expected.granularity):
        due = f"{expected.pool_bytes} bytes in units of {expected.granularity}"
        raise errors.DescriptorSize(
            f"a pool of {frame.pool_bytes} in units of {frame.granularity}, not {due}"
        )
    span = frame.offset, frame.size
    check_span(span, frame.pool_bytes, frame.granularity, frame.index)
    check_apart((*((other.offset, other.size) for other in before), span))
    offset, size = expected.spans[frame.index]
    if frame.size != size:
        raise errors.DescriptorSize(f"span {frame.index} has {frame.size} bytes, not {size}")
    if frame.offset != offset:
        raise errors.DescriptorSpan(f"span {frame.index} is at {frame.offset}, not at {offset}")


def check_origin(connection: Connection, frame: Frame) -> None:
    """Session and ranks. raises DescriptorSession."""
    due = connection.session, connection.peer_rank, connection.rank
    if (frame.session, frame.source, frame.target) != due:
        of = f"of session {frame.session.hex()} from rank {frame.source} to {frame.target}"
        expected = f"{due[0].hex()} from {due[1]} to {due[2]}"
        raise errors.DescriptorSession(f"a frame {of}; {expected} was expected")


def check_own(layout: Layout, regions: Sequence[Region]) -> None:
    """That the regions are what the layout says, before anything is sent."""
    if len(regions) != len(layout.spans):
        raise errors.DescriptorCount(f"{len(regions)} regions for {len(layout.spans)} spans")
    if len({id(region) for region in regions}) < len(regions):
        raise errors.DescriptorDuplicate("a region is offered twice in one batch")
    for index, (region, (_, size)) in enumerate(zip(regions, layout.spans, strict=True)):
        if region.kind != layout.kind:
            raise errors.DescriptorKind(f"region {index} is {region.kind.name}, not {layout.kind.name}")
        if region.nbytes != size:
            raise errors.DescriptorSize(f"region {index} has {region.nbytes} bytes, its span {size}")
        if region.device_uuid != layout.device:
            where = f"device {region.device_uuid.hex()}, not on {layout.device.hex()}"
            raise errors.DescriptorDevice(f"region {index} is on {where}")


def told_by(connection: Connection, answer: Frame) -> DescriptorError:
    """The error that the far end told."""
    if not 0 < answer.code < len(CODES):
        return errors.DescriptorFrame(f"an answer has the code {answer.code}")
    error = CODES[answer.code](f"told by rank {connection.peer_rank}")
    error.rank = connection.peer_rank
    return error
