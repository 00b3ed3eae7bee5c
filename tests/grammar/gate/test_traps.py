"""What the compiler drops or bends by itself, and what the gate makes of the same schema.

Each case shows both: the compiler's own reading is wrong for one text, and the gate's grammar, or refusal, is
right. A release of the compiler that mends a case fails here, and its row can go.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import xgrammar as xgr

from engine.grammar.gate import GrammarRefused, schema_grammar
from tests.grammar.gate.oracle import accepts, compiled, compiler

OBJECT = {"type": "object"}
AB = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}


def native(schema: Any) -> xgr.CompiledGrammar:
    return compiler().compile_json_schema(json.dumps(schema))


# (schema, invalid text that the compiler alone lets through, a valid text)
LET_THROUGH: dict[str, tuple[Any, str, str]] = {
    "minimum without type": ({"minimum": 3}, "1", "4"),
    "required name not listed": ({**AB, "required": ["a", "c"]}, '{"a": 1}', '{"a": 1, "c": 1}'),
    "length beside pattern": ({"type": "string", "pattern": "^[a-z]+$", "maxLength": 3}, '"abcd"', '"abc"'),
    "properties beside anyOf": (
        {**AB, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        '{"a": "x"}',
        '{"a": 1}',
    ),
    "siblings of $ref": ({"$ref": "#/$defs/i", "minimum": 5, "$defs": {"i": {"type": "integer"}}}, "1", "7"),
    "allOf of objects": (
        {"allOf": [{**OBJECT, "required": ["a"]}, {**OBJECT, "required": ["b"]}]},
        "[1]",
        '{"a": 1, "b": 2}',
    ),
    "oneOf that overlaps": ({"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 2}]}, "3", "1"),
    "multipleOf of a number": ({"type": "number", "multipleOf": 0.5}, "0.3", "1.5"),
    "not": ({"not": {"type": "string"}}, '"a"', "1"),
    "if": (
        {"type": "integer", "if": {"minimum": 10}, "then": {"multipleOf": 10}},
        "11",
        "20",
    ),
    "dependentRequired": ({**AB, "dependentRequired": {"a": ["b"]}}, '{"a": 1}', '{"a": 1, "b": 2}'),
    "uniqueItems": ({"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}, "[1, 1]", "[2, 1]"),
    "contains": ({"type": "array", "items": {"type": "integer"}, "contains": {"const": 1}}, "[2]", "[2, 1]"),
    "a listed name among the others": (
        {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": True},
        '{"a": 1, "\\u0061": "x"}',
        '{"a": 1, "b": "x"}',
    ),
    "date that doesn't exist": ({"type": "string", "format": "date"}, '"2026-02-30"', '"2028-02-29"'),
    "propertyNames": (
        {"type": "object", "properties": {"ab": {}, "a": {}}, "propertyNames": {"maxLength": 1}},
        '{"ab": 1}',
        '{"a": 1}',
    ),
    "patternProperties": (
        {"patternProperties": {"a": {"type": "integer"}}},
        '{"ba": "x"}',
        '{"ba": 1, "b": "x"}',
    ),
    "lookahead": ({"type": "string", "pattern": "^(?!a)[a-z]+$"}, '"abc"', '"bac"'),
    "remote $ref": ({"$ref": "https://example.com/schema"}, "1", ""),
}


@pytest.mark.parametrize("name", sorted(LET_THROUGH))
def test_what_the_compiler_lets_through_the_gate_does_not(name: str) -> None:
    schema, invalid, valid = LET_THROUGH[name]
    assert accepts(native(schema), invalid)
    if not valid:
        with pytest.raises(GrammarRefused):
            schema_grammar(schema)
        return
    grammar = compiled(schema_grammar(schema))
    assert not accepts(grammar, invalid)
    assert accepts(grammar, valid)


# (schema, valid text that the compiler alone refuses, an invalid text)
HELD_BACK: dict[str, tuple[Any, str, str]] = {
    "required alone": ({"type": "object", "required": ["a"]}, '{"a": 1}', "{}"),
    "pattern without anchors": ({"type": "string", "pattern": "b"}, '"abc"', '"ac"'),
    "escapes in a pattern": ({"type": "string", "pattern": "^a.b$"}, '"a\\"b"', '"ab"'),
    "patterns and names": (
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "patternProperties": {"^p": {"type": "null"}},
        },
        '{"a": 1, "p1": null}',
        '{"a": 1, "p1": 2}',
    ),
    "constant array with spaces": ({"const": [1, {"a": 2}]}, '[1, {"a": 2}]', "[1]"),
}


@pytest.mark.parametrize("name", sorted(HELD_BACK))
def test_what_the_compiler_holds_back_the_gate_lets_through(name: str) -> None:
    schema, valid, invalid = HELD_BACK[name]
    assert not accepts(native(schema), valid)
    grammar = compiled(schema_grammar(schema))
    assert accepts(grammar, valid)
    assert not accepts(grammar, invalid)


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"type": "array", "items": [{"type": "integer"}], "additionalItems": False}, "[1]", "[1, 2]"),
        ({"type": "integer", "minimum": 1, "exclusiveMinimum": True}, "2", "1"),
        ({"type": "object", "dependencies": {"a": ["b"]}}, '{"b": 1}', '{"a": 1}'),
    ],
)
def test_older_spellings_are_enforced(schema: Any, valid: str, invalid: str) -> None:
    grammar = compiled(schema_grammar(schema))
    assert accepts(grammar, valid)
    assert not accepts(grammar, invalid)


def test_a_negated_class_of_the_compiler_lets_bytes_of_surrogates_through() -> None:
    half = b"\xed\xa0\x80"
    matcher = xgr.GrammarMatcher(compiler().compile_grammar('root ::= [^"]'))
    assert all(matcher.accept_token(byte) for byte in half)
    string = xgr.GrammarMatcher(compiled(schema_grammar({"type": "string"})))
    assert string.accept_string('"')
    assert string.accept_token(half[0])
    assert not string.accept_token(half[1])


def test_hexadecimal_escapes_of_the_compiler_have_no_end() -> None:
    assert not accepts(compiler().compile_grammar('root ::= "\\x41B"'), "AB")
    assert accepts(compiled(schema_grammar({"const": "\x07B"})), '"\\u0007B"')
