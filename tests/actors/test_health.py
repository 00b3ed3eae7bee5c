"""Signs of life in shared memory, and what the health actor says of each fault."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import pytest

from engine.actors.core import Reply
from engine.actors.health import Health
from engine.actors.ingress import Ingress
from engine.actors.schedule import URGENT
from engine.errors import ConfigError, QueueFull
from engine.lifecycle_pulse import MICRO, Pulse, PulseBoard
from engine.messages import Accepted, Drain, Enqueue, Entry, Probe, RankDown, RankUp, Sampling, Vitals


@dataclass
class Stage:
    """A board of two ranks with their writers, and a health actor that knows both as up."""

    board: PulseBoard
    pulses: list[Pulse]
    health: Health

    def ask(self, wall_s: float, pids: tuple[tuple[int, int], ...] = ()) -> Vitals:
        """The answer to a probe at this time of the wall clock."""
        probe = Probe(wall_s, "slot", self.board.read_all(), pids or ((0, os.getpid()), (1, os.getpid())))
        (effect,) = self.health.receive(probe)
        assert isinstance(effect, Reply)
        vitals: Any = effect.value
        assert isinstance(vitals, Vitals)
        return vitals


@pytest.fixture
def stage() -> Stage:
    descriptor = PulseBoard.create(2)
    board = PulseBoard(descriptor, 2)
    health = Health(2, 0.5)
    for rank in range(2):
        health.receive(RankUp(rank))
    return Stage(board, [Pulse(PulseBoard(descriptor, 2), rank, 10.0) for rank in range(2)], health)


def test_a_fresh_sign_of_every_rank_is_no_fault(stage: Stage) -> None:
    for pulse in stage.pulses:
        pulse.beat(100.0)
    vitals = stage.ask(100.5)
    assert (vitals.refused, vitals.faults, vitals.ages) == ("", (), ((0, 0.5), (1, 0.5)))


@pytest.mark.parametrize(("at_s", "fault"), [(104.9, ""), (105.1, "stale"), (99.1, ""), (98.9, "future")])
def test_a_sign_that_is_old_or_ahead_of_the_clock_is_named(stage: Stage, at_s: float, fault: str) -> None:
    for pulse in stage.pulses:
        pulse.beat(100.0)
    assert stage.ask(at_s).faults == (((0, fault), (1, fault)) if fault else ())


def test_missing_duplicate_and_torn_signs_are_told_apart(stage: Stage) -> None:
    stage.pulses[0].beat(100.0)
    assert stage.ask(100.0).faults == ((1, "missing"),)
    stage.pulses[1].beat(100.0)
    assert stage.ask(100.0, ((0, os.getpid()), (1, 1))).faults == ((1, "duplicate"),)
    stage.board.put(1, 0, os.getpid(), 100 * MICRO, 0, 0, 0, 0)
    assert {fault for _, fault in stage.ask(100.0).faults} == {"duplicate"}
    stage.pulses[1].beat(100.0)
    stage.board.lines[3:5, 4] += 1
    assert stage.ask(100.0).faults == ((1, "unreadable"),)


def test_a_running_step_shows_its_age_and_its_budget(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    pulse, now_s = stage.pulses[0], 50.0
    monkeypatch.setattr(time, "monotonic_ns", lambda: int(now_s * 1e9))
    pulse.step_began()
    now_s = 51.0
    pulse.step_began()
    now_s = 53.0
    first = stage.board.read(0, now_s)
    assert first is not None
    assert (first.step_age_s, first.step_budget_s, first.done) == (3.0, 10.0, 0)
    pulse.step_ended()
    second = stage.board.read(0, now_s + 0.5)
    assert second is not None
    # The second step has run only since the first one ended.
    assert (second.step_age_s, second.done) == (0.5, 1)
    pulse.step_ended()
    idle = stage.board.read(0, now_s)
    assert idle is not None
    assert idle.step_age_s == 0.0


def test_each_state_has_its_code() -> None:
    health = Health(1, 0.5)

    def code() -> str:
        (effect,) = health.receive(Probe(0.0, "slot"))
        assert isinstance(effect, Reply)
        return str(effect.value.code)

    assert code() == "starting"
    health.receive(RankUp(0))
    assert code() == ""
    health.receive(RankDown(0))
    assert code() == "rank_lost"
    health.receive(Drain())
    assert code() == "shutting_down"


def test_a_board_of_another_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="but 3 ranks need"):
        PulseBoard(PulseBoard.create(2), 3)


def test_a_writer_that_is_held_up_in_the_middle_leaves_its_last_sign(stage: Stage) -> None:
    for wall_s in (1.0, 2.0, 3.0, 4.0):
        stage.pulses[0].beat(wall_s)
        for copy in (1, 2):
            stage.board.lines[copy, 0] -= 1
            beat = stage.board.read(0, 0.0)
            assert wall_s == 1.0 or (beat is not None and not beat.torn)
            stage.board.lines[copy, 0] += 1


def test_a_read_never_waits_and_takes_microseconds(stage: Stage) -> None:
    for wall_s in (1.0, 2.0):
        stage.pulses[0].beat(wall_s)
    stage.board.lines[1:3, 0] += 1
    best_s = 1.0
    for _ in range(20):
        began_s = time.perf_counter()
        assert stage.board.read_all()[0].torn
        best_s = min(best_s, time.perf_counter() - began_s)
    assert best_s < 0.05


def test_the_servers_own_probe_is_taken_where_clients_find_no_place() -> None:
    ingress = Ingress(1, 1)
    ingress.receive(RankUp(0))

    def ask(priority: int) -> Any:
        entry = Entry(1, b"\0\0\0\0", Sampling(max_new_tokens=1), priority=priority)
        replies = [one for one in ingress.receive(Enqueue((entry,), slot="s")) if isinstance(one, Reply)]
        return replies[0].value

    assert isinstance(ask(0), Accepted)
    assert isinstance(ask(0), QueueFull)
    assert isinstance(ask(URGENT), Accepted)
    assert isinstance(ask(0), QueueFull)
    assert ingress.loads_are_within_limits()
