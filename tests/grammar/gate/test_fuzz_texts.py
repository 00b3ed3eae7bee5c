"""A slice of `bench grammar-fuzz`: damaged patterns, grammars and tags; and what it makes of faults."""

from __future__ import annotations

from collections import Counter

import pytest

from bench.grammar_fuzz import Fuzz
from engine.grammar.gate import parse_request
from tests.grammar.gate.fuzz.cases import CASES, Found, built, judged
from tests.grammar.gate.fuzz.faults import planted
from tests.grammar.gate.fuzz.patterns import Ecma, Undecided
from tests.grammar.gate.fuzz.reading import read

SLICE = {"regex": 24, "ebnf": 40, "structural_tag": 60}


def unsaid(part: str) -> None:
    """Nobody listens."""


@pytest.mark.parametrize("kind", sorted(SLICE))
def test_what_is_accepted_has_exactly_the_texts_of_an_independent_reading(kind: str) -> None:
    counts: Counter[str] = Counter()
    for seed in range(SLICE[kind]):
        counts += CASES[kind](seed, unsaid)
    assert counts["checked"] > SLICE[kind] / 8
    assert counts["texts"] > 20 * counts["checked"]
    assert counts["texts_allowed"] > counts["texts"] / 10
    # Three in ten are left as they were made. Few of those are refused, such as endless repetitions.
    assert counts["valid_refused"] < 0.2 * SLICE[kind]


@pytest.mark.parametrize(
    ("grammar", "yes", "no"),
    [
        ('root ::= a{2} # note\na ::= "x" | [^a-c\\]\\n]', ["xx", "x-"], ["x", "xa", "x]"]),
        ('root ::= ("a" | "")* "b"{0,2} [\\u0063-e]+', ["c", "aabbde"], ["", "bbbc", "f"]),
        ('root ::= "(" root? ")" | ()', ["", "(())"], ["(()", ")"]),
        ('root ::= [--a] "\\x41\\n"', ["-A\n", "AA\n"], ["A\n", "bA\n"]),
    ],
)
def test_the_independent_reading_is_right(grammar: str, yes: list[str], no: list[str]) -> None:
    holds = read(grammar)
    assert all(holds(text) for text in yes)
    assert not any(holds(text) for text in no)
    with pytest.raises(ValueError, match="Unexpected token"):
        read('root ::= "a" | | "b"')


def test_the_judge_of_patterns_reads_as_javascript_does() -> None:
    assert Ecma("a{,3}").matches("a{,3}")
    assert Ecma("\\p{L}").matches("é")
    assert Ecma("[^]").is_in("x\ny")
    with pytest.raises(ValueError, match="SyntaxError"):
        Ecma("(a")
    with pytest.raises(Undecided):
        Ecma("(a*)*b").matches("a" * 40)
    with pytest.raises(Undecided, match="aren't closed"):
        Ecma("}{2,1")


def test_a_text_too_many_or_too_few_is_found() -> None:
    key = parse_request({"regex": "[ab]"})
    assert key is not None
    grammar = built(key, "[ab]", unsaid)
    with pytest.raises(Found, match="let through"):
        judged(grammar, ["a", "b"], lambda text: text == "a", "[ab]", unsaid)
    with pytest.raises(Found, match="held back"):
        judged(grammar, ["a", "c"], lambda text: True, "[ab]", unsaid)


def test_a_crash_a_hang_and_a_fault_are_told_apart_and_the_next_case_runs() -> None:
    within = {"start": 60.0, "gate": 3.0, "compile": 3.0, "match": 60.0, "judge": 60.0}
    fuzz = Fuzz(dict.fromkeys([*planted()], planted), within)
    try:
        for kind in (*planted(), "good"):
            fuzz.one(kind, 7)
    finally:
        fuzz.close()
    assert fuzz.counts["good"] == {"cases": 2, "checked": 2}
    assert fuzz.counts["slow compile"] == {"cases": 1, "timed_out": 1}
    assert fuzz.counts["judge"] == {"cases": 1, "undecided": 1}
    assert [line.split(" in ")[0] for line in fuzz.shown[:2]] == ["hang 7: hang", "crash 7: crash"]
    assert fuzz.shown[2].startswith("wrong 7: found IndexError")
    assert "exit code -9" in fuzz.shown[1]
    figures = fuzz.figures()
    assert (figures["crash"], figures["hang"], figures["found"]) == (1, 1, 1)
