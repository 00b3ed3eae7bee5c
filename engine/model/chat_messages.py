"""OpenAI-shaped messages -> checked turns, as the chat format wants them.

Tool results have no role of their own: they join a user turn, ordered like the calls they answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.errors import BadRequest

ROLES = ("system", "user", "assistant", "tool", "developer", "latest_reminder")


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool answered; `call_id` names the call."""

    call_id: str
    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call of the assistant. `arguments` keeps the client's key order."""

    name: str
    arguments: Mapping[str, Any]
    call_id: str = ""


@dataclass(frozen=True, slots=True)
class Turn:
    """One rendered turn. `blocks` are joined by a blank line; only user turns have more than one.

    tools   function objects shown in this turn
    schema  JSON schema of the wanted reply; None for none
    closed  False: an assistant turn that the model shall go on with, so without EOS
    """

    role: str
    blocks: tuple[str | ToolResult, ...]
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    schema: Any = None
    task: str | None = None
    closed: bool = True


def bad(param: str, why: str) -> BadRequest:
    """A BadRequest that names the field in its text and in `param`."""
    return BadRequest(f"{param}: {why}", param=param)


def turns_of(messages: Sequence[Mapping[str, Any]]) -> list[Turn]:
    """Checked, merged and ordered turns. Raises BadRequest naming the field, as `messages[2].content`."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise bad("messages", "must be a list of at least one message")
    turns: list[Turn] = []
    for index, message in enumerate(messages):
        turn = _turn(message, f"messages[{index}]")
        last = turns[-1] if turns else None
        if last is not None and _joins(turn, last):
            turns[-1] = replace(last, blocks=last.blocks + turn.blocks, task=last.task or turn.task)
        else:
            turns.append(turn)
    return _results_in_call_order(turns)


def _joins(turn: Turn, last: Turn) -> bool:
    """Whether a user turn goes on with the last one; text after a task begins a new one, a result doesn't."""
    if turn.role != "user" or last.role != "user":
        return False
    return last.task is None or isinstance(turn.blocks[0], ToolResult)


def without_old_thinking(turns: Sequence[Turn]) -> list[Turn]:
    """Turns before the last user turn lose their reasoning, and developer turns there go."""
    last = last_user(turns)
    kept: list[Turn] = []
    for index, turn in enumerate(turns):
        if index >= last:
            kept.append(turn)
        elif turn.role != "developer":
            kept.append(replace(turn, reasoning=""))
    return kept


def last_user(turns: Sequence[Turn]) -> int:
    """Index of the last user or developer turn; -1 where there is none."""
    return max((i for i, turn in enumerate(turns) if turn.role in ("user", "developer")), default=-1)


def parse_arguments(raw: Any) -> dict[str, Any]:
    """Arguments of a call as an object; a faulty history never fails.

    A JSON string that holds an object gives it; text after the object is dropped; anything else becomes one
    parameter named `arguments`. Objects are taken as they are, though the API wants a string.
    """
    if raw is None or raw == "":
        return {}
    if isinstance(raw, Mapping):
        return dict(raw)
    if not isinstance(raw, str):
        return {"arguments": raw}
    text = raw.lstrip()
    try:
        value, _ = _DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        return {"arguments": raw}
    return value if isinstance(value, dict) else {"arguments": raw}


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_reject_constant)


def _turn(message: Any, at: str) -> Turn:
    if not isinstance(message, Mapping):
        raise bad(at, "must be an object")
    role = message.get("role")
    if role not in ROLES:
        raise bad(f"{at}.role", f"must be one of {', '.join(ROLES)}, not {role!r}")
    if role == "assistant":
        return _assistant(message, at)
    text = _text(message.get("content"), f"{at}.content")
    if role == "tool":
        call_id = message.get("tool_call_id") or ""
        if not isinstance(call_id, str):
            raise bad(f"{at}.tool_call_id", "must be a string")
        return Turn("user", (ToolResult(call_id, text),))
    if role == "developer" and not text:
        raise bad(f"{at}.content", "must not be empty")
    return Turn(
        role,
        (text,),
        tools=functions_of(message.get("tools"), f"{at}.tools"),
        schema=message.get("response_format"),
        task=_task(message, at),
    )


def _assistant(message: Mapping[str, Any], at: str) -> Turn:
    content = message.get("content")
    reasoning = message.get("reasoning_content") or ""
    if not isinstance(reasoning, str):
        raise bad(f"{at}.reasoning_content", "must be a string")
    return Turn(
        "assistant",
        ("" if content is None else _text(content, f"{at}.content"),),
        reasoning=reasoning,
        calls=_calls(message.get("tool_calls"), f"{at}.tool_calls"),
        task=_task(message, at),
        closed=not message.get("wo_eos", False),
    )


def _task(message: Mapping[str, Any], at: str) -> str | None:
    task = message.get("task")
    if task is not None and not isinstance(task, str):
        raise bad(f"{at}.task", "must be a string")
    return task


def _text(content: Any, at: str) -> str:
    """Content as one string; parts are joined by a blank line."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise bad(at, "must be a string or a list of text parts")
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise bad(f"{at}[{index}].type", f"must be text; {kind!r} isn't supported")
        if not isinstance(part.get("text"), str):
            raise bad(f"{at}[{index}].text", "must be a string")
        texts.append(part["text"])
    return "\n\n".join(texts)


def functions_of(tools: Any, at: str) -> tuple[Mapping[str, Any], ...]:
    """The `function` objects of an OpenAI tool list. Raises BadRequest naming the field below `at`."""
    if tools is None:
        return ()
    if not isinstance(tools, Sequence) or isinstance(tools, (str, bytes)):
        raise bad(at, "must be a list")
    functions = []
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping):
            raise bad(f"{at}[{index}].function", "must be an object")
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise bad(f"{at}[{index}].function.name", "must be a non-empty string")
        functions.append(function)
    return tuple(functions)


def _calls(calls: Any, at: str) -> tuple[Call, ...]:
    found = []
    for index, function in enumerate(functions_of(calls, at)):
        call_id = calls[index].get("id") or ""
        if not isinstance(call_id, str):
            raise bad(f"{at}[{index}].id", "must be a string")
        found.append(Call(function["name"], parse_arguments(function.get("arguments")), call_id))
    return tuple(found)


def _results_in_call_order(turns: list[Turn]) -> list[Turn]:
    """Results take the order of the preceding calls; text between them keeps its place."""
    order: dict[str, int] = {}
    for index, turn in enumerate(turns):
        if turn.calls:
            order = {call.call_id: i for i, call in enumerate(turn.calls) if call.call_id}
        results = [block for block in turn.blocks if isinstance(block, ToolResult)]
        if len(results) > 1 and order:
            ranked = iter(sorted(results, key=lambda result: order.get(result.call_id, 0)))
            blocks = tuple(next(ranked) if isinstance(b, ToolResult) else b for b in turn.blocks)
            turns[index] = replace(turn, blocks=blocks)
    return turns
