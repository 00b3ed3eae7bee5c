"""Every planted fault is found, and by what the committed table says."""

from __future__ import annotations

import argparse

import pytest

from engine.commands.replay import add_arguments
from engine.sim.run import replay
from engine.sim.scenario import load_scenario, plan_of
from engine.sim.shrink import shrink
from tests.sim.planted import Planted, all_planted, planted, recorded, search_finds

PLANTED = all_planted()
LEAST = 30


def test_the_table_lists_every_planted_fault() -> None:
    assert set(recorded()) == {one.name for one in PLANTED}
    assert len(PLANTED) >= LEAST
    assert all("replay" in command or "check" in command for command in recorded().values())


@pytest.mark.parametrize("one", PLANTED, ids=lambda one: one.name)
def test_a_planted_fault_is_found(one: Planted) -> None:
    command = recorded()[one.name]
    if "check" in command:
        with planted(one.plant):
            assert search_finds(command.rpartition(" ")[2]) is not None
        return
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(command.split()[4:])
    with planted(one.plant):
        outcome = replay(plan_of(load_scenario(args.scenario), args.data), args.order)
    assert outcome.violation is not None


def test_a_failing_scenario_shrinks() -> None:
    one = next(one for one in PLANTED if one.name == "keeps_the_slot")
    with planted(one.plant):
        for seed in range(40):
            plan = plan_of(load_scenario("steady"), seed)
            violation = replay(plan, seed).violation
            if violation is not None:
                break
        assert violation is not None
        small = shrink(plan, seed, violation.id, within_s=30)
        again = replay(small, seed).violation
    assert again is not None
    assert again.id == violation.id
    assert len(small.client) < len(plan.client)
