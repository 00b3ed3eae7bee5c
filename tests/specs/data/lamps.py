"""The example array machine of the tests. `msg` is the column of wishes, bool[B]."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.actors.core import table_of
from engine.fsm.load import spec_named
from engine.fsm.vector import Slots, VectorMachine


class Lamps:
    """Capacity lamps with their numbers of uses and one count of losses."""

    def __init__(self, capacity: int) -> None:
        self.machine = VectorMachine(table_of(spec_named("lamps")), self, capacity)
        self.uses = np.zeros(capacity, np.int32)
        self.losses: list[int] = []
        self.places: list[int] = []

    def is_worn(self, slots: Slots, msg: Any) -> NDArray[np.bool_]:
        return self.uses[slots] >= 3

    def is_wanted(self, slots: Slots, msg: Any) -> NDArray[np.bool_]:
        return np.asarray(msg, np.bool_)

    def count_use(self, slots: Slots, at: Slots, msg: Any) -> None:
        assert np.all(np.asarray(msg)[at] | (self.machine.states[slots] == 1))
        self.uses[slots] += 1

    def count_loss(self, slots: Slots, at: Slots, msg: Any) -> None:
        self.losses.extend(slots.tolist())
        self.places.extend(at.tolist())
