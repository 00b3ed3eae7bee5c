"""The actors of one process and what they share: names, timers, questions, supervision, links."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import anyio
from anyio.abc import TaskGroup

from engine.actors.ask import Asks
from engine.actors.core import Core, Effect
from engine.actors.links import Link, Ref
from engine.actors.mailbox import Mailbox
from engine.actors.shell import Shell
from engine.actors.supervise import Child, Supervisor, recorder_of
from engine.actors.timers import Timers
from engine.actors.wire import ByteStream, Codec
from engine.actors.wiring import Wiring, kind_of
from engine.errors import BadMessage
from engine.log_lines import log_to_stderr, report_to_stderr
from engine.messages import Failed, Tick

__all__ = ["Process", "Watch", "log_to_stderr", "report_to_stderr"]

Receive = Callable[[Any], list[Effect]]
Submit = Callable[[Any], None]

LINK_MESSAGES = 4096
"""Bound of a link's outbox: eight times the requests that a rank takes by default, each with its abort."""


class Watch(Protocol):
    """Looks at what passes through a process, for its figures."""

    def arriving(self, ref: Ref) -> Ref:
        """What messages of other processes go to, in place of an actor's mailbox."""

    def working(self, name: str, core: Core, submit: Submit | None) -> tuple[Receive, Submit | None]:
        """What the actor of that name works with, in place of its core's `receive` and of `submit`."""


class Process:
    """Holds actors by name; everything runs in the task group that it is given.

    kind    of process, as in specs/system.toml: which actors are this process's own
    report  prints what went wrong, for a person
    watch   looks at what passes; None: nobody does
    """

    def __init__(self, kind: str, wiring: Wiring, tasks: TaskGroup, report: Callable[[str], None]) -> None:
        self.kind = kind
        self.wiring = wiring
        self.timers = Timers()
        self.asks = Asks()
        self.refs: dict[str, Ref] = {}
        self.failed: list[Failed] = []
        self.report = report
        self.watch: Watch | None = None
        self.supervisor = Supervisor(self.asks, report, self.failed.append)
        self._cores: dict[str, Core] = {}
        self._links: list[Link] = []
        self._elsewhere: set[str] = set()
        self._tasks = tasks
        tasks.start_soon(self.timers.run)

    def mailbox(self, name: str) -> Mailbox:
        """The mailbox of an actor of this process, made when it is first asked for."""
        ref = self.refs.get(name)
        if ref is None:
            ref = self.refs[name] = self.wiring.mailbox(name)
        assert isinstance(ref, Mailbox)
        return ref

    def start(
        self, name: str, make: Callable[[], Core], submit: Callable[[Any], None] | None = None
    ) -> Mailbox:
        """Starts an actor in the background; as `keep`."""
        self._tasks.start_soon(self.keep, name, make, submit)
        return self.mailbox(name)

    async def keep(
        self, name: str, make: Callable[[], Core], submit: Callable[[Any], None] | None = None
    ) -> str:
        """Runs an actor until it stops; returns its reason. Raises ActorFailed.

        make    gives a fresh core
        submit  takes the core's jobs
        """
        mailbox = self.mailbox(name)
        may_send = self.wiring.sends_of(name)

        def shell() -> Shell:
            core = self._cores[name] = make()
            receive: Receive = core.receive
            submits = submit
            if self.watch is not None:
                receive, submits = self.watch.working(name, core, submit)
            return Shell(core, mailbox, self.refs, self.timers, self.asks, may_send, submits, receive)

        return await self.supervisor.keep(Child(name, mailbox, shell))

    def tick(self, name: str, every_s: float, wall_s: Callable[[], float]) -> None:
        """From now on tells the actor the time, every `every_s` seconds; not while its mailbox is full."""
        mailbox = self.mailbox(name)

        def act() -> None:
            if mailbox.has_room():
                mailbox.tell(Tick(anyio.current_time(), wall_s()))
            self.timers.after(every_s, act)

        self.timers.after(every_s, act)

    def link(self, name: str, peer: str, stream: ByteStream) -> Link:
        """A link from this process, `name`, to `peer`, whose actors can be sent to from now on.

        peer  "api": every actor of that process; the name of a rank: that rank
        """
        wiring = self.wiring
        kind = kind_of(peer)
        codec = Codec(wiring.receivers, wiring.accepts(self.kind))
        outbox = Mailbox(f"{name} to {peer}", LINK_MESSAGES, "wait" if wiring.waits(kind) else "reject")
        link = Link(name, wiring.digest, stream, codec, outbox)
        for actor in (peer,) if kind != peer else wiring.held_by(kind):
            self.reach(actor, link.ref(kind_of(actor)))
        self._links.append(link)
        return link

    def reach(self, name: str, ref: Ref) -> None:
        """From now on `ref` carries messages to the actor of that name in another process."""
        self.refs[name] = ref
        self._elsewhere.add(name)

    async def flush(self) -> None:
        """Waits until all that was told to other processes is in its transport, or the link has ended."""
        for link in self._links:
            await link.flush()

    def spawn(self, act: Callable[..., Coroutine[Any, Any, None]], *args: object) -> None:
        """Runs a task of this process in the background."""
        self._tasks.start_soon(act, *args)

    async def run_link(self, link: Link) -> None:
        """Moves the link's messages until the far end is gone; raises BadMessage for a broken stream."""
        local = {kind_of(name): ref for name, ref in self.refs.items() if name not in self._elsewhere}
        if self.watch is not None:
            local = {name: self.watch.arriving(ref) for name, ref in local.items()}
        try:
            await link.run(local, self._note_bad)
        finally:
            await link.close()

    def recorders(self) -> str:
        """The flight recorders of all actors: what led to a failure that isn't an actor's own."""
        return "\n".join(recorder_of(name, core.record) for name, core in self._cores.items())

    def _note_bad(self, error: BadMessage) -> None:
        self.report(f"a message was lost: {error}")
