"""Every search of specs/search: holds, finds the recorded states, on the table and on the library alike."""

from __future__ import annotations

import argparse
import json
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from engine.fsm import check
from engine.fsm.explore import Explorer, Found
from engine.fsm.load import load, substituted
from engine.fsm.owners import SPECS
from engine.fsm.search import Search, load_search
from engine.fsm.system import Actor, Link, System

ALL = [load_search(path) for path in sorted((SPECS / "search").glob("*.toml"))]
QUICK = [search for search in ALL if not search.deep]
SMALL = [search for search in QUICK if search.states <= 6_000]  # The library walks them in about a second.
SHUTDOWN = Actor("shutdown", "Ends things.", "api", 4, "reject", spec="shutdown")
LAUNCHER = Actor("launcher", "Acts.", "api", 4, "reject")
OTHER_SPEED = {"hot": "cold", "cold": "hot", "array": "array"}


def explored(search: Search) -> Found:
    return Explorer(search).run()


@cache
def found_by(name: str) -> Found:
    """What the committed search finds with the committed specs."""
    return explored(named(name))


def named(name: str) -> Search:
    return next(search for search in ALL if search.name == name)


@pytest.mark.parametrize("search", QUICK, ids=lambda search: search.name)
def test_each_search_holds_and_finds_the_recorded_states(search: Search) -> None:
    found = found_by(search.name)
    assert found.violation is None, found.violation.report()
    assert found.states == search.states


@pytest.mark.parametrize("search", SMALL, ids=lambda search: search.name)
def test_table_and_library_span_the_same_states(search: Search) -> None:
    """The machine that a spec doesn't run on in production is the oracle for the one that it does."""
    with ExitStack() as swapped:
        for path in check.machine_files():
            spec = load(path)
            swapped.enter_context(substituted(replace(spec, speed=OTHER_SPEED[spec.speed])))
        other = explored(search)
    assert other == found_by(search.name)


def test_check_reports_a_wrong_number_of_states_and_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    smallest = min(ALL, key=lambda search: search.states)
    report = check.Report(until=float("inf"))
    check.run_search(replace(smallest, states=smallest.states + 1), report)
    assert len(report.failures) == 1
    assert f"write states = {smallest.states}" in report.failures[0]
    assert "FAIL" in capsys.readouterr().out


def test_check_stops_when_its_minutes_are_over(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    check.add_arguments(parser)
    outcome = tmp_path / "check.json"
    assert check.run(parser.parse_args(["--minutes", "0", "--json", str(outcome)])) == 1
    written = json.loads(outcome.read_text())
    assert written["ok"] is False
    assert all("minutes are over" in text or "no search runs" in text for text in written["failures"])


def test_without_mailboxes_a_step_would_overtake_its_watch() -> None:
    """Ingress and detokenizer share a process: a Watch is in the mailbox before the rank has the request."""
    search = named("edge-ranks")
    found = explored(replace(search, local=()))
    assert found.violation is not None
    assert "one_terminal_event" in found.violation.text


def test_a_message_of_the_priority_lane_overtakes_what_waits_in_the_mailbox() -> None:
    without = explored(replace(named("edge-stop"), urgent=frozenset()))
    assert without.states != found_by("edge-stop").states


def test_check_names_what_is_sent_undeclared_and_what_is_declared_unsent() -> None:
    system = System(
        {"shutdown": SHUTDOWN, "launcher": LAUNCHER}, (Link("shutdown", "launcher", ("KillRanks",)),)
    )
    report = check.Report(until=float("inf"))
    check.compare_sends(system, [found_by("end-by-failure")], report)
    assert found_by("probes").sent == frozenset()
    assert any("shutdown sends CloseServer to launcher; add it" in text for text in report.failures)
    report = check.Report(until=float("inf"))
    check.compare_sends(system, [found_by("probes")], report)
    assert [text.partition(";")[0] for text in report.failures] == [
        "specs/system.toml: no search has shutdown send KillRanks to launcher"
    ]
