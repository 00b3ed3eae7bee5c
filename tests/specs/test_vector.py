"""The array machine does for each slot what the rows say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from engine.errors import Unexpected
from engine.fsm.load import load, substituted
from tests.specs.data.lamps import Lamps

DATA = Path(__file__).parent / "data"


@pytest.fixture
def lamps() -> Iterator[Lamps]:
    with substituted(load(DATA / "lamps.toml")):
        yield Lamps(8)


def reference(state: str, uses: int, event: str, wish: bool) -> tuple[str, int]:
    """The rows of lamps.toml for one lamp, by hand."""
    if event == "Release":
        return ("dark" if state == "lit" else state), uses
    if state == "lit":
        return "lit", uses + 1
    if state == "dark" and uses >= 3:
        return "broken", uses
    return ("lit", uses + 1) if state == "dark" and wish else (state, uses)


def test_every_slot_of_a_batch_takes_the_row_that_it_would_take_alone(lamps: Lamps) -> None:
    random = np.random.default_rng(3)
    press, release = (lamps.machine.table.event_index[name] for name in ("Press", "Release"))
    for _ in range(300):
        if random.random() < 0.5:
            slots, event = random.permutation(8)[: random.integers(0, 9)], press
        else:
            slots, event = random.permutation(lamps.machine.within("lit", "broken")), release
        wishes = random.random(len(slots)) < 0.7
        name = lamps.machine.table.events[event]
        expected = [
            reference(lamps.machine.state(slot), int(lamps.uses[slot]), name, bool(wish))
            for slot, wish in zip(slots, wishes, strict=True)
        ]
        lamps.machine.fire(event, slots, wishes)
        assert [(lamps.machine.state(slot), int(lamps.uses[slot])) for slot in slots] == expected
        if len(lamps.machine.within("broken")) == 8:
            lamps.machine.states[:] = 0
            lamps.uses[:] = 0
    assert len(lamps.losses) > 8


def test_places_index_the_columns_of_the_batch(lamps: Lamps) -> None:
    lamps.uses[[2, 5]] = 3
    lamps.machine.fire(0, np.array([5, 1, 2]), [True, True, True])
    assert lamps.losses == [5, 2]
    assert lamps.places == [0, 2]


def test_an_unexpected_event_names_its_slot_and_moves_nobody(lamps: Lamps) -> None:
    lamps.machine.fire(0, np.array([3]), [True])
    release = lamps.machine.table.event_index["Release"]
    with pytest.raises(Unexpected, match="slot 4: lamps: Release in dark"):
        lamps.machine.fire(release, np.array([3, 4]))
    assert lamps.machine.state(3) == "lit"


def test_a_snapshot_brings_the_states_back(lamps: Lamps) -> None:
    taken = lamps.machine.snapshot()
    lamps.machine.fire(0, np.arange(8), np.ones(8, bool))
    lamps.machine.restore(taken)
    assert len(lamps.machine.within("dark")) == 8
