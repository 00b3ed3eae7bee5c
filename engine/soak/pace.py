"""How fast clients go: enough for the goals, and not so fast that the host has nothing left."""

from __future__ import annotations

from dataclasses import dataclass

REQUESTS_A_SECOND = 20_000 / 3600
BUSY_SHARE = 0.5
ABOVE = 1.6
"""So far above the goal the clients slow down."""

LONGEST_PAUSE_S, SHORTEST_SIZE = 1.0, 0.2


@dataclass(slots=True)
class Pace:
    """A client's pause between two requests, and the scale of output lengths."""

    pause_s: float = 0.0
    size: float = 1.0

    def adjust(self, requests_a_second: float, busy_share: float) -> None:
        """After some seconds of traffic. busy_share: of the rank that was busy least."""
        if requests_a_second < REQUESTS_A_SECOND * 1.2:
            # First the pauses go, then the answers get shorter.
            if self.pause_s <= 0.01:
                self.size = max(SHORTEST_SIZE, self.size * 0.85)
            self.pause_s = 0.0 if self.pause_s < 0.02 else self.pause_s / 2
        elif busy_share < BUSY_SHARE * 1.3:
            self.pause_s /= 2
            self.size = min(1.0, self.size * 1.15)
        elif requests_a_second > REQUESTS_A_SECOND * ABOVE:
            self.size = min(1.0, self.size * 1.1)
            if self.size == 1.0:
                self.pause_s = min(LONGEST_PAUSE_S, self.pause_s * 1.25 + 0.01)
