"""The official suite of draft 2020-12: nothing invalid is ever allowed, and the committed table is true."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.grammar.gate import suite

UNCHECKED = 871
"""Right answers of the compiler alone, which lets 258 invalid values through."""


@pytest.mark.parametrize("open_objects", [True, False])
def test_no_invalid_value_is_accepted(open_objects: bool) -> None:
    found = suite.outcomes(open_objects)
    wrong = [(keyword, name) for keyword, name, outcome in found if outcome == "accepted but invalid"]
    assert wrong == []
    assert len(found) == 1257


def test_more_is_right_than_without_the_gate() -> None:
    counts = Counter(outcome for _, _, outcome in suite.outcomes(True))
    assert counts["right"] > UNCHECKED + 100
    assert counts["rejected but valid"] < 40


def test_the_committed_table_is_what_the_suite_gives() -> None:
    text = suite.DOCS.read_text(encoding="utf-8")
    assert text.partition(suite.BEGIN)[2].partition(suite.END)[0].strip() == suite.table()
