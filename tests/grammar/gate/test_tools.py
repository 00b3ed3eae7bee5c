"""Tool calls in the shipped model's markup: token by token with its tokenizer, read by its parser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import xgrammar as xgr

from engine.grammar.gate import GrammarRefused, Markup, Tool, schema_grammar, tool_call_grammar
from engine.grammar.key import GrammarKey
from engine.grammar.tokenizer_info import vocabulary_of
from engine.model.dsml import parse_reply
from engine.model.prompt_strings import PromptStrings, load_strings
from engine.model.tokenizer import Tokenizer, load_tokenizer
from tests.grammar.gate.markup import call_segments

NANO = Path(__file__).parents[3] / "engine" / "assets" / "nano"

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "units": {"enum": ["C", "F", None]},
        "where": {"type": "object", "properties": {"lat": {"type": "number"}}, "required": ["lat"]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(NANO)


@pytest.fixture(scope="module")
def strings() -> PromptStrings:
    return load_strings(NANO)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> xgr.GrammarCompiler:
    stop, marker = (tokenizer.token_id(one) for one in ("<｜end▁of▁sentence｜>", "｜DSML｜"))
    vocabulary = vocabulary_of(tokenizer, tokenizer.vocab_size, [stop], [marker])
    info = xgr.TokenizerInfo(
        list(vocabulary.tokens),
        xgr.VocabType.RAW,
        vocab_size=vocabulary.size,
        stop_token_ids=list(vocabulary.stop_ids),
    )
    return xgr.GrammarCompiler(info, max_threads=1)


def allowed(compiler: xgr.GrammarCompiler, key: GrammarKey, ids: list[int]) -> bool:
    """Whether the masks let every id through, and the text may end after them."""
    grammar = compiler.compile_grammar(key.text)
    matcher = xgr.GrammarMatcher(grammar)
    mask = xgr.allocate_token_bitmask(1, grammar.tokenizer_info.vocab_size)
    for token in ids:
        matcher.fill_next_token_bitmask(mask, 0)
        if not (int(mask[0, token // 32]) >> (token % 32)) & 1 or not matcher.accept_token(token):
            return False
    return bool(matcher.is_completed())


def markup(tokenizer: Tokenizer, strings: PromptStrings) -> Markup:
    return Markup(strings, tokenizer.token_id(strings.tokens["dsml"]))


CALLS: list[tuple[str, dict[str, Any], bool]] = [
    ("weather", {"city": "Oslo", "days": 3}, True),
    ("weather", {"city": 'a "b" <c> </x>\n{', "days": 1, "units": None, "where": {"lat": 1.5}}, True),
    ("weather", {"city": "Oslo", "days": 9, "units": "C"}, True),
    ("weather", {"city": "Oslo"}, False),
    ("weather", {"city": "Oslo", "days": 10}, False),
    ("weather", {"city": "", "days": 1}, False),
    ("weather", {"city": "Oslo", "days": "3"}, False),
    ("weather", {"city": "Oslo", "days": 3, "more": 1}, False),
    ("weather", {"city": "Oslo", "days": 3, "where": {}}, False),
    ("other", {"city": "Oslo", "days": 3}, False),
]


@pytest.mark.parametrize(("name", "arguments", "wanted"), CALLS)
def test_a_strict_call_follows_its_schema(
    name: str,
    arguments: dict[str, Any],
    wanted: bool,
    tokenizer: Tokenizer,
    strings: PromptStrings,
    compiler: xgr.GrammarCompiler,
) -> None:
    key = tool_call_grammar([Tool("weather", WEATHER, True)], markup(tokenizer, strings), required=True)
    segments = call_segments(strings, [(name, arguments)])
    assert allowed(compiler, key, tokenizer.encode_segments(segments)) == wanted
    if wanted:
        reply = parse_reply("".join(text for text, _ in segments), strings, thinking=False)
        assert [(call.name, json.loads(call.arguments)) for call in reply.calls] == [(name, arguments)]


def test_any_call_of_a_free_tool_and_only_its_name(
    tokenizer: Tokenizer, strings: PromptStrings, compiler: xgr.GrammarCompiler
) -> None:
    key = tool_call_grammar([Tool("find", None, False)], markup(tokenizer, strings), required=True)
    for arguments in ({}, {"q": "x"}, {"n": 1, "deep": {"a": [1, None]}, "q": "two\nlines"}):
        ids = tokenizer.encode_segments(call_segments(strings, [("find", arguments)]))
        assert allowed(compiler, key, ids)
    assert not allowed(compiler, key, tokenizer.encode_segments(call_segments(strings, [("drop", {})])))


def test_several_calls_only_where_they_may_be_parallel(
    tokenizer: Tokenizer, strings: PromptStrings, compiler: xgr.GrammarCompiler
) -> None:
    ids = tokenizer.encode_segments(call_segments(strings, [("a", {}), ("b", {})]))
    tools = [Tool("a", None, False), Tool("b", None, False)]
    for parallel in (True, False):
        key = tool_call_grammar(tools, markup(tokenizer, strings), required=True, parallel=parallel)
        assert allowed(compiler, key, ids) == parallel


def test_text_alone_is_no_answer_where_a_call_is_required(
    tokenizer: Tokenizer, strings: PromptStrings, compiler: xgr.GrammarCompiler
) -> None:
    tools = [Tool("weather", WEATHER, True)]
    text = tokenizer.encode_plain("It is <b>cold</b> there.")
    call = tokenizer.encode_segments(call_segments(strings, [("weather", {"city": "Oslo", "days": 3})]))
    wrong = tokenizer.encode_segments(call_segments(strings, [("weather", {"city": "Oslo"})]))
    required = tool_call_grammar(tools, markup(tokenizer, strings), required=True)
    free = tool_call_grammar(tools, markup(tokenizer, strings), required=False)
    assert not allowed(compiler, required, text)
    assert allowed(compiler, free, text)
    assert allowed(compiler, free, text + call)
    assert not allowed(compiler, free, text + wrong)


def test_the_marker_is_a_token_and_its_spelling_is_only_text(
    tokenizer: Tokenizer, strings: PromptStrings, compiler: xgr.GrammarCompiler
) -> None:
    key = tool_call_grammar([Tool("weather", WEATHER, True)], markup(tokenizer, strings), required=True)
    segments = call_segments(strings, [("weather", {"city": "Oslo", "days": 3})])
    spelt = tokenizer.encode_plain("".join(text for text, _ in segments))
    assert not allowed(compiler, key, spelt)
    quoted = call_segments(strings, [("weather", {"city": "say ｜DSML｜ twice", "days": 3})])
    assert allowed(compiler, key, tokenizer.encode_segments(quoted))


def test_no_special_token_is_allowed_inside_a_string(
    tokenizer: Tokenizer, compiler: xgr.GrammarCompiler
) -> None:
    matcher = xgr.GrammarMatcher(compiler.compile_grammar(schema_grammar({"type": "string"}).text))
    mask = xgr.allocate_token_bitmask(1, tokenizer.vocab_size)
    for token in tokenizer.encode_plain('"a'):
        assert matcher.accept_token(token)
    matcher.fill_next_token_bitmask(mask, 0)
    controls = tokenizer.control_ids.values()
    assert len(controls) > 10
    assert not any((int(mask[0, token // 32]) >> (token % 32)) & 1 for token in controls)


@pytest.mark.parametrize(
    ("tool", "path"),
    [
        (Tool("bad name", None, False, "/tools/0"), "/tools/0"),
        (Tool("f", {"type": "array"}, True, "/tools/0/function/parameters"), "/tools/0/function/parameters"),
        (Tool("f", {"properties": {"a": {"format": "x"}}}, True, "/p"), "/p/properties/a/format"),
        (Tool("f", {"type": "object", "properties": {'a"b': {}}}, True, "/p"), "/p/properties"),
        (
            Tool("f", {"type": "object", "properties": {"a": {}}, "additionalProperties": True}, True, "/p"),
            "/p/additionalProperties",
        ),
    ],
)
def test_a_tool_that_cant_be_enforced_is_refused_by_its_place(
    tool: Tool, path: str, tokenizer: Tokenizer, strings: PromptStrings
) -> None:
    with pytest.raises(GrammarRefused) as refusal:
        tool_call_grammar([tool], markup(tokenizer, strings), required=True)
    assert refusal.value.path == path
