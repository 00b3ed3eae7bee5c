"""Golden prompts, written by hand, for every rule of the chat format."""

from typing import Any

import pytest

from engine.errors import BadRequest
from engine.model.encoding import Encoding

B, E, U, A = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
T, NT, D = "<think>", "</think>", "｜DSML｜"


def system(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "system", "content": text, **more}


def user(text: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": text, **more}


def assistant(text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def result(call_id: str, text: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def call(name: str, arguments: Any, call_id: str = "") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "title": "é"}}}


TALK = [
    system("S"),
    user("q1"),
    assistant("a1", reasoning_content="r1"),
    user("q2"),
]


def test_chat_prompt_ends_with_a_closed_think(encoding: Encoding) -> None:
    assert encoding.render([system("S"), user("q")]) == f"{B}S{U}q{A}{NT}"
    assert encoding.render([user("q")]) == f"{B}{U}q{A}{NT}"


def test_thinking_prompt_ends_with_an_open_think(encoding: Encoding) -> None:
    assert encoding.render([system("S"), user("q")], thinking=True) == f"{B}S{U}q{A}{T}"


def test_turns_stand_without_separators(encoding: Encoding) -> None:
    assert encoding.render(TALK) == f"{B}S{U}q1{A}{NT}a1{E}{U}q2{A}{NT}"


def test_earlier_reasoning_is_dropped(encoding: Encoding) -> None:
    assert encoding.render(TALK, thinking=True) == f"{B}S{U}q1{A}{NT}a1{E}{U}q2{A}{T}"


def test_reasoning_is_kept_where_dropping_is_off(encoding: Encoding) -> None:
    wanted = f"{B}S{U}q1{A}{T}r1{NT}a1{E}{U}q2{A}{T}"
    assert encoding.render(TALK, thinking=True, drop_thinking=False) == wanted


def test_reasoning_after_the_last_user_is_kept(encoding: Encoding) -> None:
    talk = [*TALK, assistant("a2", reasoning_content="r2")]
    wanted = f"{B}S{U}q1{A}{NT}a1{E}{U}q2{A}{T}r2{NT}a2{E}"
    assert encoding.render(talk, thinking=True) == wanted


def test_chat_mode_never_shows_reasoning(encoding: Encoding) -> None:
    talk = [*TALK, assistant("a2", reasoning_content="r2")]
    wanted = f"{B}S{U}q1{A}{NT}a1{E}{U}q2{A}{NT}a2{E}"
    assert encoding.render(talk, drop_thinking=False) == wanted


def test_tools_switch_dropping_off(encoding: Encoding) -> None:
    schema = '{"name": "f", "parameters": {"type": "object", "title": "é"}}'
    wanted = f"{B}S\n\n## Tools {D} {T}\n{schema}\nEND\n{U}q1{A}{T}r1{NT}a1{E}{U}q2{A}{T}"
    assert encoding.render(TALK, thinking=True, tools=[tool("f")]) == wanted
    with_own = [system("S", tools=[tool("f")]), *TALK[1:]]
    assert encoding.render(with_own, thinking=True) == wanted


def test_tools_without_a_system_message_make_an_empty_one(encoding: Encoding) -> None:
    one = '{"name": "f", "parameters": {"type": "object", "title": "é"}}'
    two = one.replace('"f"', '"g"')
    wanted = f"{B}\n\n## Tools {D} {T}\n{one}\n{two}\nEND\n{U}q{A}{NT}"
    assert encoding.render([user("q")], tools=[tool("f"), tool("g")]) == wanted


def test_schema_follows_the_system_text_and_the_tools(encoding: Encoding) -> None:
    schema = {"b": {"type": "string"}, "a": 1}
    wanted_format = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    text = '## Format\n{"b": {"type": "string"}, "a": 1}'
    assert (
        encoding.render([system("S"), user("q")], response_format=wanted_format)
        == f"{B}S\n\n{text}{U}q{A}{NT}"
    )
    both = encoding.render([user("q")], response_format=wanted_format, tools=[tool("f")])
    assert both.endswith(f"END\n\n\n{text}{U}q{A}{NT}")


def test_json_object_asks_for_an_object_and_text_for_nothing(encoding: Encoding) -> None:
    asked = encoding.render([user("q")], response_format={"type": "json_object"})
    assert asked == f'{B}\n\n## Format\n{{"type": "object"}}{U}q{A}{NT}'
    assert encoding.render([user("q")], response_format={"type": "text"}) == f"{B}{U}q{A}{NT}"


@pytest.mark.parametrize(
    ("effort", "prefix"), [(None, ""), ("low", ""), ("high", "HARD\n\n"), ("max", "HARDEST\n\n")]
)
def test_effort_prefix_stands_before_the_system_text_in_thinking_only(
    encoding: Encoding, effort: str | None, prefix: str
) -> None:
    talk = [system("S"), user("q")]
    assert encoding.render(talk, thinking=True, reasoning_effort=effort) == f"{B}{prefix}S{U}q{A}{T}"
    assert encoding.render(talk, reasoning_effort=effort) == f"{B}S{U}q{A}{NT}"


def test_calls_follow_the_content_after_a_blank_line(encoding: Encoding) -> None:
    calls = [call("f", '{"s": "a\\n\\"b\\"", "n": [1, {"k": "é"}], "t": true}'), call("g", "{}")]
    block = (
        f"\n\n<{D}tool_calls>\n"
        f'<{D}invoke name="f">\n'
        f'<{D}parameter name="s" string="true">a\n"b"</{D}parameter>\n'
        f'<{D}parameter name="n" string="false">[1, {{"k": "é"}}]</{D}parameter>\n'
        f'<{D}parameter name="t" string="false">true</{D}parameter>\n'
        f"</{D}invoke>\n"
        f'<{D}invoke name="g">\n'
        f"\n"
        f"</{D}invoke>\n"
        f"</{D}tool_calls>"
    )
    talk = [user("q"), assistant("a", tool_calls=calls)]
    assert encoding.render(talk) == f"{B}{U}q{A}{NT}a{block}{E}"
    talk = [user("q"), assistant(None, tool_calls=calls, reasoning_content="r")]
    assert encoding.render(talk, thinking=True) == f"{B}{U}q{A}{T}r{NT}{block}{E}"


def arguments_of(encoding: Encoding, arguments: Any) -> str:
    text = encoding.render([user("q"), assistant(None, tool_calls=[call("f", arguments)])])
    return text.split(f'<{D}invoke name="f">\n')[1].split(f"\n</{D}invoke>")[0]


@pytest.mark.parametrize(
    ("arguments", "key", "kind", "value"),
    [
        ({"a": 1}, "a", "false", "1"),
        ('{"a": "x"}', "a", "true", "x"),
        ('{"a": 1}{"b": 2}', "a", "false", "1"),
        (' {"a": 1} and so on', "a", "false", "1"),
        ('{"a": ', "arguments", "true", '{"a": '),
        ('{"a": NaN}', "arguments", "true", '{"a": NaN}'),
        ("[1, 2]", "arguments", "true", "[1, 2]"),
        ([1, 2], "arguments", "false", "[1, 2]"),
    ],
)
def test_arguments_of_old_calls_are_salvaged(
    encoding: Encoding, arguments: Any, key: str, kind: str, value: str
) -> None:
    wanted = f'<{D}parameter name="{key}" string="{kind}">{value}</{D}parameter>'
    assert arguments_of(encoding, arguments) == wanted


@pytest.mark.parametrize("arguments", [None, "", "{}", {}])
def test_a_call_without_arguments_has_no_parameter(encoding: Encoding, arguments: Any) -> None:
    assert arguments_of(encoding, arguments) == ""


def test_results_share_one_user_turn_in_the_order_of_the_calls(encoding: Encoding) -> None:
    talk = [
        user("q"),
        assistant("", tool_calls=[call("f", "{}", "1"), call("g", "{}", "2")]),
        result("2", "two"),
        result("1", [{"type": "text", "text": "one"}]),
        user("and?"),
    ]
    wanted = f"{U}<tool_result>one</tool_result>\n\n<tool_result>two</tool_result>\n\nand?{A}{NT}"
    assert encoding.render(talk).endswith(f"{E}{wanted}")


def test_neighbouring_user_messages_are_one_turn(encoding: Encoding) -> None:
    parts = [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]
    assert encoding.render([user("a"), user(parts)]) == f"{B}{U}a\n\nb\n\nc{A}{NT}"


def test_reminder_has_its_token_and_follows_an_opened_answer(encoding: Encoding) -> None:
    talk = [user("q"), {"role": "latest_reminder", "content": "now"}]
    assert encoding.render(talk) == f"{B}{U}q{A}{NT}<｜latest_reminder｜>now"
    talk = [{"role": "latest_reminder", "content": "now"}, user("q")]
    assert encoding.render(talk) == f"{B}<｜latest_reminder｜>now{U}q{A}{NT}"


def test_developer_is_like_user_and_goes_before_the_last_user_turn(encoding: Encoding) -> None:
    talk = [{"role": "developer", "content": "d"}, assistant("a"), user("q")]
    assert encoding.render(talk) == f"{B}{U}d{A}{NT}a{E}{U}q{A}{NT}"
    assert encoding.render(talk, thinking=True) == f"{B}a{E}{U}q{A}{T}"


def test_tasks(encoding: Encoding) -> None:
    assert encoding.render([user("q", task="action")], thinking=True) == f"{B}{U}q{A}{T}<｜action｜>"
    assert encoding.render([user("q", task="query")], thinking=True) == f"{B}{U}q<｜query｜>"
    titled = [user("q"), assistant("a", task="title")]
    assert encoding.render(titled) == f"{B}{U}q{A}{NT}a{E}<｜title｜>"
    with_result = [user("q", task="query"), result("1", "r"), user("w")]
    assert encoding.render(with_result) == f"{B}{U}q\n\n<tool_result>r</tool_result>{U}w{A}{NT}"
    answered = [user("q", task="query"), assistant("w", reasoning_content="r")]
    assert encoding.render(answered, thinking=True) == f"{B}{U}q<｜query｜>w{E}"


def test_an_answer_to_go_on_with_has_no_end(encoding: Encoding) -> None:
    assert encoding.render([user("q"), assistant("a", wo_eos=True)]) == f"{B}{U}q{A}{NT}a"


@pytest.mark.parametrize("thinking", [False, True])
def test_prompt_and_answer_make_the_whole_conversation(encoding: Encoding, thinking: bool) -> None:
    answer = assistant("a", reasoning_content="r", tool_calls=[call("f", '{"x": 1}')])
    apart = encoding.segments(TALK, thinking=thinking) + encoding.answer_segments(answer, thinking=thinking)
    assert apart == encoding.segments([*TALK, answer], thinking=thinking)


@pytest.mark.parametrize(
    ("messages", "options", "param"),
    [
        ([], {}, "messages"),
        ("hi", {}, "messages"),
        (["hi"], {}, "messages[0]"),
        ([{"content": "x"}], {}, "messages[0].role"),
        ([user("a"), {"role": "robot", "content": "x"}], {}, "messages[1].role"),
        ([user(None)], {}, "messages[0].content"),
        ([user([{"type": "image_url"}])], {}, "messages[0].content[0].type"),
        ([user([{"type": "text"}])], {}, "messages[0].content[0].text"),
        ([assistant("a", tool_calls=[{}])], {}, "messages[0].tool_calls[0].function"),
        ([assistant("a", reasoning_content=3)], {}, "messages[0].reasoning_content"),
        ([{"role": "developer", "content": ""}], {}, "messages[0].content"),
        ([{"role": "tool", "tool_call_id": 4, "content": ""}], {}, "messages[0].tool_call_id"),
        ([user("a", task="dance")], {}, "messages.task"),
        ([user("a")], {"tools": [{"type": "function"}]}, "tools[0].function"),
        ([user("a")], {"tools": [{"function": {"name": ""}}]}, "tools[0].function.name"),
        ([user("a")], {"reasoning_effort": "huge"}, "reasoning_effort"),
        ([user("a")], {"response_format": {"type": "xml"}}, "response_format.type"),
        ([user("a")], {"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    ],
)
def test_a_bad_message_is_named(encoding: Encoding, messages: Any, options: Any, param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        encoding.render(messages, **options)
    assert caught.value.param == param
    assert param in str(caught.value)
