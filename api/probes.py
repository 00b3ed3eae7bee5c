"""Health routes: the process is up, it takes traffic, every rank lives, a token can be made."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import anyio
import numpy as np

from api.exchange import Exchange
from api.handle import Engine, Group
from engine.actors.schedule import URGENT
from engine.errors import EngineError, MailboxFull, NotServing
from engine.messages import ABORTED, FAILED, Entry, Sampling

GENERATE_S = 20.0
"""What one token may take, whatever the load."""

AGAIN_S = 0.02
"""Between two attempts to get into a mailbox that is full."""

PROMPT = np.zeros(1, np.int32).tobytes()
"""Token 0, which every vocabulary has."""

DOWN = ("rank_lost", "shutting_down")
"""Codes with which the process isn't up any more for those who balance load."""

PROBES = ("/health", "/ready", "/health_scheduler", "/health_generate")


class Health(Protocol):
    """What the probes ask."""

    async def refusal(self) -> str:
        """Why requests are refused now; empty where they are taken."""

    async def report(self) -> tuple[bool, dict[str, Any]]:
        """(every rank is fresh, the body of /health_scheduler)."""


class ProbeRoutes:
    """Handlers of PROBES.

    ranks  that each make a token for /health_generate
    """

    def __init__(self, engine: Engine, health: Health, ranks: int) -> None:
        self._engine = engine
        self._health = health
        self._ranks = ranks
        self._running: Attempt | None = None

    @property
    def routes(self) -> dict[str, Callable[[Exchange], Awaitable[None]]]:
        """By path."""
        return dict(zip(PROBES, (self.up, self.ready, self.scheduler, self.generate), strict=True))

    async def up(self, exchange: Exchange) -> None:
        """200 from the first moment until the server goes down."""
        _, body = await self._health.report()
        if body.get("code") in DOWN:
            raise NotServing(body["reason"])
        await exchange.answer_json({"status": "ok"})

    async def ready(self, exchange: Exchange) -> None:
        """200 while requests are taken."""
        why = await self._health.refusal()
        if why:
            raise NotServing(why)
        await exchange.answer_json({"status": "ok"})

    async def scheduler(self, exchange: Exchange) -> None:
        """200 with one fresh snapshot of every rank."""
        fresh, body = await self._health.report()
        await exchange.answer_json(body, 200 if fresh else 503)

    async def generate(self, exchange: Exchange) -> None:
        """200 once every rank has made a token. Callers that come meanwhile share the answer."""
        attempt = self._running
        if attempt is not None:
            await attempt.over.wait()
        else:
            attempt = self._running = Attempt()
            try:
                # Others wait for it, too: the first caller may leave.
                with anyio.CancelScope(shield=True):
                    attempt.fault = await self._fault()
            finally:
                self._running = None
                attempt.over.set()
        if attempt.fault:
            raise NotServing(attempt.fault)
        await exchange.answer_json({"status": "ok", "ranks": self._ranks})

    async def _fault(self) -> str:
        """Why there is no token; empty where each rank made one."""
        sampling = Sampling(max_new_tokens=1, temperature=0.0, ignore_eos=True)
        entries = [
            Entry(0, PROMPT, sampling, route=rank, priority=URGENT, deadline_s=GENERATE_S)
            for rank in range(self._ranks)
        ]
        fault = f"no token within {GENERATE_S:g} s"
        with anyio.move_on_after(GENERATE_S):
            try:
                group = await self._submit(entries)
            except EngineError as error:
                return str(error)
            try:
                fault = await _first_fault(group)
            except EngineError as error:
                fault = str(error)
            finally:
                self._engine.close(group)
        return fault

    async def _submit(self, entries: list[Entry]) -> Group:
        """As `Engine.submit`; a crowd that fills the mailbox in one turn of the loop is gone in the next."""
        while True:
            try:
                return await self._engine.submit(entries)
            except MailboxFull:
                await anyio.sleep(AGAIN_S)


class Attempt:
    """One token of each rank, for all who ask at the time."""

    def __init__(self) -> None:
        self.over = anyio.Event()
        self.fault = "the attempt was cut off"


async def _first_fault(group: Group) -> str:
    """Takes a group to its end: the message of the first error, empty where there was none."""
    found = ""
    while taken := await group.take():
        for delta in taken:
            if delta.finish in (ABORTED, FAILED):
                found = found or delta.message
    return found
