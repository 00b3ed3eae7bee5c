"""The health routes' questions to the health actor."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from engine.actors.ask import Asks
from engine.actors.mailbox import Mailbox
from engine.messages import Probe, Vitals

WITHIN_S = 1.0
"""A probe's own patience is often no longer."""


class Probes:
    """api.app.Health over the actor `health`."""

    def __init__(self, asks: Asks, health: Mailbox, wall_s: Callable[[], float] = time.time) -> None:
        self._wall_s = wall_s
        self._asks = asks
        self._health = health

    async def _vitals(self) -> Vitals:
        answer = await self._asks.ask(self._health, Probe(self._wall_s()), WITHIN_S)
        assert isinstance(answer, Vitals)
        return answer

    async def refusal(self) -> str:
        """Why requests are refused now; empty where they are taken."""
        return (await self._vitals()).refused

    async def report(self) -> tuple[bool, dict[str, Any]]:
        """(requests are taken and every rank is fresh, the body of /health_scheduler)."""
        vitals = await self._vitals()
        ranks = [{"dp_rank": rank, "age_s": round(age_s, 3)} for rank, age_s in vitals.ages]
        faults = [*([vitals.refused] if vitals.refused else []), *vitals.stale]
        body: dict[str, Any] = {"status": "error" if faults else "ok", "ranks": ranks}
        if faults:
            body["reason"] = "; ".join(faults)
        return not faults, body
