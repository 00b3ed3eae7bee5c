"""One channel of the exchange over a process group: what was published, what came, and what is owed."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from engine import errors
from engine.exchange import WORDS, Heard

if TYPE_CHECKING:
    from engine.exchange.collective import CollectiveExchange

VALUES, LEFT, FAILED = range(3)
"""Kinds of a message: int64 kind, channel, epoch, rank, then seven values; of FAILED the first is a fault."""


class CollectiveChannel:
    """One channel; see engine.exchange.Channel."""

    def __init__(self, owner: CollectiveExchange, number: int) -> None:
        self._owner = owner
        self.number = number
        self.arrived: deque[Heard] = deque()
        self.armed = False
        self.published = -1
        self.taken = dict.fromkeys(owner.peers, -1)
        self.deadline_s = float("inf")

    def publish(self, epoch: int, values: tuple[int, ...], /) -> None:
        """As Channel.publish."""
        owner = self._owner
        owner.raise_failure()
        if len(values) != WORDS[self.number]:
            raise TypeError(f"channel {self.number} takes {WORDS[self.number]} values, not {len(values)}")
        ahead = {taken for taken in self.taken.values() if taken > self.published}
        if epoch <= self.published or min(self.taken.values()) < self.published or ahead - {epoch}:
            raise owner.fail(errors.SequenceDiverged, f"epoch {epoch} was published out of turn", epoch)
        with owner.changed:
            self.published = epoch
            self.deadline_s = time.monotonic() + owner.timeout_s if self.owing() else float("inf")
        owner.send([VALUES, self.number, epoch, owner.rank, *values])

    def poll(self, spin_ns: int = 0, /) -> Heard | None:
        """As Channel.poll; while it waits other threads run."""
        owner = self._owner
        with owner.changed:
            if not self.arrived and spin_ns:
                owner.changed.wait_for(lambda: self.arrived or owner.failure, spin_ns / 1e9)
            heard = self.arrived.popleft() if self.arrived and owner.failure is None else None
        if heard is None:
            owner.check(self)
            return None
        epoch, src, _ = heard
        if epoch <= self.taken[src] or (self.taken[src] < self.published and epoch != self.published):
            raise owner.fail(
                errors.SequenceDiverged, f"epoch {epoch} of rank {src} in epoch {self.published}", epoch
            )
        with owner.changed:
            self.taken[src] = epoch
            if not self.owing():
                self.deadline_s = float("inf")
        return heard

    def exchange(self, epoch: int, values: tuple[int, ...], spin_ns: int, /) -> Heard | None:
        """As Channel.exchange."""
        self.publish(epoch, values)
        return self.poll(spin_ns)

    def arm(self) -> bool:
        """As Channel.arm."""
        with self._owner.changed:
            here = bool(self.arrived) or self._owner.failure is not None
            self.armed = not here
        self._owner.raise_closed()
        return here

    def owing(self) -> set[int]:
        """Peers whose answer to the last publication isn't taken."""
        return {src for src, taken in self.taken.items() if taken < self.published}
