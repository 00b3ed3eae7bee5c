"""A socket between two known processes of one host: who speaks is checked by the kernel, for each frame.

The kernel names the far end's process and user when the connection is made, and the sender of each single
message; a number that a new process got is told from the old one by its start time.
"""

from __future__ import annotations

import array
import os
import secrets
import socket
import struct
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from engine import errors
from engine.errors import DescriptorError
from engine.transport.frames import FRAME_BYTES, Frame

_CREDENTIALS = struct.Struct("iII")
_MOST_DESCRIPTORS = 253
"""What the kernel lets one message carry. Whatever arrives fits: too many are counted, not cut off."""

_ANCILLARY = socket.CMSG_SPACE(4 * _MOST_DESCRIPTORS) + socket.CMSG_SPACE(_CREDENTIALS.size)
_DEATH_S = 1.0
"""A dying process closes its sockets a little before /proc shows that it is dead."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A process: its number, and its start in ticks since boot."""

    pid: int
    start_ticks: int


def identity_of(pid: int) -> Identity:
    """raises DescriptorPeerDead where there is no such process, or only its remains."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        raise errors.DescriptorPeerDead(f"process {pid} is gone") from None
    # The name may hold spaces and brackets: fields are counted from the last bracket.
    state, *fields = text.rpartition(")")[2].split()
    if state in "ZX":
        raise errors.DescriptorPeerDead(f"process {pid} is dead")
    return Identity(pid, int(fields[18]))


class Connection:
    """One end. `session` (16 bytes) and ranks are the same on both ends; `peer` must be at the other one.

    Takes the socket (SOCK_SEQPACKET, connected) and closes it, also where the constructor raises.
    raises DescriptorForeign, DescriptorPeerReplaced, DescriptorPeerDead
    """

    def __init__(self, end: socket.socket, session: bytes, rank: int, peer_rank: int, peer: Identity) -> None:
        self.own, self.peer = identity_of(os.getpid()), peer
        self.session, self.rank, self.peer_rank = session, rank, peer_rank
        self._socket = end
        self._lost: DescriptorError | None = None
        try:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            told = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            pid, uid, _ = _CREDENTIALS.unpack(told)
            if uid != os.geteuid() or pid != peer.pid:
                expected = f"process {peer.pid} of user {os.geteuid()} was expected"
                raise errors.DescriptorForeign(f"process {pid} of user {uid} is at the far end; {expected}")
            self.check_peer()
        except BaseException:
            end.close()
            raise

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Also closes what was sent and never received. A second time does nothing."""
        self._socket.close()

    def check_peer(self) -> None:
        """raises DescriptorPeerDead, DescriptorPeerReplaced."""
        found = identity_of(self.peer.pid)
        if found != self.peer:
            began = f"began at tick {found.start_ticks}, not {self.peer.start_ticks}"
            raise errors.DescriptorPeerReplaced(f"process {found.pid} {began}")

    def send(self, frame: Frame, descriptors: Sequence[int], deadline_s: float) -> None:
        """One frame; the descriptors stay the caller's. raises DescriptorError.

        deadline_s   of time.monotonic
        """
        self._prepare(deadline_s)
        rights = (
            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        )
        try:
            self._socket.sendmsg([frame.encode()], rights, socket.MSG_NOSIGNAL)
        except OSError as error:
            raise self._failed(error, "sending") from error

    def receive(self, deadline_s: float) -> tuple[Frame, list[int]]:
        """The next frame and its descriptors, which are the caller's from now on. raises DescriptorError.

        Where it raises, whatever came with the frame is closed.
        """
        self._prepare(deadline_s)
        try:
            data, ancillary, flags, _ = self._socket.recvmsg(
                FRAME_BYTES + 1, _ANCILLARY, socket.MSG_CMSG_CLOEXEC
            )
        except OSError as error:
            raise self._failed(error, "receiving") from error
        descriptors, sender = array.array("i"), None
        for level, kind, value in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors.frombytes(value[: len(value) - len(value) % descriptors.itemsize])
            elif (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                sender = _CREDENTIALS.unpack(value)
        try:
            return self._checked(data, flags, sender, len(descriptors)), list(descriptors)
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)
            raise

    def _checked(
        self, data: bytes, flags: int, sender: tuple[int, int, int] | None, descriptors: int
    ) -> Frame:
        if flags & socket.MSG_CTRUNC:
            raise errors.DescriptorTruncated(f"the system kept descriptors back; {descriptors} arrived")
        if not data and not descriptors:
            raise self._gone()
        if sender is None or sender[:2] != (self.peer.pid, os.geteuid()):
            who = f"process {sender[0]} of user {sender[1]}" if sender else "nobody"
            raise errors.DescriptorPeerReplaced(f"a frame is from {who}, not from process {self.peer.pid}")
        frame = Frame.decode(data)
        if (frame.pid, frame.start_ticks) != (self.peer.pid, self.peer.start_ticks):
            says = f"process {frame.pid} that began at tick {frame.start_ticks}"
            raise errors.DescriptorPeerReplaced(f"a frame says that it is from {says}, not from {self.peer}")
        return frame

    def _prepare(self, deadline_s: float) -> None:
        if os.getpid() != self.own.pid:
            raise errors.DescriptorForked(f"process {os.getpid()} used the connection of {self.own.pid}")
        if self._socket.fileno() < 0:
            raise errors.DescriptorClosed("this end is closed")
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise errors.DescriptorTimeout("no time is left")
        self._socket.settimeout(left_s)

    def _failed(self, error: OSError, doing: str) -> DescriptorError:
        if isinstance(error, TimeoutError):
            return errors.DescriptorTimeout(f"{doing} took too long; process {self.peer.pid} is silent")
        if isinstance(error, (BrokenPipeError, ConnectionResetError)):
            return self._gone()
        return errors.DescriptorSyscall(f"{doing}: {os.strerror(error.errno or 0)}")

    def _gone(self) -> DescriptorError:
        """Why there is nobody at the far end; found out once."""
        if self._lost is None:
            self._lost = self._why_gone()
        return type(self._lost)(str(self._lost))

    def _why_gone(self) -> DescriptorError:
        until_s = time.monotonic() + _DEATH_S
        while time.monotonic() < until_s:
            try:
                self.check_peer()
            except DescriptorError as error:
                return error
            time.sleep(0.005)
        return errors.DescriptorClosed(f"process {self.peer.pid} has closed the connection")


class Rendezvous:
    """A socket under a random name in a private folder, where one process waits for others.

    path   to hand to those who are to `connect`
    raises DescriptorSyscall
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._folder = tempfile.mkdtemp(prefix="engine-fd-")
        self.path = f"{self._folder}/{secrets.token_hex(8)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            self._socket.bind(self.path)
            self._socket.listen()
        except OSError as error:
            self.close()
            raise errors.DescriptorSyscall(f"listening at {self.path}: {error}") from error

    def accept(
        self, session: bytes, rank: int, peer_rank: int, peer: Identity, within_s: float
    ) -> Connection:
        """The next who connects must be `peer`. raises DescriptorError."""
        self._socket.settimeout(within_s)
        try:
            end, _ = self._socket.accept()
        except TimeoutError:
            raise errors.DescriptorTimeout(f"nobody connected within {within_s} s") from None
        except OSError as error:
            raise errors.DescriptorSyscall(f"waiting at {self.path}: {error}") from error
        return Connection(end, session, rank, peer_rank, peer)

    def close(self) -> None:
        """Removes name and folder; a second time does nothing. A forked child closes only its copy."""
        self._socket.close()
        if os.getpid() == self._pid:
            Path(self.path).unlink(missing_ok=True)
            if os.path.isdir(self._folder):
                os.rmdir(self._folder)


def connect(
    path: str, session: bytes, rank: int, peer_rank: int, peer: Identity, within_s: float
) -> Connection:
    """Connects to a Rendezvous of the process `peer`. raises DescriptorError."""
    end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        end.settimeout(within_s)
        end.connect(path)
    except OSError as error:
        end.close()
        if isinstance(error, TimeoutError):
            raise errors.DescriptorTimeout(f"no connection to {path} within {within_s} s") from error
        raise errors.DescriptorSyscall(f"connecting to {path}: {error}") from error
    return Connection(end, session, rank, peer_rank, peer)
