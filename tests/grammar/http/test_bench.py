"""The parts of `bench grammar`: its schemas are bounded as they say, and its checks find what is wrong."""

from __future__ import annotations

import random

import numpy as np
import pytest

from bench.grammar_cases import Case, cases
from bench.grammar_figures import Answer, Invalid, Pass, UnequalLengths, check_lengths, fault_of, validity
from engine.grammar.compiler import Compiler, whole_library
from engine.grammar.gate import schema_grammar
from engine.messages import LENGTH, STOP_EOS
from tests.grammar.service.stage import STOP, vocabulary


@pytest.fixture(scope="module")
def library() -> Compiler:
    return Compiler(vocabulary(), whole_library())


def walked(library: Compiler, case: Case, draw: random.Random) -> tuple[str, int]:
    """(text, tokens with the end) of a walk that goes where the masks let it, and ends as late as it can."""
    matcher = library.matcher(library.compile(schema_grammar(case.schema)))
    text, tokens = b"", 0
    mask = np.zeros((1, library.words), np.int32)
    while True:
        matcher.fill_next_token_bitmask(mask, 0, False)
        bits = np.unpackbits(mask.view(np.uint8)[0], bitorder="little")[: library.vocabulary.size]
        allowed = np.flatnonzero(bits)
        chosen = int(draw.choice(allowed.tolist()))
        if chosen == STOP and allowed.size > 1:
            continue
        assert matcher.accept_token(chosen, False)
        tokens += 1
        if chosen == STOP:
            return text.decode(), tokens
        text += library.vocabulary.tokens[chosen]


def test_random_walks_end_within_the_bound_and_obey(library: Compiler) -> None:
    draw = random.Random(1)
    for case in cases():
        text, tokens = walked(library, case, draw)
        assert len(text.encode()) <= case.longest, (case, text)
        assert tokens <= case.longest + 1
        assert fault_of(case.schema, text) == "", (case, text)


def test_the_schemas_are_the_same_each_time_and_all_different() -> None:
    assert cases() == cases()
    assert len({schema_grammar(case.schema).digest for case in cases()}) == len(cases()) == 64


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{", "is not JSON"),
        ('{"a": "x"}', "breaks its schema"),
        ('{"a": 1}', ""),
        ("{}", "breaks its schema"),
    ],
)
def test_an_answer_is_judged_by_parser_and_validator(text: str, fault: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert fault in fault_of(schema, text)
    assert bool(fault) == bool(fault_of(schema, text))


def test_a_whole_answer_that_does_not_obey_fails_the_bench_and_a_cut_one_counts() -> None:
    case = Case(0, {"type": "integer"}, 3)
    asked = [type("Asked", (), {"case": case})()]
    good, cut = Answer("12", 2, STOP_EOS), Answer("1", 1, LENGTH)
    assert validity(asked, [good, cut])["valid_fraction"] == 0.5
    with pytest.raises(Invalid, match="schema 0"):
        validity(asked, [good, Answer('"a"', 3, STOP_EOS)])


def test_passes_of_other_lengths_are_not_compared() -> None:
    bound, free = (Pass([Answer(tokens=count) for count in counts], 1.0) for counts in ((3, 5), (3, 4)))
    check_lengths((bound, bound), [3, 5])
    with pytest.raises(UnequalLengths, match=r"answers of \[3, 4\] tokens stand against lengths of \[3, 5\]"):
        check_lengths((bound, free), [3, 5])
