"""The search finds every kind of planted fault, with the shortest run, and the recorded number of states."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from engine.actors.core import Send
from engine.fsm.explore import Explorer, Found
from engine.fsm.load import substituted
from engine.fsm.search import Search
from engine.fsm.spec import Spec
from engine.fsm.table import Taken
from tests.search.kitchen import Heater
from tests.specs.data.oven import Baked, Oven, Tray


def explore(search: Search) -> Found:
    return Explorer(search).run()


def with_oven(search: Search, oven: type[Oven], **args: Any) -> Search:
    return replace(search, cores={"oven": partial(oven, **args)})


def violation(found: Found) -> str:
    assert found.violation is not None
    return found.violation.text


@pytest.mark.parametrize("name", ["kitchen", "silence"])
def test_the_recorded_number_of_states_is_found(name: str, request: pytest.FixtureRequest) -> None:
    search = request.getfixturevalue(name)
    found = explore(search)
    assert found.violation is None
    assert found.states == search.states


@pytest.mark.parametrize("name", ["kitchen", "silence"])
def test_table_and_library_span_the_same_states(
    name: str, request: pytest.FixtureRequest, oven: Spec
) -> None:
    search = request.getfixturevalue(name)
    with substituted(replace(oven, speed="cold")):
        cold = explore(search)
    assert cold == explore(search)


def test_any_order_reaches_more_than_order_per_pair(kitchen: Search) -> None:
    assert explore(replace(kitchen, order="any")).states > explore(kitchen).states


class Forgets(Oven):
    """Takes the last queued tray first."""

    def heat_queued(self, msg: None) -> None:
        self.heat(Tray(self.queue.pop()))


def test_a_broken_core_invariant_is_found_by_the_shortest_run(kitchen: Search) -> None:
    found = explore(with_oven(kitchen, Forgets, room=2))
    assert violation(found).startswith("invariant O1 is broken: Trays are handed out in the order")
    assert found.violation is not None
    # Three trays in; bake, deliver 1; bake, deliver 3; bake, deliver 2.
    assert len(found.violation.run) == 9
    assert "environment -> oven: Baked(number=2)" in found.violation.run[-1]
    assert (
        "after 9 steps:\n    1. outside -> oven: Tray(number=1)   [cold -> baking]"
        in found.violation.report()
    )


def test_a_broken_system_invariant_is_found(kitchen: Search) -> None:
    """Two ovens get the same tray."""
    tray = replace(kitchen.workload[0], to="second", sender="thief")
    two = replace(
        kitchen, cores={"oven": Oven, "second": Oven}, workload=(*kitchen.workload[:1], tray), ends={}
    )
    found = explore(two)
    assert violation(found) == "invariant O2 (No tray is in two ovens.) is broken"
    assert found.violation is not None
    assert len(found.violation.run) == 2


def test_an_invariant_of_the_search_sees_messages_in_flight(kitchen: Search) -> None:
    def none_under_way(world: Any) -> bool:
        return ("environment", "oven", Baked(2)) not in world.in_flight

    found = explore(replace(kitchen, invariants=(("none_under_way", none_under_way),)))
    assert violation(found) == "invariant none_under_way is broken"


def test_an_unexpected_event_is_found(kitchen: Search) -> None:
    tray = replace(kitchen.workload[0], message=Baked(7))
    found = explore(replace(kitchen, workload=(*kitchen.workload[:1], tray)))
    assert violation(found).startswith("Unexpected: oven: Baked in baking")


def test_an_error_of_an_action_is_found(kitchen: Search) -> None:
    class Fails(Oven):
        def hand_out(self, msg: Baked) -> None:
            raise ZeroDivisionError("planted")

    assert violation(explore(with_oven(kitchen, Fails))) == "ZeroDivisionError: planted"


class Silent(Heater):
    """Never answers."""

    def choices(self) -> list[Any]:
        return []


def test_a_run_that_ends_in_a_state_that_must_be_left_is_found(kitchen: Search) -> None:
    found = explore(replace(kitchen, environment=Silent))
    assert violation(found) == "the run ends although oven must leave baking"


def test_a_time_out_leaves_such_a_state(kitchen: Search) -> None:
    found = explore(replace(kitchen, environment=Silent, timeouts="quiet", at_end=()))
    assert found.violation is None


def test_the_bound_on_time_outs_cuts_runs_off_without_judging_them(kitchen: Search) -> None:
    found = explore(replace(kitchen, environment=Silent, timeouts="any", timeout_limit=0))
    assert found.violation is None


def test_an_end_in_another_state_than_declared_is_found(kitchen: Search) -> None:
    found = explore(replace(kitchen, workload=kitchen.workload[:1]))
    assert violation(found) == "the run ends with oven in cold, not in off"


def test_a_message_that_is_deferred_for_ever_is_found(kitchen: Search, oven: Spec) -> None:
    rows = tuple(
        replace(row, actions=(), to=None, defer=True, why="x") if row.event == "SwitchOff" else row
        for row in oven.rows
    )
    with substituted(replace(oven, rows=rows)):
        found = explore(replace(kitchen, ends={}))
    assert violation(found).startswith("the run ends while oven in cold still defers SwitchOff()")


def test_an_end_at_which_something_is_missing_is_found(kitchen: Search) -> None:
    class Loses(Oven):
        def look_for_next(self, msg: Baked) -> None:
            """Leaves the queue as it is."""

    assert "every_tray_is_out doesn't hold" in violation(explore(with_oven(kitchen, Loses)))


class Echo(Heater):
    """Answers, and sends itself round for ever."""

    def choices(self) -> list[Any]:
        return [("turn",)] if self.broken else super().choices()

    def choose(self, choice: Any) -> list[Any]:
        self.broken = True
        return [] if choice == ("turn",) else super().choose(choice)


def test_a_part_without_way_out_is_found(kitchen: Search) -> None:
    assert violation(explore(replace(kitchen, environment=Echo))) == "no end can be reached any more"


def test_a_field_that_changes_outside_data_is_found(kitchen: Search) -> None:
    class Hides(Oven):
        def hand_out(self, msg: Baked) -> None:
            super().hand_out(msg)
            self.room += 1

    assert "field 'room' of Hides changed and isn't in DATA" in violation(explore(with_oven(kitchen, Hides)))


def test_an_optional_message_may_stay_away(kitchen: Search) -> None:
    optional = tuple(replace(item, optional=True) for item in kitchen.workload)
    found = explore(replace(kitchen, workload=optional, ends={}))
    assert found.violation is None
    assert violation(explore(replace(kitchen, workload=optional))).startswith(
        "the run ends with oven in cold"
    )


def test_a_message_may_wait_for_a_state(kitchen: Search) -> None:
    waits = replace(kitchen.workload[1], after=("oven", ("off",)), sender="late")
    found = explore(replace(kitchen, workload=(kitchen.workload[0], waits, kitchen.workload[-1])))
    assert Taken("oven", "baking", 2) not in found.fired
    assert Taken("oven", "off", 4) in found.fired


def test_the_search_gives_up_beyond_its_bound(kitchen: Search) -> None:
    assert violation(explore(replace(kitchen, max_states=50))) == "gave up: more than 50 states"


def test_effects_to_no_core_reach_the_environment(kitchen: Search) -> None:
    class Hears(Heater):
        DATA = (*Heater.DATA, "heard")

        def __init__(self) -> None:
            super().__init__()
            self.heard: list[Any] = []

        def observe(self, sender: str, effect: Any) -> list[Any]:
            if isinstance(effect, Send):
                self.heard.append((sender, effect.to, effect.msg.number))
            return super().observe(sender, effect)

    def in_order(world: Any) -> bool:
        return bool(world.environment.heard == [("oven", "baker", n) for n in world.cores["oven"].done])

    found = explore(replace(kitchen, environment=Hears, at_end=(("in_order", in_order),)))
    assert found.violation is None
