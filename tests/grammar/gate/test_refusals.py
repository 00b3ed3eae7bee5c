"""What is refused, with the keyword's place; and texts that aren't schemas."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.errors import BadRequest
from engine.grammar.gate import GrammarRefused, schema_grammar
from engine.grammar.gate.jsontext import LIMITS
from tests.grammar.gate.oracle import accepts, compiled


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"properties": {"a": {"type": "text"}}}, "/properties/a/type"),
        ({"type": "array", "uniqueItems": True}, "/uniqueItems"),
        ({"properties": {"a/b": {"pattern": "(?=x)"}}}, "/properties/a~1b/pattern"),
        ({"anyOf": [{"format": "phone"}]}, "/anyOf/0/format"),
        ({"$ref": "#/$defs/none"}, "/$ref"),
        ({"$ref": "#"}, "/"),
        ({"allOf": [{"$ref": "#/$defs/x"}], "$defs": {"x": {"$ref": "#"}}}, "/"),
        ({"not": {"unevaluatedItems": False}}, "/not/unevaluatedItems"),
        ({"oneOf": [{"format": "date"}, {"type": "string"}]}, "/oneOf"),
        ({"multipleOf": 0}, "/multipleOf"),
        ({"$defs": {"m": {"type": "object", "minProperties": 2}}, "$ref": "#/$defs/m"}, "/"),
        ({"multipleOf": 123457}, "/multipleOf"),
        ({"minLength": -1}, "/minLength"),
        ({"maxLength": 1.5}, "/maxLength"),
        ({"minimum": "1"}, "/minimum"),
        ({"minimum": 1e999}, "/minimum"),
        ({"enum": []}, "/enum"),
        ({"required": True}, "/required"),
        ({"items": {"properties": 3}}, "/items/properties"),
        ({"$schema": "https://example.com/own"}, "/$schema"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "/"),
        ({"enum": ["a"], "type": "integer"}, "/"),
        ({"properties": {"a": False}, "required": ["a"], "type": "object"}, "/"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "/"),
        (False, "/"),
    ],
)
def test_a_refusal_names_the_place(schema: Any, path: str) -> None:
    text = json.dumps(schema).replace("Infinity", "1e999")
    with pytest.raises(GrammarRefused) as refusal:
        schema_grammar(text)
    assert refusal.value.path == path
    assert isinstance(refusal.value, BadRequest)
    assert refusal.value.http_status == 400


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"type": "string"} x', "not JSON"),
        ('{"type": "string", "type": "null"}', "twice"),
        ('{"const": NaN}', "NaN"),
        ('{"const": "\\ud800"}', "surrogate"),
        ("\ufeff{}", "not JSON"),
        ("", "not JSON"),
        ("null", "a schema is"),
        ("[]", "a schema is"),
        ('{"a": ' + "[" * 100 + "]" * 100 + "}", "deeper"),
        ('{"$defs": {' + "[" * 100_000, "deeper"),
        ('{"title": "' + "x" * LIMITS.chars + '"}', "characters"),
        ('{"enum": [' + ",".join(map(str, range(6000))) + "]}", "values are more"),
        (json.dumps({"anyOf": [{"const": i} for i in range(300)]}), "branches"),
        (json.dumps({"properties": {f"p{i}": {} for i in range(600)}}), "names"),
    ],
)
def test_what_is_no_schema_or_too_large_is_refused_at_once(text: str, why: str) -> None:
    with pytest.raises(GrammarRefused, match=why):
        schema_grammar(text)


def test_a_long_chain_of_references_is_refused() -> None:
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3000)}
    with pytest.raises(GrammarRefused, match="nested too deeply"):
        schema_grammar({"$ref": "#/$defs/d0", "$defs": {**chain, "d3000": {}}})


def test_branches_that_multiply_are_refused() -> None:
    branches = [{"anyOf": [{"minLength": i + 1}, {"minimum": i}, {"maxItems": i}]} for i in range(30)]
    with pytest.raises(GrammarRefused, match="combinations"):
        schema_grammar({"allOf": branches})


def test_an_optional_member_that_nothing_meets_is_left_out() -> None:
    grammar = compiled(schema_grammar({"type": "object", "properties": {"a": False, "b": {"type": "null"}}}))
    assert accepts(grammar, '{"b": null}')
    assert accepts(grammar, "{}")
    assert not accepts(grammar, '{"a": 1}')


def test_members_come_in_the_schemas_order() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}, "required": ["a", "b"]}
    grammar = compiled(schema_grammar(schema))
    assert accepts(grammar, '{"b": 1, "a": 2}')
    assert not accepts(grammar, '{"a": 2, "b": 1}')


@pytest.mark.parametrize(
    ("whitespace", "allowed", "not_allowed"),
    [
        ("none", '{"a":[1,2]}', '{"a": [1,2]}'),
        ("compact", '{"a": [1, 2]}', '{"a":  [1, 2]}'),
        ("flexible", '{\n  "a" : [ 1,\n 2 ]\n}', '{"a":' + " " * 21 + "[1, 2]}"),
    ],
)
def test_white_space_is_bounded(whitespace: Any, allowed: str, not_allowed: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}}
    grammar = compiled(schema_grammar(schema, whitespace=whitespace))
    assert accepts(grammar, allowed)
    assert not accepts(grammar, not_allowed)


def test_numbers_keep_their_spelling() -> None:
    text = '{"enum": [1e2, 1.50, 123456789012345678901234567890]}'
    grammar = compiled(schema_grammar(text))
    assert all(accepts(grammar, one) for one in ("1e2", "1.50", "123456789012345678901234567890"))
    assert not any(accepts(grammar, one) for one in ("100", "1.5"))


def test_equal_texts_make_equal_keys() -> None:
    one = schema_grammar('{"type":"object","properties":{"b":{},"a":{}}}')
    same = schema_grammar('{ "properties" : {"b": {}, "\\u0061": {}}, "type":"object", "title": "x" }')
    other = schema_grammar('{"type":"object","properties":{"a":{},"b":{}}}')
    assert one == same
    assert one.digest == same.digest
    assert one.digest != other.digest
    assert type(one).from_wire(one.wire()) == one


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        (
            {"properties": {"a": {}}, "additionalProperties": False},
            ['{"b": 1}', '{"a": 1, "b": 2}'],
            ["{}", '{"a": 1}'],
        ),
        (
            {"additionalProperties": {"type": "integer"}},
            ['{"a": "x"}', '{"a": 1, "b": "x"}'],
            ["{}", '{"a": 1}'],
        ),
        (
            {"patternProperties": {"^a": {"type": "null"}}},
            ['{"ab": 1}', '{"b": 1, "ab": 1}'],
            ['{"ab": null}', "{}"],
        ),
        ({"propertyNames": {"maxLength": 1}}, ['{"ab": 1}', '{"a": 1, "ab": 1}'], ['{"a": 1}', "{}"]),
        ({"required": ["a"], "properties": {"a": {"minimum": 3}}}, ['{"a": 1}', "{}"], ['{"a": 3}']),
        ({"items": {"type": "integer"}}, ['["x"]', '[1, "x"]'], ["[]", "[1]"]),
        (
            {"enum": [1, "a", [1], {"a": 1}]},
            ["2", '"b"', "[2]", "{}", '{"a": 2}', "null"],
            ["1", '"a"', "[1]", '{"a": 1}'],
        ),
    ],
)
def test_what_a_schema_denies_is_exact(schema: Any, valid: list[str], invalid: list[str]) -> None:
    kinds = sorted({{"{": "object", "[": "array"}.get(text[0], "") for text in valid + invalid} - {""})
    grammar = compiled(
        schema_grammar({"not": schema} if len(kinds) > 1 else {"type": kinds[0], "not": schema})
    )
    assert [text for text in valid if not accepts(grammar, text)] == []
    assert [text for text in invalid if accepts(grammar, text)] == []


def test_a_member_that_must_be_wrong_comes_last_so_that_no_other_spelling_mends_it() -> None:
    grammar = compiled(
        schema_grammar({"type": "object", "not": {"additionalProperties": {"type": "integer"}}})
    )
    assert accepts(grammar, '{"a": 1, "a": "x"}')
    assert not accepts(grammar, '{"a": "x", "a": 1}')
