"""How a rank's process lets go of what it holds, in the order that engine/actors/release.py decides."""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable

import anyio
from anyio.abc import TaskGroup

from engine.actors.mailbox import Mailbox
from engine.actors.process import Process
from engine.actors.release import Release
from engine.errors import Unexpected
from engine.lifecycle_pulse import PHASES, Pulse
from engine.messages import CoreEnded, Message, PeersMet, Released, ReleasePart

PART_S, BARRIER_S = 4.0, 6.0
"""What a phase may take: less than what the launcher gives all ranks to end (engine.launch.STOP_S)."""

POLL_S = 0.005


class PartsRef:
    """The actor `parts`: does what `release` says, and times it.

    act  releases a part: graphs, caches or groups
    met  every other rank is at the barrier, beyond it, or gone
    """

    def __init__(
        self,
        tasks: TaskGroup,
        release: Mailbox,
        act: Callable[[str], Awaitable[None]],
        met: Callable[[], bool],
        pulse: Pulse,
    ) -> None:
        self.took_s: dict[str, float] = {}
        self._tasks, self._release, self._act, self._met, self._pulse = tasks, release, act, met, pulse

    def tell(self, msg: Message) -> None:
        """Takes ReleasePart; never waits."""
        if not isinstance(msg, ReleasePart):
            raise Unexpected(f"parts: {type(msg).__name__} isn't among its messages")
        self._tasks.start_soon(self._do, msg.part)

    async def offer(self, msg: Message) -> None:
        """As `tell`."""
        self.tell(msg)

    async def _do(self, part: str) -> None:
        began_s = time.perf_counter()
        self._pulse.enter(PHASES.index(part))
        answer: Message
        if part == "barrier":
            while not self._met():
                await anyio.sleep(POLL_S)
            answer = PeersMet()
        else:
            try:
                await self._act(part)
                answer = Released()
            except Exception as error:
                # Whatever a device's library raises: the machine decides what becomes of it.
                answer = Released(f"{type(error).__name__}: {error}")
        self.took_s[part] = time.perf_counter() - began_s
        self._release.tell(answer)


async def release(
    process: Process, clean: bool, act: Callable[[str], Awaitable[None]], pulse: Pulse
) -> tuple[str, dict[str, float]]:
    """Lets go of everything in order; (why the end is torn, empty: it isn't; seconds of each phase)."""
    async with anyio.create_task_group() as tasks:
        mailbox = process.mailbox("release")
        parts = PartsRef(tasks, mailbox, act, lambda: are_met(pulse), pulse)
        process.refs["parts"] = parts
        mailbox.tell(CoreEnded(clean))
        fault = await process.keep("release", lambda: Release(PART_S * 1000, BARRIER_S * 1000))
        tasks.cancel_scope.cancel()
    pulse.enter(len(PHASES) - 1)
    return fault, parts.took_s


def are_met(pulse: Pulse) -> bool:
    """Every rank is at the barrier, beyond it, or gone."""
    barrier = PHASES.index("barrier")
    return all(phase >= barrier or not lives(pid) for pid, phase in pulse.peers())


def lives(pid: int) -> bool:
    """Whether there is such a process."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
