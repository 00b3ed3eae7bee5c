"""What a request may cost the gate, and that nothing of it stays: not in memory, not in others' answers."""

from __future__ import annotations

import gc

from engine.grammar.gate.alternatives import texts_with
from engine.grammar.gate.automaton import Dfa
from engine.grammar.gate.pattern import parse
from engine.grammar.gate.refusals import GrammarRefused
from engine.grammar.gate.schema import schema_grammar
from engine.grammar.gate.work import bounded_work


def wide(properties: int) -> dict[str, object]:
    """Each property has a pattern with a lookahead of its own: some hundred states, some thousand steps."""
    texts = {
        f"p{i}": {"type": "string", "pattern": f"^(?!.*[ab].{{8}}{chr(99 + i % 20)})q{{{i + 40}}}$"}
        for i in range(properties)
    }
    return {"type": "object", "properties": texts, "additionalProperties": False}


def verdict(properties: int) -> str:
    try:
        schema_grammar(wide(properties))
    except GrammarRefused as refusal:
        return str(refusal)
    return ""


def test_a_verdict_does_not_depend_on_what_was_asked_before() -> None:
    alone = verdict(40)
    assert "steps" in alone
    for properties in (10, 20, 30):
        verdict(properties)
    assert verdict(40) == alone


def automata() -> int:
    gc.collect()
    return sum(type(one) is Dfa for one in gc.get_objects())


def test_nothing_of_a_request_is_kept() -> None:
    before = automata()
    with bounded_work():
        made = texts_with(parse("^[acegikm]{0,300}[bdfhjl]$"))
        assert texts_with(parse("^[acegikm]{0,300}[bdfhjl]$")) is made
        del made
        assert automata() > before
    assert automata() == before
