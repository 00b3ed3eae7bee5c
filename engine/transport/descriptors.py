"""Handing over a batch of regions: one frame and one descriptor each, then one answer; all of it or nothing.

The receiver checks and maps the whole batch before it answers, and the sender waits for the answer: when both
calls have returned, both have the memory. Whoever finds a fault tells the other one, so that both raise the
same error; each then has closed every descriptor, unmapped what it had mapped, and closed the connection.

Why in Python: see docs/architecture.md, with the measurement.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import TypeVar, overload

from engine import errors
from engine.errors import DescriptorError, EngineError
from engine.transport import Importer, Layout, Region
from engine.transport.checks import CODES, check_frame, check_origin, check_own, told_by
from engine.transport.connections import Connection
from engine.transport.frames import ANSWER, Frame

WITHIN_S = 120.0
_TELL_S = 1.0
"""To tell a fault; who doesn't take it in time finds the connection closed."""


R = TypeVar("R", bound=Region)


class Regions(Sequence[R]):
    """What was received, by index."""

    def __init__(self, regions: Sequence[R]) -> None:
        self._regions = list(regions)

    @overload
    def __getitem__(self, index: int) -> R: ...
    @overload
    def __getitem__(self, index: slice) -> list[R]: ...
    def __getitem__(self, index: int | slice) -> R | list[R]:
        return self._regions[index]

    def __len__(self) -> int:
        return len(self._regions)

    def close(self) -> None:
        """Closes all, the last first. Goes on after an error, keeps what couldn't close, raises the first."""
        first: EngineError | None = None
        kept: list[R] = []
        for region in reversed(self._regions):
            try:
                region.close()
            except EngineError as error:
                first = first or error
                kept.insert(0, region)
        self._regions = kept
        if first is not None:
            raise first


def offer(
    connection: Connection, layout: Layout, regions: Sequence[Region], within_s: float = WITHIN_S
) -> None:
    """Hands `regions` over, in the layout's order; returns when the far end has mapped them all.

    The regions stay this side's, whatever happens. raises DescriptorError; then the connection is closed.
    """
    deadline_s = time.monotonic() + within_s
    try:
        check_own(layout, regions)
        for index, region in enumerate(regions):
            descriptor = region.export()
            try:
                connection.send(frame_of(connection, layout, index), [descriptor], deadline_s)
            finally:
                os.close(descriptor)
        take_answer(connection, layout, deadline_s)
    except DescriptorError as error:
        raise _given_up(connection, layout, error) from error
    except BaseException:
        connection.close()
        raise


def accept(
    connection: Connection, expected: Layout, importer: Importer[R], within_s: float = WITHIN_S
) -> Regions[R]:
    """Receives and maps exactly the expected batch. raises DescriptorError; then the connection is closed."""
    deadline_s = time.monotonic() + within_s
    with ExitStack() as mapped:
        try:
            regions = _adopted(connection, expected, importer, deadline_s, mapped)
            connection.check_peer()
            connection.send(answer_to(connection, expected, 0), (), deadline_s)
        except DescriptorError as error:
            raise _given_up(connection, expected, error) from error
        except BaseException:
            connection.close()
            raise
        mapped.pop_all()
        return Regions(regions)


def _adopted(
    connection: Connection, expected: Layout, importer: Importer[R], deadline_s: float, mapped: ExitStack
) -> list[R]:
    if importer.kind != expected.kind:
        raise errors.DescriptorKind(f"{importer.kind.name} can't be had from {expected.kind.name}")
    regions: list[R] = []
    with ExitStack() as opened:
        descriptors = _received(connection, expected, importer, deadline_s, opened)
        for descriptor, (_, size) in zip(descriptors, expected.spans, strict=True):
            regions.append(importer.adopt(descriptor, size, expected.device))
            mapped.callback(regions[-1].close)
    return regions


def _received(
    connection: Connection, expected: Layout, importer: Importer[R], deadline_s: float, opened: ExitStack
) -> list[int]:
    """A checked descriptor for each span; `opened` closes them."""
    frames: list[Frame] = []
    descriptors: list[int] = []
    while len(frames) < len(expected.spans):
        frame, found = connection.receive(deadline_s)
        for descriptor in found:
            opened.callback(os.close, descriptor)
        check_frame(connection, expected, frame, frames)
        if len(found) != 1:
            raise errors.DescriptorCount(
                f"frame {frame.index} came with {len(found)} descriptors, not with 1"
            )
        for index, other in enumerate(descriptors):
            if importer.same(found[0], other):
                raise errors.DescriptorDuplicate(f"frames {index} and {frame.index} bring the same memory")
        importer.check(found[0], frame.size)
        frames.append(frame)
        descriptors += found
    return descriptors


def take_answer(connection: Connection, layout: Layout, deadline_s: float) -> None:
    """Returns where the far end has the whole batch. raises DescriptorError."""
    answer, found = connection.receive(deadline_s)
    for descriptor in found:
        os.close(descriptor)
    check_origin(connection, answer)
    if answer.kind != ANSWER or found:
        raise errors.DescriptorFrame(
            f"kind {answer.kind} with {len(found)} descriptors in place of an answer"
        )
    if answer.code:
        raise told_by(connection, answer)
    if (answer.generation, answer.count) != (layout.generation, len(layout.spans)):
        told = f"{answer.count} regions of generation {answer.generation}"
        raise errors.DescriptorGeneration(f"the far end has {told}, not of {layout.generation}")


def _given_up(connection: Connection, layout: Layout, error: DescriptorError) -> DescriptorError:
    """Closes the connection once the far end knows why; the error to raise."""
    if error.rank < 0 and connection.own.pid == os.getpid():
        error.rank = connection.rank
        error = _heard_instead(connection, layout, error)
    connection.close()
    return error


def _heard_instead(connection: Connection, layout: Layout, error: DescriptorError) -> DescriptorError:
    """Tells the fault. Where the far end is gone it may have told its own before: that is the cause."""
    until_s = time.monotonic() + _TELL_S
    if not isinstance(error, (errors.DescriptorClosed, errors.DescriptorPeerDead)):
        with suppress(DescriptorError):
            connection.send(answer_to(connection, layout, CODES.index(type(error))), (), until_s)
        return error
    try:
        take_answer(connection, layout, until_s)
    except DescriptorError as told:
        if told.rank == connection.peer_rank:
            return told
    return error


def frame_of(connection: Connection, layout: Layout, index: int) -> Frame:
    """The frame that goes with region `index`."""
    offset, size = layout.spans[index]
    return _with(connection, layout, int(layout.kind), 0, index, offset, size)


def answer_to(connection: Connection, layout: Layout, code: int) -> Frame:
    """What ends a batch: 0 for success, else an error's number in CODES."""
    return _with(connection, layout, ANSWER, code, 0, 0, 0)


def _with(
    connection: Connection, layout: Layout, kind: int, code: int, index: int, offset: int, size: int
) -> Frame:
    return Frame(
        kind=kind,
        code=code,
        session=connection.session,
        source=connection.rank,
        target=connection.peer_rank,
        index=index,
        count=len(layout.spans),
        generation=layout.generation,
        offset=offset,
        size=size,
        pool_bytes=layout.pool_bytes,
        granularity=layout.granularity,
        device=layout.device,
        pid=connection.own.pid,
        start_ticks=connection.own.start_ticks,
    )
