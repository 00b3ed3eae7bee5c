"""Every search of specs/search: holds, finds the recorded states, on the table and on the library alike."""

from __future__ import annotations

import argparse
import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from engine.fsm import check
from engine.fsm.explore import Explorer, Found
from engine.fsm.load import load, substituted
from engine.fsm.owners import SPECS
from engine.fsm.search import Search, load_search

ALL = [load_search(path) for path in sorted((SPECS / "search").glob("*.toml"))]
QUICK = [search for search in ALL if not search.deep]
SMALL = [search for search in QUICK if search.states <= 6_000]  # The library walks them in about a second.
OTHER_SPEED = {"hot": "cold", "cold": "hot", "array": "array"}


def explored(search: Search) -> Found:
    return Explorer(search).run()


@pytest.mark.parametrize("search", QUICK, ids=lambda search: search.name)
def test_each_search_holds_and_finds_the_recorded_states(search: Search) -> None:
    found = explored(search)
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
    assert other == explored(search)


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
