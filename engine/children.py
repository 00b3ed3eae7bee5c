"""Child processes: started with one end of a socket pair, told their settings, watched until they end."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import anyio
from anyio.abc import Process, SocketStream

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Child:
    """A started process and this end of its link."""

    name: str
    process: Process
    stream: SocketStream

    def kill(self) -> None:
        """Ends it at once; one that has ended is left as it is."""
        if self.process.returncode is None:
            self.process.kill()


async def spawn(
    name: str, command: Sequence[str], told: bytes, environment: Mapping[str, str], fds: Sequence[int] = ()
) -> Child:
    """Starts `command` with a link's descriptor as its last argument and `told` on its standard input.

    A socket pair instead of a named socket: it can't be left behind, and whoever survives sees its end.

    fds  further descriptors that the child gets, under their numbers
    """
    near, far = socket.socketpair()
    with far:
        process = await anyio.open_process(
            [*command, str(far.fileno())],
            stdin=subprocess.PIPE,
            stdout=None,
            stderr=None,
            env={**os.environ, **environment},
            pass_fds=(far.fileno(), *fds),
        )
    assert process.stdin is not None
    try:
        await process.stdin.send(told)
        await process.stdin.aclose()
    except (anyio.BrokenResourceError, anyio.ClosedResourceError):
        # It died at once; whoever watches it reports how.
        pass
    return Child(name, process, await SocketStream.from_socket(near))


async def ended(child: Child, within_s: float) -> int | None:
    """Its exit code once it has ended; None where it has not within the time."""
    with anyio.move_on_after(within_s):
        return await child.process.wait()
    return None


def how_it_ended(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def die_with_parent() -> None:
    """Linux: the kernel kills this process when the one that started it ends, however it ends."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    except (OSError, AttributeError):
        # Elsewhere the end of the link says the same, unless this process hangs.
        return


def leave_signals_to_parent() -> None:
    """Terminals and service managers signal the whole group; only the parent knows a shutdown's order."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
