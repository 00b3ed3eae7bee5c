"""Each monitor of ingress, detokenizer, shutdown and health is broken by a planted fault: none is vacuous.

Those of a rank's machines are broken in the other test_*_monitors.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.actors.core import Send
from engine.actors.detok import Detok
from engine.actors.health import Health
from engine.actors.ingress import Ingress
from engine.actors.intake import Intake
from engine.actors.rank import Rank
from engine.actors.release import Release
from engine.actors.requests import Requests
from engine.actors.shutdown import Shutdown
from engine.fsm.check import machine_files
from engine.fsm.load import load
from engine.fsm.owners import SPECS
from engine.fsm.search import load_search
from engine.messages import CloseServer
from tests.search.planting import explored

TESTS = Path(__file__).parents[1]


def nothing(self: Any, msg: Any) -> None:
    """Does nothing."""


def never(self: Any, msg: Any) -> bool:
    """Says no."""
    return False


def always(self: Any, msg: Any) -> bool:
    """Says yes."""
    return True


def splits_groups(self: Ingress, msg: Any) -> None:
    """Notes the second request of a call as one of the first one's group, on another rank."""
    first = self.next_id
    accept(self, msg)
    if len(msg.entries) > 1:
        self.live[first + 1] = replace(self.live[first + 1], rank=1, group=first)


def forgets_a_rank(self: Ingress, msg: Any) -> None:
    """Leaves the requests of a dead rank alone."""
    self.up.discard(msg.rank)


def ignores_the_bound(self: Detok, watched: Any, chunk: Any) -> Any:
    """Gives each chunk to the client at once."""
    watched.outstanding += 1
    return chunk


def says_all_is_well(self: Shutdown, msg: Any) -> None:
    """Ends with 0 whatever happened."""
    self.steps.append("close")
    self.emit(Send("launcher", CloseServer(0)))


def closes_early(self: Shutdown, msg: Any) -> None:
    """Closes while ranks still end."""
    stop_all(self, msg)
    self.steps.append("close")


def none_of_them(self: Requests, rows: Any, msg: Any) -> Any:
    """Says no of every row."""
    return np.zeros(rows.size, bool)


def awaits_a_step_too_many(self: Intake) -> None:
    """Keeps what the last requests hold for a step that never comes."""
    abort_all(self)
    self.requests.in_flight[self.requests.rows("ending")] += 1


def leaves_nothing(self: Requests, rows: Any, at: Any, msg: Any) -> None:
    """Keeps the matchers of requests that have ended."""


def passes_the_barrier(self: Release, msg: Any) -> None:
    """Takes the other ranks as there."""
    self._begin("barrier")
    self.post("PeersMet")


accept = Ingress.accept
stop_all = Shutdown.stop_all
abort_all = Intake.abort_all

# search, class, its method, what stands in its place, the monitor that notices
PLANTED: list[tuple[str, type, str, Callable[..., Any], str]] = [
    ("edge-clients", Ingress, "accept", splits_groups, "I3"),
    ("edge-ranks", Ingress, "is_over_the_limit", never, "IN1"),
    ("edge-ranks", Ingress, "repeats_a_live_rid", never, "rids_are_unique"),
    ("edge-stops", Ingress, "refuse_route", Ingress.refuse_draining, "unknown_rank_is_the_clients_fault"),
    ("edge-drain", Ingress, "say_drained", nothing, "drained_is_said_once"),
    ("edge-loss", Ingress, "lose_rank", forgets_a_rank, "one_terminal_event"),
    ("edge-ranks", Ingress, "lose_rank", forgets_a_rank, "a_lost_rank_is_heard_at_once"),
    ("ranks-three-death", Rank, "report_loss", nothing, "no_rank_is_left_alone"),
    ("end-of-patience", Ingress, "end_all", nothing, "no_request_is_left"),
    ("ends-two", Ingress, "end_all", nothing, "every_client_hears_one_end"),
    ("edge-stops", Detok, "_next", ignores_the_bound, "D1"),
    ("edge-clients", Detok, "take_credit", nothing, "credit_is_conserved"),
    ("edge-drain", Ingress, "stop_detok", nothing, "detok_stops_last"),
    ("edge-stop", Ingress, "has_no_request", always, "D2"),
    ("edge-clients", Detok, "abort", nothing, "who_left_is_forgotten"),
    ("end-by-signal", Shutdown, "stop_all", closes_early, "I8"),
    ("end-by-signal", Shutdown, "is_third", never, "SD1"),
    ("end-by-failure", Shutdown, "close", says_all_is_well, "closed_tells_how"),
    ("probes", Health, "is_the_last_to_start", always, "H1"),
    ("release-two", Release, "wait_for_peers", passes_the_barrier, "RL1"),
    ("release-two", Release, "is_whole", never, "RL2"),
    ("release-two", Shutdown, "close", says_all_is_well, "all_is_over"),
    ("rank-grammars", Requests, "is_constrained", none_of_them, "only_with_a_matcher"),
    ("rank-grammars", Requests, "leave_matcher", leaves_nothing, "every_matcher_is_left"),
    ("rank-requests", Requests, "was_aborted", none_of_them, "I11"),
    ("rank-requests", Intake, "abort_all", awaits_a_step_too_many, "everything_returned"),
]


@pytest.mark.parametrize(("search", "owner", "method", "fault", "monitor"), PLANTED)
def test_a_planted_fault_is_noticed_by_its_monitor(
    search: str,
    owner: type,
    method: str,
    fault: Callable[..., Any],
    monitor: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owner, method, fault)
    assert monitor in explored(search, monkeypatch).text


def test_every_monitor_is_broken_by_a_planted_fault() -> None:
    declared = {invariant.id for path in machine_files() for invariant in load(path).invariants}
    for path in (SPECS / "search").glob("*.toml"):
        search = load_search(path)
        declared |= {name.partition(":")[2] for name, _ in (*search.invariants, *search.at_end)}
    planted = {monitor for *_, monitor in PLANTED}
    others = [path for path in TESTS.rglob("test_*_monitors.py") if path != Path(__file__)]
    elsewhere = "".join(path.read_text() for path in others)
    assert {name for name in declared - planted if f'"{name}"' not in elsewhere} == set()
