"""The health routes' questions to the health actor."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from engine.actors.ask import Asks
from engine.actors.mailbox import Mailbox
from engine.messages import Beat, Probe, Vitals

WITHIN_S = 1.0
"""A probe's own patience is often no longer."""

Beats = tuple[Beat, ...]
Pids = tuple[tuple[int, int], ...]


class Probes:
    """api.app.Health over the actor `health`.

    beats  reads the ranks' signs of life; None: they come as messages
    pids   process of each rank
    """

    def __init__(
        self,
        asks: Asks,
        health: Mailbox,
        wall_s: Callable[[], float] = time.time,
        beats: Callable[[], Beats] | None = None,
        pids: Callable[[], Pids] = tuple,
    ) -> None:
        self._wall_s = wall_s
        self._asks = asks
        self._health = health
        self._beats = beats
        self._pids = pids

    async def _vitals(self) -> tuple[Vitals, Beats]:
        beats = self._beats() if self._beats is not None else ()
        probe = Probe(self._wall_s(), None, beats, self._pids())
        answer = await self._asks.ask(self._health, probe, WITHIN_S)
        assert isinstance(answer, Vitals)
        return answer, beats

    async def refusal(self) -> str:
        """Why requests are refused now; empty where they are taken."""
        return (await self._vitals())[0].refused

    async def report(self) -> tuple[bool, dict[str, Any]]:
        """(requests are taken and every rank is fresh, the body of /health_scheduler)."""
        vitals, beats = await self._vitals()
        faults = dict(vitals.faults)
        steps = {beat.slot: beat for beat in beats if beat.slot not in faults}
        ranks: list[dict[str, Any]] = []
        for rank, age_s in vitals.ages:
            ranks.append({"dp_rank": rank, "age_s": round(age_s, 3), "status": faults.get(rank, "ok")})
            if rank in steps:
                ranks[-1]["step_age_s"] = round(steps[rank].step_age_s, 3)
                ranks[-1]["step_budget_s"] = round(steps[rank].step_budget_s, 3)
        causes = [*([vitals.refused] if vitals.refused else []), *vitals.stale]
        body: dict[str, Any] = {"status": "error" if causes else "ok", "ranks": ranks}
        if causes:
            body["reason"] = "; ".join(causes)
            body["code"] = vitals.code or vitals.faults[0][1]
            body["faults"] = [
                {"dp_rank": rank, "code": code, "message": text}
                for (rank, code), text in zip(vitals.faults, vitals.stale, strict=True)
            ]
        return not causes, body
