"""The machine: order of guards, actions, moves, posted and deferred events; errors move nothing."""

from __future__ import annotations

import argparse
from dataclasses import replace

import pytest

from bench import machine
from engine.actors.core import Armed, Core, Run, Send, Stop, TimedOut
from engine.errors import SpecError, Unexpected
from engine.fsm.load import substituted
from engine.fsm.spec import Spec
from engine.fsm.table import RECORDED
from tests.specs.data.oven import Baked, Oven, SwitchOff, Tray

SPEEDS = ("hot", "cold")


@pytest.fixture(params=SPEEDS)
def speed(request: pytest.FixtureRequest, oven: Spec) -> Spec:
    """The example on the compiled table and on the library."""
    return replace(oven, speed=request.param)


def built(spec: Spec, room: int = 1) -> Oven:
    with substituted(spec):
        return Oven(room=room)


def test_effects_come_back_in_the_order_of_the_actions(speed: Spec) -> None:
    core = built(speed)
    assert core.receive(Tray(1)) == [Run(1)]
    assert core.receive(Tray(2)) == []
    assert core.receive(Baked(1)) == [Send("baker", Baked(1)), Run(2)]


def test_a_posted_event_comes_before_what_was_deferred(speed: Spec) -> None:
    core = built(speed)
    for msg in (Tray(1), Tray(2), Tray(3)):
        core.receive(msg)
    core.receive(Baked(1))
    assert [event for _, event, _ in core.record][-2:] == ["Next", "Tray"]
    assert core.queue == [3]


def test_deferred_messages_are_offered_in_order_until_they_are_taken(speed: Spec) -> None:
    core = built(speed, room=0)
    for msg in (Tray(1), Tray(2), SwitchOff(), Tray(3)):
        core.receive(msg)
    assert list(core.waiting) == [Tray(2), SwitchOff(), Tray(3)]
    assert core.receive(Baked(1)) == [Send("baker", Baked(1)), Run(2)]
    assert list(core.waiting) == [SwitchOff(), Tray(3)]
    assert core.receive(Baked(2)) == [Send("baker", Baked(2)), Stop("off")]
    assert core.ended
    assert list(core.waiting) == []


def test_more_deferred_messages_than_declared_are_an_error(speed: Spec) -> None:
    core = built(replace(speed, max_deferred=2), room=0)
    for number in (1, 2, 3):
        core.receive(Tray(number))
    with pytest.raises(Unexpected, match="more than 2 messages deferred in baking"):
        core.receive(Tray(4))


def test_an_event_without_answer_names_machine_event_state_and_rows(speed: Spec) -> None:
    core = built(speed)
    core.receive(Tray(1))
    with pytest.raises(Unexpected, match=r"oven: Baked in baking: no guard of rows \[5, 6\] held.*number=9"):
        core.receive(Baked(9))
    with pytest.raises(Unexpected, match="str isn't among its events"):
        core.receive("bread")


def test_an_action_that_raises_moves_nothing_and_lets_no_effect_out(speed: Spec) -> None:
    core = built(speed)
    core.baker = None  # type: ignore[assignment]
    core.receive(Tray(1))

    def fail(event: str) -> None:
        raise ZeroDivisionError

    core.queue = [2]
    core.post = fail  # type: ignore[assignment, method-assign]
    with pytest.raises(ZeroDivisionError):
        core.receive(Baked(1))
    assert core.state == "baking"
    assert core.receive(Tray(3)) == []


def test_a_follow_up_that_raises_brings_the_first_state_back(speed: Spec) -> None:
    core = built(speed)
    core.receive(Tray(1))
    core.queue = ["bread"]  # type: ignore[list-item]
    core.heat = None  # type: ignore[assignment, method-assign]
    with pytest.raises(TypeError):
        core.receive(Baked(1))
    assert core.state == "baking"


def test_a_time_out_of_an_earlier_entry_does_nothing(speed: Spec) -> None:
    core = built(speed)
    assert core.armed is None
    core.receive(Tray(1))
    assert core.armed == Armed(core.entry, 500)
    old = core.time_out()
    core.receive(Baked(1))
    assert core.receive(old) == []
    core.receive(Tray(2))
    assert core.receive(old) == []
    assert core.receive(TimedOut(core.entry)) == [Stop("off")]
    assert core.state == "off"


def test_a_row_that_stays_does_not_arm_the_time_out_anew(speed: Spec) -> None:
    core = built(speed)
    core.receive(Tray(1))
    armed = core.armed
    core.receive(Tray(2))
    assert core.armed == armed


def test_the_flight_recorder_keeps_the_last_rows(speed: Spec) -> None:
    core = built(speed)
    core.receive(SwitchOff())
    for number in range(RECORDED + 10):
        core.receive(Tray(number))
    assert len(tuple(core.record)) == RECORDED
    assert tuple(core.record)[-1] == ("off", "Tray", 4)


def test_a_snapshot_brings_state_data_and_deferred_messages_back(speed: Spec) -> None:
    core = built(speed)
    for msg in (Tray(1), Tray(2), Tray(3), SwitchOff()):
        core.receive(msg)
    taken = core.snapshot()
    after = (core.receive(Baked(1)), core.receive(Baked(2)), core.snapshot())
    core.restore(taken)
    assert core.snapshot() == taken
    assert (core.receive(Baked(1)), core.receive(Baked(2)), core.snapshot()) == after
    assert hash(taken) == hash(built(speed).snapshot()) or taken != built(speed).snapshot()


def test_a_state_has_no_setter(speed: Spec) -> None:
    with pytest.raises(AttributeError):
        built(speed).state = "off"  # type: ignore[misc]


def test_a_core_refuses_a_spec_that_another_class_owns(oven: Spec) -> None:
    class Stove(Core):
        SPEC = "oven"

    with pytest.raises(SpecError, match=r"owned by tests/specs/data/oven.py:Oven, not by Stove"):
        Stove()


def test_the_compiled_table_is_at_least_twenty_times_as_fast_as_the_library() -> None:
    figures = machine.run(argparse.Namespace())
    assert figures["ratio"] >= 20
