"""Strings of counted characters: exactly the lengths that are asked for, and masks that cost little."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import pytest

from engine.grammar.compiler import compiled_of
from engine.grammar.gate import schema_grammar
from engine.grammar.gate.counted import BLOCK, WRITTEN_OUT
from engine.grammar.key import GrammarKey
from engine.grammar.matchers import Matcher
from tests.grammar.pipeline.stage import compiler
from tests.grammar.service.stage import WIDTH

TOP = 3 * BLOCK + 5
EDGES = (0, 1, 2, BLOCK - 1, BLOCK, BLOCK + 1, WRITTEN_OUT, WRITTEN_OUT + 1, 2 * BLOCK - 1, 2 * BLOCK,
         2 * BLOCK + 1, 3 * BLOCK - 1, 3 * BLOCK)  # fmt: skip
CHARACTERS = ("a", '"', "\n", "é", "😀")
"""One of each spelling: itself, with short and long escapes, of several bytes."""


def of_lengths(low: int, high: int | None) -> dict[str, Any]:
    """Strings of `low` to `high` characters."""
    most = {} if high is None else {"maxLength": high}
    return {"type": "string", "minLength": low, **most}


def ends(key: GrammarKey, text: str) -> bool:
    """Whether a grammar takes all of a text and may end behind it."""
    handle = compiler().matcher(compiler().compile(key))
    if not handle.accept_string(text, False):
        return False
    masks = np.zeros((1, compiler().words), np.int32)
    handle.fill_next_token_bitmask(masks, 0, False)
    stop = compiler().vocabulary.stop_ids[0]
    return bool(masks[0, stop >> 5] >> (stop & 31) & 1)


@pytest.mark.parametrize("low", EDGES)
def test_a_string_has_the_lengths_that_are_asked_for(low: int) -> None:
    for high in (*(one for one in EDGES if one >= low), None):
        key = schema_grammar(of_lengths(low, high))
        near = {one + by for one in (low, high or TOP) for by in (-1, 0, 1) if 0 <= one + by <= TOP}
        for length in near:
            texts = {json.dumps((one * length)[:length], ensure_ascii=False) for one in CHARACTERS}
            wanted = low <= length and (high is None or length <= high)
            assert {ends(key, text) for text in texts} == {wanted}, (low, high, length)


def test_every_length_between_blocks_is_reached() -> None:
    low, high = BLOCK + 3, 3 * BLOCK - 2
    key = schema_grammar(of_lengths(low, high))
    found = [length for length in range(TOP) if ends(key, json.dumps("a" * length))]
    assert found == [*range(low, high + 1)]


@pytest.mark.parametrize("schema", [of_lengths(0, None), of_lengths(2, 40), of_lengths(0, 500),
                                    {"type": "string", "pattern": "^.{1,100}$"}])  # fmt: skip
def test_the_mask_of_a_string_is_known_but_for_few_tokens(schema: dict[str, Any]) -> None:
    """A rule that is repeated is the measure: each token of more than one item is tried."""
    repeated = GrammarKey("ebnf", 'root ::= "\\"" (c){0,500} "\\""\nc ::= [^"\\\\\\n] | "\\\\" ["\\\\n]')
    assert fill_s(schema_grammar(schema)) * 10 < fill_s(repeated)


def fill_s(key: GrammarKey) -> float:
    """Seconds of a mask inside of a string, the best of some."""
    matcher = Matcher(compiled_of(compiler().compile(key)), WIDTH)
    assert matcher.handle.accept_string('"abc', False)
    masks, found = np.zeros((1, compiler().words), np.int32), []
    for _ in range(7):
        began_s = time.perf_counter()
        matcher.fill(masks, 0)
        found.append(time.perf_counter() - began_s)
    return min(found)
