"""Far ends that do something wrong, each in one way."""

from __future__ import annotations

import array
import fcntl
import os
import select
import signal
import socket
import struct
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from engine.errors import DescriptorClosed, DescriptorForked
from engine.transport import Layout, Region
from engine.transport.connections import Connection
from engine.transport.descriptors import answer_to, frame_of, offer, take_answer
from engine.transport.frames import ANSWER, Frame
from engine.transport.memory import SEALS

TAKEN = signal.SIGUSR1
"""Tells a far end that its connection was taken."""

SOON_S = 60.0
"""For what takes a moment: only a hang takes longer."""

Way = Callable[[dict[str, Any], Connection, Layout, Sequence[Region]], None]


def good(end: Connection, layout: Layout, regions: Sequence[Region], count: int) -> None:
    """The first `count` frames, as they should be."""
    for index in range(count):
        put(end, frame_of(end, layout, index), [regions[index].export()])


def put(end: Connection, frame: Frame, descriptors: list[int], deadline_s: float | None = None) -> None:
    """Sends, and closes what it has sent."""
    try:
        end.send(frame, descriptors, deadline_s or time.monotonic() + SOON_S)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def hear(end: Connection, layout: Layout) -> None:
    """Takes the answer, which raises what the far end found."""
    take_answer(end, layout, time.monotonic() + SOON_S)


def frame_with(change: Callable[[Frame, Layout], Frame]) -> Way:
    """A frame that differs in a field."""

    def way(plan: dict[str, Any], end: Connection, layout: Layout, regions: Sequence[Region]) -> None:
        at = plan["at"]
        good(end, layout, regions, at)
        put(end, change(frame_of(end, layout, at), layout), [regions[at].export()])
        hear(end, layout)

    return way


def bytes_with(change: Callable[[bytes], bytes]) -> Way:
    """A frame whose bytes were changed after the checksum was made."""

    def way(plan: dict[str, Any], end: Connection, layout: Layout, regions: Sequence[Region]) -> None:
        at = plan["at"]
        good(end, layout, regions, at)
        data, descriptor = change(frame_of(end, layout, at).encode()), regions[at].export()
        end._socket.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))])
        os.close(descriptor)
        hear(end, layout)

    return way


def descriptors_with(make: Callable[[int, Sequence[Region]], list[int]]) -> Way:
    """A good frame with other descriptors: those of `make(at, regions)`."""

    def way(plan: dict[str, Any], end: Connection, layout: Layout, regions: Sequence[Region]) -> None:
        at = plan["at"]
        good(end, layout, regions, at)
        put(end, frame_of(end, layout, at), make(at, regions))
        hear(end, layout)

    return way


def ends_with(end_it: Callable[[Connection], None]) -> Way:
    """A batch that ends before frame `at`."""

    def way(plan: dict[str, Any], end: Connection, layout: Layout, regions: Sequence[Region]) -> None:
        good(end, layout, regions, plan["at"])
        end_it(end)

    return way


def the_first_again(plan: dict[str, Any], end: Connection, layout: Layout, regions: Sequence[Region]) -> None:
    """The last frame brings the first one's very descriptor."""
    first = regions[0].export()
    put(end, frame_of(end, layout, 0), [os.dup(first)])
    for index in range(1, plan["at"]):
        put(end, frame_of(end, layout, index), [regions[index].export()])
    put(end, frame_of(end, layout, plan["at"]), [first])
    hear(end, layout)


def by_a_child(plan: dict[str, Any], end: Connection, layout: Layout, regions: Sequence[Region]) -> None:
    """A forked child sends in its parent's place: the library refuses, so it does it by hand."""
    good(end, layout, regions, plan["at"])
    frame, descriptor = frame_of(end, layout, plan["at"]), regions[plan["at"]].export()
    child = os.fork()
    if child == 0:
        refused = 0
        for call in (lambda: end.send(frame, [], time.monotonic() + 1), regions[0].export):
            try:
                call()
            except DescriptorForked:
                refused += 1
        rights = array.array("i", [descriptor])
        end._socket.sendmsg([frame.encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        os._exit(refused)
    os.close(descriptor)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    hear(end, layout)


def file_of(nbytes: int, seals: int | None, name: str = "engine-region") -> int:
    """A memfd with other seals; None: a file of the disk."""
    if seals is None:
        with tempfile.TemporaryFile() as file:
            file.truncate(nbytes)
            return os.dup(file.fileno())
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, nbytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def _pipe() -> int:
    one, other = os.pipe()
    os.close(other)
    return one


def _no_checksum(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def _later_version(data: bytes) -> bytes:
    changed = data[:8] + struct.pack("<H", 2) + data[10:-4]
    return changed + struct.pack("<I", zlib.crc32(changed))


def _silent(end: Connection) -> None:
    """Until the far end has given up."""
    _until_left(end)
    raise DescriptorClosed("was silent")


def _until_left(end: Connection) -> None:
    """Waits until the far end has closed the connection."""
    poller = select.poll()
    poller.register(end._socket, select.POLLRDHUP)
    poller.poll(SOON_S * 1000)


def _leave(end: Connection) -> None:
    """Its process lives on until the test kills it."""
    end.close()
    signal.pause()


def _orphan(end: Connection) -> None:
    """A child keeps the connection open for a second after its parent's death."""
    if os.fork() == 0:
        time.sleep(1.0)
        os._exit(0)
    _kill(end)


def _kill(end: Connection) -> None:
    """Not before the test has taken the connection, of which it tells."""
    signal.sigtimedwait({TAKEN}, SOON_S)
    os.kill(os.getpid(), signal.SIGKILL)


FAULTY: dict[str, Way] = {
    "checksum": bytes_with(_no_checksum),
    "magic": bytes_with(lambda data: b"x" + data[1:]),
    "short": bytes_with(lambda data: data[:-1]),
    "long": bytes_with(lambda data: data + b"\0"),
    "one byte": bytes_with(lambda data: data[:1]),
    "version": bytes_with(_later_version),
    "session": frame_with(lambda frame, _: replace(frame, session=bytes(16))),
    "from another rank": frame_with(lambda frame, _: replace(frame, source=7)),
    "for another rank": frame_with(lambda frame, _: replace(frame, target=7)),
    "generation": frame_with(lambda frame, _: replace(frame, generation=frame.generation - 1)),
    "kind": frame_with(lambda frame, _: replace(frame, kind=3 - frame.kind)),
    "device": frame_with(lambda frame, _: replace(frame, device=b"d" * 16)),
    "count": frame_with(lambda frame, _: replace(frame, count=frame.count + 1)),
    "index twice": frame_with(lambda frame, _: replace(frame, index=frame.index - 1)),
    "index left out": frame_with(lambda frame, _: replace(frame, index=frame.index + 1)),
    "size": frame_with(lambda frame, layout: replace(frame, size=frame.size + layout.granularity)),
    "pool": frame_with(lambda frame, layout: replace(frame, pool_bytes=2 * layout.pool_bytes)),
    "misaligned": frame_with(lambda frame, _: replace(frame, offset=frame.offset + 8)),
    "overlap": frame_with(lambda frame, layout: replace(frame, offset=layout.spans[0][0])),
    "outside": frame_with(lambda frame, layout: replace(frame, offset=layout.pool_bytes)),
    "moved": frame_with(lambda frame, layout: replace(frame, offset=frame.offset + layout.granularity)),
    "huge": frame_with(lambda frame, layout: replace(frame, offset=2**64 - layout.granularity)),
    "other pid": frame_with(lambda frame, _: replace(frame, pid=1)),
    "other start": frame_with(lambda frame, _: replace(frame, start_ticks=frame.start_ticks + 1)),
    "none": descriptors_with(lambda at, regions: []),
    "two": descriptors_with(lambda at, regions: [regions[at].export(), regions[at].export()]),
    "most": descriptors_with(lambda at, regions: [regions[at].export() for _ in range(253)]),
    "same memory": descriptors_with(lambda at, regions: [regions[0].export()]),
    "same descriptor": the_first_again,
    "pipe": descriptors_with(lambda at, regions: [_pipe()]),
    "disk": descriptors_with(lambda at, regions: [file_of(regions[at].nbytes, None)]),
    "unsealed": descriptors_with(lambda at, regions: [file_of(regions[at].nbytes, 0)]),
    "may grow": descriptors_with(
        lambda at, regions: [file_of(regions[at].nbytes, SEALS & ~fcntl.F_SEAL_GROW)]
    ),
    "may shrink": descriptors_with(
        lambda at, regions: [file_of(regions[at].nbytes, SEALS & ~fcntl.F_SEAL_SHRINK)]
    ),
    "read-only": descriptors_with(
        lambda at, regions: [file_of(regions[at].nbytes, SEALS | fcntl.F_SEAL_WRITE)]
    ),
    "smaller": descriptors_with(lambda at, regions: [file_of(regions[at].nbytes - 1, SEALS)]),
    "larger": descriptors_with(lambda at, regions: [file_of(regions[at].nbytes + 1, SEALS)]),
    "close": ends_with(_leave),
    "silence": ends_with(_silent),
    "kill": ends_with(_kill),
    "orphan": ends_with(_orphan),
    "child": by_a_child,
    "tells": lambda plan, end, layout, regions: offer(end, layout, regions[:-1], SOON_S),
}
"""By name: what the offering end does wrong."""


def answer(fault: str, plan: dict[str, Any], end: Connection, layout: Layout) -> None:
    """The receiving end takes `at` frames, then does something wrong."""
    for _ in range(plan["at"]):
        for descriptor in end.receive(time.monotonic() + SOON_S)[1]:
            os.close(descriptor)
    good_answer = answer_to(end, layout, 0)
    if fault == "kill":
        _kill(end)
    elif fault == "silence":
        _silent(end)
    elif fault == "close":
        _leave(end)
    elif fault == "unknown code":
        put(end, replace(good_answer, code=999), [])
    elif fault == "stale answer":
        put(end, replace(good_answer, generation=layout.generation - 1), [])
    elif fault == "fewer":
        put(end, replace(good_answer, count=1), [])
    elif fault == "no answer":
        put(end, replace(good_answer, kind=int(layout.kind)), [])
    elif fault == "gift":
        put(end, good_answer, [file_of(4096, SEALS)])
    elif fault == "stranger's answer":
        put(end, replace(good_answer, kind=ANSWER, session=bytes(16)), [])
    else:
        raise ValueError(fault)
    # Its end must not overtake what it said.
    _until_left(end)
