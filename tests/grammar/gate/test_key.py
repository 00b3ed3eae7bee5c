"""Keys over the wire."""

from __future__ import annotations

import pytest

from engine.errors import BadMessage
from engine.grammar.key import GrammarKey


def test_a_key_comes_back_as_it_was() -> None:
    key = GrammarKey(
        "regex", 'root ::= "é\n"', (("whitespace", "none"), ("open_objects", True), ("depth", 3))
    )
    assert GrammarKey.from_wire(key.wire()) == key
    assert key.wire().isascii()
    assert key.syntax == "ebnf"
    assert GrammarKey("structural_tag", "{}").syntax == "structural_tag"


def test_every_part_is_in_the_digest() -> None:
    keys = [
        GrammarKey("regex", "a"),
        GrammarKey("ebnf", "a"),
        GrammarKey("regex", "b"),
        GrammarKey("regex", "a", (("n", 1),)),
        GrammarKey("regex", "a", (("n", True),)),
        GrammarKey("regex", "a", (("n", "1"),)),
    ]
    assert len({key.digest for key in keys}) == len(keys)


@pytest.mark.parametrize(
    "wire",
    [
        "",
        "[]",
        "{}",
        '[1,"regex",[]]',
        '[2,"regex",[],"a"]',
        '[1,"lark",[],"a"]',
        '[1,"regex",[["n",null]],"a"]',
    ],
)
def test_other_texts_are_no_keys(wire: str) -> None:
    with pytest.raises(BadMessage):
        GrammarKey.from_wire(wire)
