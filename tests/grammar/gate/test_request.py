"""Every spelling by which clients ask, and refusals that name the field as the client spelt it."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from engine.errors import BadRequest
from engine.grammar.gate import GatePolicy, GrammarRefused, parse_request
from engine.grammar.gate.layout import Whitespace
from engine.grammar.gate.schema import OBJECT_LEVELS
from engine.grammar.key import GrammarKey
from tests.grammar.gate.oracle import accepts, compiled

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
EBNF = 'root ::= "a" | "b"'
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": "<x>",
        "content": {"type": "json_schema", "json_schema": SCHEMA},
        "end": "</x>",
    },
}
OLD_TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<x>", "schema": SCHEMA, "end": "</x>"}],
    "triggers": ["<x"],
}

# (fields, kind, a text it allows, one it doesn't)
ASKED: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "json_object": ({"response_format": {"type": "json_object"}}, "json_object", '{"x": [1]}', "[1]"),
    "json_schema": (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
            }
        },
        "json_schema",
        '{"a": 1}',
        '{"a": "x"}',
    ),
    "not strict": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
        "json_schema",
        '{"a": 1}',
        "{}",
    ),
    "tag in response_format": (
        {"response_format": OLD_TAG},
        "structural_tag",
        'hi <x>{"a": 1}</x>',
        "<x>1</x>",
    ),
    "schema text": ({"json_schema": json.dumps(SCHEMA)}, "json_schema", '{"a": 1}', "{}"),
    "any schema": ({"json_schema": "$$ANY$$"}, "json_object", '{"b": 1}', "1"),
    "regex": ({"regex": "[0-9]+"}, "regex", "12", "1x"),
    "ebnf": ({"ebnf": EBNF}, "ebnf", "a", "c"),
    "tag": ({"structural_tag": json.dumps(TAG)}, "structural_tag", '<x>{"a": 1}</x>', '<x>{"a": "1"}</x>'),
    "guided_json": ({"guided_json": SCHEMA}, "json_schema", '{"a": 1}', "{}"),
    "guided_regex": ({"guided_regex": "a|b"}, "regex", "b", "ab"),
    "guided_choice": ({"guided_choice": ["yes", "no"]}, "choice", "no", "maybe"),
    "guided_grammar": ({"guided_grammar": EBNF}, "ebnf", "b", ""),
    "structured json": ({"structured_outputs": {"json": SCHEMA}}, "json_schema", '{"a": 1}', "{}"),
    "structured choice": ({"structured_outputs": {"choice": ["yes"]}}, "choice", "yes", "no"),
    "structured object": ({"structured_outputs": {"json_object": True}}, "json_object", "{}", "1"),
    "no space": (
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
        "json_schema",
        '{"a":1}',
        '{"a": 1}',
    ),
}


@pytest.mark.parametrize("name", sorted(ASKED))
def test_every_spelling_is_understood(name: str) -> None:
    fields, kind, yes, no = ASKED[name]
    key = parse_request(fields)
    assert key is not None
    assert key.kind == kind
    assert GrammarKey.from_wire(key.wire()) == key
    grammar = compiled(key)
    assert accepts(grammar, yes)
    assert not accepts(grammar, no)


@pytest.mark.parametrize("whitespace", ["none", "compact", "flexible"])
def test_json_mode_ends_at_its_deepest_level(whitespace: Whitespace) -> None:
    key = parse_request({"response_format": {"type": "json_object"}}, GatePolicy(whitespace=whitespace))
    assert key is not None
    grammar = compiled(key)
    for opens, closes in (("[", "]"), ('{"a":', "}"), ('{"a":[', "]}")):
        size = len(opens.replace('"a":', ""))
        for levels in range(2, OBJECT_LEVELS + 3):
            text = opens * ((levels - 1) // size) + "1" + closes * ((levels - 1) // size)
            depth = 1 + (levels - 1) // size * size
            assert accepts(grammar, '{"x":' + text + "}") == (depth <= OBJECT_LEVELS), depth
            if depth == OBJECT_LEVELS:
                assert not accepts(grammar, '{"x":' + text.replace("1", "{}") + "}")


@pytest.mark.parametrize(
    "fields", [{}, {"response_format": None}, {"response_format": {"type": "text"}}, {"stop": "x"}]
)
def test_no_wish_is_no_key(fields: dict[str, Any]) -> None:
    assert parse_request(fields) is None


@pytest.mark.parametrize(
    ("fields", "param", "path"),
    [
        ({"regex": "a", "ebnf": EBNF}, "ebnf", ""),
        ({"response_format": {"type": "json_object"}, "guided_choice": ["a"]}, "guided_choice", ""),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", ""),
        ({"structured_outputs": {}}, "structured_outputs", ""),
        (
            {"structured_outputs": {"whitespace_pattern": " *", "json": SCHEMA}},
            "structured_outputs",
            "/whitespace_pattern",
        ),
        ({"response_format": {"type": "xml"}}, "response_format", "/type"),
        ({"structural_tag": {"format": {"type": ["or"]}}}, "structural_tag", "/format/type"),
        ({"response_format": "json"}, "response_format", "/type"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "/json_schema/schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"format": "x"}}}},
            "response_format",
            "/json_schema/schema/format",
        ),
        (
            {"structured_outputs": {"json": {"items": {"type": "x"}}}},
            "structured_outputs",
            "/json/items/type",
        ),
        ({"guided_json": '{"type": "x"}'}, "guided_json", "/type"),
        ({"guided_choice": ["a", ""]}, "guided_choice", "/1"),
        ({"regex": 5}, "regex", ""),
        (
            {"structural_tag": {"type": "structural_tag", "format": {"type": "token", "token": 5}}},
            "structural_tag",
            "/format/type",
        ),
        (
            {"structural_tag": {"format": {"type": "any_text", "max_tokens": 5}}},
            "structural_tag",
            "/format/max_tokens",
        ),
        (
            {"structural_tag": {**OLD_TAG, "structures": [{"begin": "<y>", "schema": {}, "end": "</y>"}]}},
            "structural_tag",
            "/tags/0/begin",
        ),
    ],
)
def test_a_refusal_names_field_and_place(fields: dict[str, Any], param: str, path: str) -> None:
    with pytest.raises(GrammarRefused) as refusal:
        parse_request(fields, prefix="sampling_params.")
    assert isinstance(refusal.value, BadRequest)
    assert (refusal.value.param, refusal.value.path) == (f"sampling_params.{param}", path)
    assert f"sampling_params.{param}" in str(refusal.value)


def test_the_server_chooses_white_space_and_open_objects() -> None:
    loose = parse_request({"guided_json": SCHEMA}, GatePolicy(whitespace="flexible", open_objects=True))
    assert loose is not None
    assert accepts(compiled(loose), '{ "a" : 1, "b" : 2 }')
    tight = parse_request({"guided_json": SCHEMA})
    assert tight is not None
    assert not accepts(compiled(tight), '{"a": 1, "b": 2}')


def test_the_work_of_one_request_is_bounded() -> None:
    names = {f"p{i}": {"type": "integer", "multipleOf": 600 + i} for i in range(400)}
    with pytest.raises(GrammarRefused, match="automata of more than"):
        parse_request({"guided_json": {"type": "object", "properties": names}})


SLOW = (
    '\\d(?:\\s|(?:(?:\\D+[^\\s"]{2}\\S+|x?b{1,3}?c[^a]*$)*?(^c*\\n+)*(?:|.[\\]^][^\\s"][\\]^]{0,2}$|\\Wé)'
    "{0,2}||^\\S)+?[abc]\\.+?((?:[a-c]+b[a-c]*\\D{1,}){1,}\\d){0,2}|-{0,2}0+?)+?(c\\d)|ab{1,}\\n{1,}(?:(?:"
    "\\w*?\\\\+?(😀?$){1,}(?:0\\u0061{0,2}[a-c]*?){1,}|\\W{0,2}\\w{1,}c{2}|-{1,}){0,2}|^(?:1{1,3}?)*|[abc]{1,3}?()*)?"
)
"""Sets of hundreds of states: 10 s where each was united anew and counted as one step of work."""


def test_the_size_of_sets_of_states_counts_as_work() -> None:
    began_s = time.thread_time()
    with pytest.raises(GrammarRefused, match="automata of more than"):
        parse_request({"guided_json": {"type": "string", "pattern": SLOW}})
    assert time.thread_time() - began_s < 4.0
