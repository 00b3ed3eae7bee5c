"""How a rank lets go of what it holds, in specs/release.toml: I8 for one rank, and the barrier of all."""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

import anyio
from anyio.abc import TaskGroup

from engine.actors.core import Core, Send
from engine.actors.core import Stop as Ended
from engine.actors.mailbox import Mailbox
from engine.actors.process import Process
from engine.errors import Unexpected
from engine.lifecycle_pulse import PHASES, Pulse
from engine.messages import CoreEnded, Message, PeersMet, Released, ReleasePart

PART_S, BARRIER_S = 4.0, 6.0
"""What a phase may take: less than what the launcher gives all ranks to end (engine.launch.STOP_S)."""

POLL_S = 0.005
ORDER = ("graphs", "caches", "barrier", "groups")


class Release(Core):
    """Core of specs/release.toml.

    part_ms, barrier_ms  how long a phase may take

    parts  phases that have begun      done  phases that are complete     fault  why the end is torn
    """

    SPEC: ClassVar[str] = "release"
    DATA: ClassVar[tuple[str, ...]] = ("parts", "done", "fault")

    def __init__(self, part_ms: float, barrier_ms: float) -> None:
        super().__init__()
        self.part_ms = part_ms
        self.barrier_ms = barrier_ms
        self.parts: list[str] = []
        self.done: list[str] = []
        self.fault = ""

    # ---- guards -------------------------------------------------------------------------------

    def is_clean(self, msg: CoreEnded) -> bool:
        """After a failure the device may hang in whatever is asked of it: nothing is."""
        return msg.clean

    def is_whole(self, msg: Released) -> bool:
        """Nothing went wrong."""
        return not msg.fault

    # ---- actions ------------------------------------------------------------------------------

    def release_graphs(self, msg: object) -> None:
        """First phase."""
        self._begin("graphs")

    def release_caches(self, msg: object) -> None:
        """Nothing names them any more."""
        self._begin("caches")

    def wait_for_peers(self, msg: object) -> None:
        """They may still be about to use a group."""
        self._begin("barrier")

    def release_groups(self, msg: object) -> None:
        """Nobody uses them any more."""
        self._begin("groups")

    def finish(self, msg: object) -> None:
        """Everything is gone."""
        self.done.append(self.parts[-1])
        self.emit(Ended(""))

    def give_up(self, msg: object) -> None:
        """The process ends with what it holds; the kernel takes it back."""
        if isinstance(msg, CoreEnded):
            self.fault = "the scheduler failed"
        else:
            cause = msg.fault if isinstance(msg, Released) else "it took too long"
            self.fault = f"{self.parts[-1]}: {cause}"
        self.emit(Ended(self.fault))

    def _begin(self, part: str) -> None:
        if self.parts:
            self.done.append(self.parts[-1])
        self.parts.append(part)
        self.emit(Send("parts", ReleasePart(part)))

    # ---- invariants ---------------------------------------------------------------------------

    def releases_in_order(self) -> bool:
        """I8, for one rank: a prefix of the order, each phase complete before the next."""
        begun = len(self.parts)
        whole = self.state == "ended"
        return (
            self.parts == list(ORDER[:begun])
            and self.done == self.parts[: begun if whole else max(begun - 1, 0)]
            and whole == (self.done == list(ORDER))
        )


def nobody_is_early(world: Any) -> bool:
    """RL1: behind the barrier means that each rank was there, or has gone."""
    ranks = {name: core for name, core in world.cores.items() if isinstance(core, Release)}
    if not any(core.state in ("groups", "ended") for core in ranks.values()):
        return True
    return all(
        "barrier" in core.parts or core.state == "torn" or world.environment.is_gone(name)
        for name, core in ranks.items()
    )


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
