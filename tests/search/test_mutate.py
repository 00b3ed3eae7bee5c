"""Dropping a row is noticed, and a row that nobody needs is named."""

from __future__ import annotations

from dataclasses import replace

from engine.fsm.explore import Explorer
from engine.fsm.load import substituted
from engine.fsm.mutate import Dropped, drop_rows
from engine.fsm.search import Search
from engine.fsm.spec import Spec


def verdicts(spec: Spec, *searches: Search) -> list[Dropped]:
    with substituted(spec):
        results = [(search, Explorer(search).run()) for search in searches]
        assert all(found.violation is None for _, found in results)
        return list(drop_rows([spec], results, lambda line: None))


def test_each_row_of_the_example_is_needed(oven: Spec, kitchen: Search, silence: Search) -> None:
    dropped = verdicts(oven, kitchen, silence)
    assert [(one.row.number, one.state) for one in dropped] == [
        (row.number, state) for row in oven.rows for state in row.states
    ]
    assert [one.label() for one in dropped if one.search is None] == []


def test_a_row_that_no_search_takes_is_named(oven: Spec, kitchen: Search) -> None:
    unneeded = [one for one in verdicts(oven, kitchen) if one.search is None]
    assert [(one.row.event, one.state, one.text) for one in unneeded] == [
        ("Burnt", "baking", "no search takes it")
    ]


def test_a_row_without_which_everything_holds_is_named(oven: Spec, kitchen: Search, silence: Search) -> None:
    """With an unguarded row that does the same behind it, the guarded row makes no difference."""
    rows = []
    for row in oven.rows:
        if row.label().startswith("row 2 "):
            rows += [row, replace(row, guard="has_room", number=99)]
        else:
            rows.append(row)
    unneeded = [
        one
        for one in verdicts(replace(oven, rows=tuple(rows)), kitchen, silence)
        if one.search is None and one.row.number == 2
    ]
    assert unneeded[0].text == "taken by kitchen, which hold without it as well"
