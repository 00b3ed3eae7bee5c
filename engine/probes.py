"""What the health routes say, from the ranks' snapshots and what the server is doing."""

from __future__ import annotations

import time
from typing import Any

from engine.messages import Snapshot

OLDEST_S = 5.0
"""A snapshot may be so old, or three of its periods where that is more."""

AHEAD_S = 1.0
"""A wall clock may be so far ahead."""


class Probes:
    """Answers of /ready, /health and /health_scheduler.

    refused  why requests are refused now; empty where they are taken
    """

    def __init__(self, ranks: int, snapshot_s: float) -> None:
        self.refused = "the model is loading"
        self._oldest_s = max(OLDEST_S, 3 * snapshot_s)
        self._newest: dict[int, Snapshot | None] = dict.fromkeys(range(ranks))

    def note(self, msg: Snapshot) -> None:
        """A rank's newest snapshot."""
        self._newest[msg.rank] = msg

    async def refusal(self) -> str:
        """As api.app.Health."""
        return self.refused

    async def report(self) -> tuple[bool, dict[str, Any]]:
        """As api.app.Health: 200 needs one fresh snapshot of every rank, and a server that takes requests."""
        now_s = time.time()
        ranks: list[dict[str, Any]] = []
        faults = [self.refused] if self.refused else []
        for rank, newest in self._newest.items():
            if newest is None:
                faults.append(f"rank {rank} has sent no snapshot")
                continue
            age_s = now_s - newest.wall_s
            ranks.append({"dp_rank": rank, "age_s": round(age_s, 3)})
            if not -AHEAD_S <= age_s <= self._oldest_s:
                faults.append(
                    f"rank {rank}'s snapshot is {age_s:.1f} s old, at most {self._oldest_s:.1f} are allowed"
                )
        body: dict[str, Any] = {"status": "error" if faults else "ok", "ranks": ranks}
        if faults:
            body["reason"] = "; ".join(faults)
        return not faults, body
