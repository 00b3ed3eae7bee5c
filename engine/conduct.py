"""The order of an end: requests, ranks, server."""

from __future__ import annotations

from typing import Any

import anyio

from engine.actors.process import Process
from engine.config import Settings
from engine.messages import CloseServer, Drain, Drained, KillRanks, RankEnded, Signalled, Stop
from engine.probes import Probes

STOP_S = 10.0


class Events:
    """What came to the mailbox `shutdown` so far."""

    def __init__(self, process: Process) -> None:
        self._mailbox = process.mailbox("shutdown")
        self.signals = 0
        self.drained = False
        self.codes: dict[int, int] = {}

    async def next(self) -> None:
        """Waits for more."""
        for msg in await self._mailbox.take():
            self.note(msg)

    def note(self, msg: Any) -> None:
        """One message."""
        if isinstance(msg, Signalled):
            self.signals += 1
        elif isinstance(msg, Drained):
            self.drained = True
        elif isinstance(msg, RankEnded):
            self.codes[msg.rank] = msg.code


async def conduct(process: Process, settings: Settings, probes: Probes) -> None:
    """Waits for a signal or a rank's end, then ends everything in order."""
    events = Events(process)
    refs = process.refs
    while not events.signals and not events.codes:
        await events.next()
    probes.refused = "the server is shutting down" if events.signals else "a rank has ended"
    await refs["ingress"].offer(Drain())
    if not events.codes:
        with anyio.move_on_after(settings.drain_s):
            while events.signals < 2 and not events.drained and not events.codes:
                await events.next()
    await refs["ingress"].offer(Stop())
    for rank in range(settings.dp_size):
        if rank not in events.codes:
            await refs[f"rank{rank}"].offer(Stop("shutdown"))
    with anyio.move_on_after(STOP_S):
        while len(events.codes) < settings.dp_size and events.signals < 3:
            await events.next()
    await refs["launcher"].offer(KillRanks())
    clean = len(events.codes) == settings.dp_size and not any(events.codes.values())
    await refs["launcher"].offer(CloseServer(0 if clean else 1))
