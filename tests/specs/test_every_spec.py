"""What holds for each machine in specs/: it is sound, drawn, and table and library agree."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.errors import Unexpected
from engine.fsm.check import machine_files
from engine.fsm.diagrams import drawings, stale
from engine.fsm.draw import dot, mermaid, svg
from engine.fsm.edges import difference
from engine.fsm.library import LibraryMachine
from engine.fsm.load import load
from engine.fsm.spec import Spec
from engine.fsm.table import Machine, Table
from engine.fsm.vector import VectorMachine

EXAMPLES = [Path(__file__).parent / "data" / name for name in ("oven.toml", "lamps.toml")]
FILES = {path.stem: path for path in (*machine_files(), *EXAMPLES)}
SLOTS = 6


@pytest.fixture(params=sorted(FILES))
def spec(request: pytest.FixtureRequest) -> Spec:
    return load(FILES[request.param])


def puppet(spec: Spec) -> Any:
    """An owner whose guards say what it is told and whose actions are noted."""

    def guard(name: str) -> Any:
        return lambda self, msg: name in self.true

    def action(name: str) -> Any:
        return lambda self, msg: self.done.append((name, msg))

    body: dict[str, Any] = {row.guard: guard(row.guard) for row in spec.rows if row.guard}
    body |= {name: action(name) for row in spec.rows for name in row.actions}
    return type(
        "Puppet", (), {**body, "true": frozenset(), "__init__": lambda self: setattr(self, "done", [])}
    )


def test_table_and_library_take_the_same_rows_on_random_events(spec: Spec) -> None:
    """Guards answer at random; events that nobody expects are refused by both."""
    owner = puppet(spec)
    table = Table(replace(spec, core=owner, speed="hot"))
    chance = random.Random(5)
    guards = [row.guard for row in spec.rows if row.guard]
    refused = 0
    for _ in range(40):
        machines = [Machine(table, owner()), LibraryMachine(table, owner())]
        for number in range(50):
            true = frozenset(guard for guard in guards if chance.random() < 0.5)
            event = chance.randrange(len(table.events))
            outcomes = []
            for machine in machines:
                machine.owner.true = true
                try:
                    machine.fire(event, number)
                    outcomes.append("")
                except Unexpected as error:
                    outcomes.append(str(error))
            refused += outcomes[0] != ""
            assert outcomes[0] == outcomes[1]
            assert machines[0].snapshot() == machines[1].snapshot()
            assert machines[0].entry == machines[1].entry
        assert machines[0].owner.done == machines[1].owner.done
        assert list(machines[0].record) == list(machines[1].record)
    assert refused < 2000


@pytest.mark.parametrize("name", [name for name, path in FILES.items() if load(path).speed == "array"])
def test_each_slot_of_the_array_does_what_a_table_of_its_own_does(name: str) -> None:
    """Guards answer at random for each slot; a batch with an unexpected event moves nobody."""
    spec = load(FILES[name])
    guards = sorted({row.guard for row in spec.rows if row.guard})
    one = Table(replace(spec, core=puppet(spec), speed="hot"))
    many = VectorMachine(Table(replace(spec, core=column_puppet(spec))), None, SLOTS)
    many.owner = many.table.owner()
    singles = [Machine(one, one.owner()) for _ in range(SLOTS)]
    chance = random.Random(7)
    for _ in range(2_000):
        event = chance.randrange(len(one.events))
        slots = np.array(chance.sample(range(SLOTS), chance.randrange(1, 4)))
        many.owner.true = {guard: np.array([chance.random() < 0.5 for _ in slots]) for guard in guards}
        before = [machine.snapshot() for machine in singles]
        refused = False
        for place, slot in enumerate(slots):
            singles[slot].owner.true = {guard for guard in guards if many.owner.true[guard][place]}
            try:
                singles[slot].fire(event, int(slot))
            except Unexpected:
                refused = True
        try:
            many.fire(event, slots)
            assert not refused
        except Unexpected:
            assert refused
            for machine, taken in zip(singles, before, strict=True):
                machine.restore(taken)
        assert [many.state(slot) for slot in range(SLOTS)] == [machine.state for machine in singles]


def column_puppet(spec: Spec) -> Any:
    """As `puppet`, for an array machine: guards give the columns that it is told."""

    def guard(name: str) -> Any:
        return lambda self, slots, msg: self.true[name]

    body: dict[str, Any] = {row.guard: guard(row.guard) for row in spec.rows if row.guard}
    body |= {name: lambda self, slots, at, msg: None for row in spec.rows for name in row.actions}
    return type("Columns", (), body)


def test_two_readers_draw_the_same_arrows(spec: Spec) -> None:
    assert difference(mermaid(spec), spec.path) == []


def test_a_missing_or_added_arrow_is_noticed(spec: Spec) -> None:
    lines = mermaid(spec).splitlines(keepends=True)
    arrow = next(i for i, line in enumerate(lines) if '|"' in line)
    assert difference("".join(lines[:arrow] + lines[arrow + 1 :]), spec.path)
    states = list(spec.states)
    assert difference("".join(lines) + f'    {states[0]} -->|"Strange"| {states[-1]}\n', spec.path)


def test_each_picture_begins_with_the_hash_of_its_spec(spec: Spec) -> None:
    assert mermaid(spec).startswith(f"%% sha256: {spec.digest}\n")
    picture = svg(dot(spec), spec.digest)
    assert picture is None or picture.startswith(f"<!-- sha256: {spec.digest} -->\n<svg ")


def test_pictures_show_every_state_row_and_time_out(spec: Spec) -> None:
    for text in (mermaid(spec), dot(spec)):
        for row in spec.rows:
            assert row.event in text
            assert all(action in text for action in row.actions)
        for state in spec.states.values():
            assert state.name in text
            assert state.timeout is None or f": {state.timeout.event}" in text


def test_the_committed_pictures_and_the_table_are_current() -> None:
    specs = [load(path) for path in machine_files()]
    assert stale(specs, drawings(specs)) == []
