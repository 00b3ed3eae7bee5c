"""Every spelling of structured output reaches the rank as a compiled grammar, or is a 400 with its place."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.api.stage import says
from tests.grammar.http.stage import constrained

pytestmark = pytest.mark.anyio
CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/generate"
HELLO = [{"role": "user", "content": "Hello"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}},
    "required": ["name"],
    "additionalProperties": False,
}
ANSWER = '{"name": "Ada"}'
INNER = {"type": "json_schema", "json_schema": SCHEMA}
TAG = {
    "type": "structural_tag",
    "format": {"type": "tag", "begin": "<a>", "content": INNER, "end": "</a>"},
}
OPENAI = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
SPELLINGS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_object"}}, "json_object"),
    ({"response_format": OPENAI}, "json_schema"),
    ({"response_format": TAG}, "structural_tag"),
    ({"json_schema": SCHEMA}, "json_schema"),
    ({"json_schema": '{"type": "object"}'}, "json_schema"),
    ({"regex": "[a-z]{3}"}, "regex"),
    ({"ebnf": 'root ::= "a" | "b"'}, "ebnf"),
    ({"structural_tag": TAG}, "structural_tag"),
    ({"guided_json": SCHEMA}, "json_schema"),
    ({"guided_regex": "[0-9]+"}, "regex"),
    ({"guided_choice": ["yes", "no"]}, "choice"),
    ({"guided_grammar": 'root ::= "c"'}, "ebnf"),
    ({"structured_outputs": {"json": SCHEMA}}, "json_schema"),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, "choice"),
    ({"structured_outputs": {"json_object": True}}, "json_object"),
]


async def test_every_spelling_reaches_the_rank_on_both_openai_routes() -> None:
    async with constrained(says(ANSWER)) as found:
        for path, prompt in ((CHAT, {"messages": HELLO}), (TEXT, {"prompt": "x"})):
            for body, kind in SPELLINGS:
                found.entries.clear()
                answer = await found.made.post(path, {**prompt, **body, "max_tokens": 20})
                assert answer.status_code == 200, (body, answer.text)
                (key,) = found.keys
                assert (key.kind, found.entries[0].grammar_root) == (kind, "start"), body


async def test_the_native_route_has_a_grammar_for_each_prompt() -> None:
    params = [
        {"regex": "[a-z]+", "n": 2},
        {"json_schema": '{"type": "integer"}'},
        {},
        {"ebnf": 'root ::= "a"'},
        {"regex": "[a-z]+"},
    ]
    body = {"text": [f"p{i}" for i in range(5)], "sampling_params": params}
    async with constrained(says(ANSWER)) as found:
        assert (await found.made.post(NATIVE, body)).status_code == 200
        assert found.figure("num_so_requests_total") == 5
        assert found.figure("num_grammar_total") == 3  # Once a key, whoever shares it.
        assert [bool(entry.grammar) for entry in found.entries] == [True, True, True, False, True, True]
        del found.entries[3]
        assert [key.kind for key in found.keys] == ["regex", "regex", "json_schema", "ebnf", "regex"]


WRONG: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, {"response_format": {"type": "yaml"}}, "response_format", "/type"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "text"}}}},
     "response_format", "/json_schema/schema/type"),
    (CHAT, {"response_format": {**OPENAI, "json_schema": {**OPENAI["json_schema"], "strict": "yes"}}},
     "response_format", "/json_schema/strict"),
    (CHAT, {"json_schema": '{"a": 1, "a": 2}'}, "json_schema", "twice"),
    (TEXT, {"regex": "(a"}, "regex", ""),
    (TEXT, {"regex": "a(?=b)"}, "regex", ""),
    (TEXT, {"ebnf": "root ::= missing"}, "ebnf", "missing"),
    (TEXT, {"guided_choice": []}, "guided_choice", ""),
    (TEXT, {"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "2 kinds"),
    (TEXT, {"regex": "a", "ebnf": 'root ::= "a"'}, "ebnf", "only one"),
    (TEXT, {"regex": "a", "min_tokens": 3}, "min_tokens", "regex"),
    (NATIVE, {"sampling_params": {"regex": "(a"}}, "sampling_params.regex", ""),
    (NATIVE, {"sampling_params": {"regex": "a", "min_new_tokens": 1}}, "sampling_params.min_new_tokens", ""),
]  # fmt: skip


async def test_what_cannot_be_enforced_is_a_400_before_the_first_byte() -> None:
    prompts = {CHAT: {"messages": HELLO}, TEXT: {"prompt": "x"}, NATIVE: {"text": "x"}}
    async with constrained(says(ANSWER)) as found:
        for path, body, param, part in WRONG:
            for stream in (False, True):
                answer = await found.made.post(path, {**prompts[path], **body, "stream": stream})
                error = answer.json()["error"]
                assert (answer.status_code, error["param"]) == (400, param), (body, error)
                assert part in error["message"], error
        assert found.made.device.steps == []
        assert found.entries == []


async def test_a_key_twice_and_the_spelling_of_numbers_are_seen_in_a_decoded_schema() -> None:
    """A decoder that keeps the last key of two would hide the first from the gate."""
    async with constrained(says(ANSWER)) as found, found.made.client() as client:
        head = '{"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_schema", '
        twice = head + '"json_schema": {"schema": {"type": "object", "type": "string"}}}}'
        answer = await client.post(CHAT, content=twice.encode())
        assert answer.status_code == 400
        assert "twice" in answer.json()["error"]["message"]
        spelt = head + '"json_schema": {"schema": {"const": 1.50e1}}}}'
        assert (await client.post(CHAT, content=spelt.encode())).status_code == 200
        assert "1.50e1" in found.keys[-1].text
        tools = (
            '"tools": [{"type": "function", "function": {"name": "f", "strict": true, "parameters": %s}}]}'
        )
        schema = '{"type": "object", "properties": {"a": {"const": 2.50}}, "required": ["a"]}'
        body = '{"messages": [{"role": "user", "content": "x"}], ' + tools % schema
        assert (await client.post(CHAT, content=body.encode())).status_code == 200
        assert "2.50" in found.keys[-1].text


async def test_plain_text_asks_for_nothing() -> None:
    async with constrained(says("Hi")) as found:
        body = {"messages": HELLO, "response_format": {"type": "text"}, "regex": None}
        assert (await found.made.post(CHAT, body)).status_code == 200
        assert (found.entries[0].grammar, found.entries[0].grammar_key) == (b"", "")
        found.entries.clear()
        body = {"messages": HELLO, "response_format": {"type": "text"}, "regex": "a"}
        assert (await found.made.post(CHAT, body)).status_code == 200
        assert found.keys[-1].kind == "regex"


async def test_with_thinking_the_grammar_begins_behind_the_reasoning() -> None:
    async with constrained(says("Let me see.</think>" + ANSWER)) as found:
        thinking = {"chat_template_kwargs": {"thinking": True}}
        for body in ({"response_format": OPENAI}, {"regex": "a"}):
            answer = await found.made.post(CHAT, {"messages": HELLO, **thinking, **body})
            message = answer.json()["choices"][0]["message"]
            assert (message["reasoning_content"], message["content"]) == ("Let me see.", ANSWER)
        assert {entry.grammar_root for entry in found.entries} == {"after_think"}


async def test_the_model_is_shown_the_schema_as_its_chat_format_has_it() -> None:
    async with constrained(says(ANSWER)) as found:
        for body in ({"response_format": OPENAI}, {"json_schema": SCHEMA}):
            await found.made.post(CHAT, {"messages": HELLO, **body})
        shown, hidden = (_text(entry) for entry in found.entries)
    assert re.search(r'"maxLength": ?8', shown)
    assert "maxLength" not in hidden


def _text(entry: Any) -> str:
    import numpy as np

    from tests.api.stage import TOKENIZER

    return b"".join(TOKENIZER.token_bytes(i) for i in np.frombuffer(entry.prompt, np.int32).tolist()).decode()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"grammar_whitespace": "none"}, "none"),
        ({}, "compact"),
        ({"grammar_whitespace": "flexible"}, "flexible"),
        ({"constrained_json_disable_any_whitespace": True}, "none"),
    ],
)
async def test_white_space_is_the_servers_choice(flags: dict[str, Any], expected: str) -> None:
    async with constrained(says(ANSWER), **flags) as found:
        await found.made.post(TEXT, {"prompt": "x", "json_schema": SCHEMA})
    assert dict(found.keys[0].options)["whitespace"] == expected
