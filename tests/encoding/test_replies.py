"""Reasoning, content and calls of a reply: exact, the same in any chunking, and never with markup in them."""

import json
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.model.dsml import Reply, ReplyParser, TextSplitter, ToolCall, parse_reply
from engine.model.encoding import load_encoding
from engine.model.segments import Segment
from engine.model.tokenizer import SegmentStream, load_tokenizer

NANO = Path(__file__).parents[2] / "engine" / "assets" / "nano"
ENCODING = load_encoding(NANO)
STRINGS = ENCODING.strings
TOKENIZER = load_tokenizer(NANO)
D, E, NT = "｜DSML｜", "<｜end▁of▁sentence｜>", "</think>"
OPEN, CLOSE = f"\n\n<{D}tool_calls>\n", f"</{D}tool_calls>"


def invoke(name: str, *parameters: tuple[str, str, str]) -> str:
    lines = [f'<{D}parameter name="{k}" string="{s}">{v}</{D}parameter>\n' for k, s, v in parameters]
    return f'<{D}invoke name="{name}">\n{"".join(lines)}</{D}invoke>\n'


def parse(text: str, thinking: bool = False) -> Reply:
    return parse_reply(text, STRINGS, thinking=thinking)


def streamed(text: str, edges: Iterable[int], thinking: bool) -> Reply:
    splitter, parser, reply = TextSplitter(STRINGS), ReplyParser(STRINGS, thinking=thinking), Reply()
    for a, b in pairwise(sorted({0, len(text), *(min(edge, len(text)) for edge in edges)})):
        reply.add(parser.feed(splitter.feed(text[a:b])))
    reply.add(parser.feed(splitter.finish()))
    reply.add(parser.finish())
    return reply


PIECES = st.sampled_from(
    [
        *("<", "</", ">", "\n", "\n\n", " ", "a", "é", "tool_calls>", "invoke", "parameter", "{}", "1", '"'),
        *(D, D[:3], D[3:], NT, "<think>", "</thi", "nk>", E, "<｜User｜>", "<｜"),
        *(OPEN, CLOSE, f"</{D}invoke>\n", f"</{D}parameter>\n", f'<{D}invoke name="f">\n'),
        *(f'<{D}parameter name="k" string="true">', f'<{D}parameter name="j" string="false">'),
        *(invoke("f", ("k", "true", "v")), invoke("g"), invoke("h", ("n", "false", "[1]"))),
    ]
)
WILD = st.lists(PIECES, max_size=14).map("".join)
SEVERAL = st.lists(st.integers(0, 400), max_size=30)


@given(text=WILD, edges=SEVERAL, thinking=st.booleans())
def test_any_chunking_gives_the_reply_of_the_whole_text(text: str, edges: list[int], thinking: bool) -> None:
    assert streamed(text, edges, thinking) == parse(text, thinking)
    assert streamed(text, range(len(text)), thinking) == parse(text, thinking)


@given(text=WILD, thinking=st.booleans())
def test_token_ids_give_the_reply_of_their_text(text: str, thinking: bool) -> None:
    stream, parser, reply = (
        SegmentStream(TOKENIZER, STRINGS.specials),
        ReplyParser(STRINGS, thinking=thinking),
        Reply(),
    )
    for token in TOKENIZER.encode(text):
        reply.add(parser.feed(stream.feed([token])))
    reply.add(parser.feed(stream.finish()))
    reply.add(parser.finish())
    assert reply == parse(text, thinking)


@given(text=WILD, thinking=st.booleans())
def test_markup_is_never_content(text: str, thinking: bool) -> None:
    reply = parse(text, thinking)
    for shown in (reply.content, reply.reasoning):
        assert not any(special in shown for special in (D, NT, "<think>", E))


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="｜"), max_size=12).filter(
    lambda text: "think>" not in text
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-999, 999) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
NAMES = st.text(st.characters(categories=["Ll", "Nd"]), min_size=1, max_size=6)
ARGUMENTS = st.dictionaries(NAMES, VALUES, max_size=4)


@given(
    content=TEXT,
    reasoning=TEXT,
    calls=st.lists(st.tuples(NAMES, ARGUMENTS), max_size=3),
    thinking=st.booleans(),
)
def test_what_the_encoder_writes_is_read_back(
    content: str, reasoning: str, calls: list[tuple[str, dict[str, Any]]], thinking: bool
) -> None:
    message = {
        "role": "assistant",
        "content": content,
        "reasoning_content": reasoning,
        "tool_calls": [{"function": {"name": name, "arguments": arguments}} for name, arguments in calls],
    }
    segments = ENCODING.answer_segments(message, thinking=thinking)
    parser = ReplyParser(STRINGS, thinking=thinking)
    reply = parser.feed(segments)
    reply.add(parser.finish())
    assert reply.content == content
    assert reply.reasoning == (reasoning if thinking else "")
    assert [(call.name, json.loads(call.arguments)) for call in reply.calls] == calls
    assert reply.dropped == []


def test_text_that_looks_like_markup_is_content_when_ids_say_so() -> None:
    segments: list[Segment] = [("see ", False), (f"<{D}tool_calls> {NT}", False), (E, True), ("more", False)]
    assert ReplyParser(STRINGS, thinking=False).feed(segments).content == f"see <{D}tool_calls> {NT}"


def test_reasoning_that_never_ends_is_all_reasoning() -> None:
    assert parse("<think>so far\n", thinking=True) == Reply(reasoning="so far\n")


def test_a_block_ends_unclosed_reasoning() -> None:
    reply = parse(f"r{OPEN}{invoke('f')}{CLOSE}{E}", thinking=True)
    assert reply == Reply(reasoning="r", calls=[ToolCall("f", "{}")])


def test_the_blank_line_before_a_block_is_not_content_and_others_are() -> None:
    assert parse(f"a\n{OPEN}{invoke('f')}{CLOSE}").content == "a\n"
    assert parse(f"{OPEN}{invoke('f')}{CLOSE}").content == ""
    assert parse("a\n\n").content == "a\n\n"
    assert parse("a <").content == "a <"


def test_an_end_that_may_open_a_block_is_held_back() -> None:
    splitter, parser = TextSplitter(STRINGS), ReplyParser(STRINGS, thinking=False)
    shown = [parser.feed(splitter.feed(piece)).content for piece in ("a", "\n\n", "<", "b", " <｜", "D")]
    assert shown == ["a", "", "", "\n\n<b", " ", ""]


def test_a_call_is_emitted_when_its_tag_closes() -> None:
    splitter, parser = TextSplitter(STRINGS), ReplyParser(STRINGS, thinking=False)
    head, tail = invoke("f", ("k", "true", "v")).split("voke>\n")
    assert parser.feed(splitter.feed(OPEN + head)).calls == []
    assert parser.feed(splitter.feed("voke>" + tail)).calls == [ToolCall("f", '{"k": "v"}')]


@pytest.mark.parametrize(
    ("body", "calls"),
    [
        (invoke("f", ("a", "true", " 1\n"), ("b", "false", " 1 ")), [("f", '{"a": " 1\\n", "b": 1}')]),
        (invoke("f", ("a", "false", "[1,")), [("f", '{"a": "[1,"}')]),
        (invoke("f", ("a", "false", "NaN")), [("f", '{"a": "NaN"}')]),
        (f'<{D}invoke name="f"/>\n', [("f", "{}")]),
        (f'<{D}invoke name="f">{{"a": [1]}}</{D}invoke>', [("f", '{"a": [1]}')]),
        (f'<{D}invoke name="f">\n\n</{D}invoke>\n{invoke("g")}', [("f", "{}"), ("g", "{}")]),
    ],
)
def test_variants_of_calls(body: str, calls: list[tuple[str, str]]) -> None:
    wanted = Reply(content="a", calls=[ToolCall(*call) for call in calls])
    assert parse(f"a{OPEN}{body}{CLOSE}{E}") == wanted
    assert parse(f"a\n\n{body}") == wanted


@pytest.mark.parametrize(
    "body",
    [
        invoke("f", ("a", "true", "1"), ("a", "true", "2")),
        f'<{D}invoke name="f">\n<{D}parameter name="a">1</{D}parameter>\n</{D}invoke>\n',
        f'<{D}invoke name="f">\n<{D}parameter name="a" string="true">1</{D}invoke>\n',
        f'<{D}invoke name="f">text</{D}invoke>\n',
        f'<{D}invoke name="f">\n',
        f'<{D}invoke name="">\n</{D}invoke>\n',
        f"<{D}call>\n",
        f"{D}",
    ],
)
def test_a_malformed_call_is_dropped_alone_and_reported(body: str) -> None:
    reply = parse(f"a{OPEN}{invoke('g')}{body}{invoke('h')}{CLOSE}{E}")
    assert reply.content == "a"
    assert [call.name for call in reply.calls] == ["g", "h"]
    assert len(reply.dropped) == (0 if body == D else 1)


def test_a_call_cut_by_the_length_limit_is_dropped() -> None:
    reply = parse(f"a{OPEN}" + invoke("f", ("a", "true", "1"))[:-5])
    assert (reply.content, reply.calls, len(reply.dropped)) == ("a", [], 1)
