"""Random schemas: all that their grammars can write is valid, and small valid values get through."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from engine.grammar.gate import GrammarRefused, schema_grammar
from tests.grammar.gate.oracle import accepts, compiled, validator, walk
from tests.grammar.gate.schemas import SchemaMaker

BLOCKS = 6
SEEDS = 60
WHITESPACE = ("none", "compact", "flexible")


def check_written_texts(seed: int, texts: int) -> str:
    """One schema: "refused", or "checked" after texts that its grammar allows were all found valid."""
    schema = SchemaMaker(seed).schema()
    try:
        key = schema_grammar(schema, open_objects=seed % 2 == 0, whitespace=WHITESPACE[seed % 3])
    except GrammarRefused:
        return "refused"
    grammar, judge = compiled(key), validator(schema)
    for number in range(texts):
        text = walk(grammar, seed * 1000 + number)
        if text is not None:
            errors = [error.message for error in judge.iter_errors(json.loads(text))]
            assert errors == [], (seed, schema, text)
    return "checked"


@pytest.mark.parametrize("block", range(BLOCKS))
def test_a_grammar_writes_valid_values_only(block: int) -> None:
    counts = Counter(check_written_texts(block * SEEDS + i, texts=4) for i in range(SEEDS))
    assert counts["checked"] > SEEDS / 3


VALUES: list[object] = [
    None,
    True,
    False,
    0,
    1,
    3,
    -5,
    12,
    2.5,
    -0.25,
    "",
    "a",
    "abc",
    "b",
    '\u00e9\n"',
    "x1",
]
VALUES += [[], [1], [1, 2], ["a", 1], [[1], []], [3, 3, 3], [True, None], [{}], [{"a": 1}]]
VALUES += [{}, {"a": 1}, {"a": "x"}, {"b": 2}, {"a": 1, "b": 2}, {"a": {"a": 1}}, {"x1": 0}, {"ab": None}]
"""Small values of every type."""


@pytest.mark.parametrize("block", range(BLOCKS))
def test_small_values_are_accepted_only_where_they_are_valid(block: int) -> None:
    counts: Counter[tuple[bool, bool]] = Counter()
    for seed in range(10_000 + block * SEEDS, 10_000 + (block + 1) * SEEDS):
        schema = SchemaMaker(seed).schema()
        try:
            grammar = compiled(schema_grammar(schema, open_objects=True))
        except GrammarRefused:
            continue
        judge = validator(schema)
        for value in VALUES:
            valid, accepted = judge.is_valid(value), accepts(grammar, json.dumps(value, ensure_ascii=False))
            assert valid or not accepted, (seed, schema, value)
            counts[valid, accepted] += 1
    # Not all that is valid can be written, such as members in another order; nearly all of it must be.
    assert counts[True, True] > 0.97 * (counts[True, True] + counts[True, False])
