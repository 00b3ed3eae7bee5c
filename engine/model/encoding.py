"""Chat messages -> prompt text by DeepSeek-V4's rules; the fixed strings come from the checkpoint.

Standard library only: training renders its examples with this very code where the engine's packages lack.
A prompt is a list of segments: special tokens apart from text, so that text never turns into a special token.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.model.chat_messages import (
    Call,
    ToolResult,
    Turn,
    bad,
    functions_of,
    last_user,
    turns_of,
    without_old_thinking,
)
from engine.model.prompt_strings import PromptStrings, load_strings
from engine.model.segments import Segment, Writer


def load_encoding(model_path: str | os.PathLike[str]) -> Encoding:
    """The chat format of the checkpoint in `model_path`. Raises ConfigError where its strings are missing."""
    return Encoding(load_strings(Path(model_path)))


class Encoding:
    """Renders messages as prompts and answers. Holds no state of a conversation."""

    def __init__(self, strings: PromptStrings) -> None:
        self.strings = strings

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The prompt as one string; arguments and errors of `segments`."""
        return "".join(text for text, _ in self.segments(messages, **options))

    def segments(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        thinking: bool = False,
        drop_thinking: bool = True,
        reasoning_effort: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        response_format: Mapping[str, Any] | None = None,
    ) -> list[Segment]:
        """The prompt, special tokens apart from text; neighbouring text is one segment.

        thinking          the model is asked to reason first
        drop_thinking     earlier turns lose their reasoning; has no effect where a message carries tools
        reasoning_effort  a key of `strings.efforts`; None is the checkpoint's default
        tools             OpenAI tool list, shown in the system turn
        response_format   OpenAI shape; a schema is shown in the system turn
        raises            BadRequest naming the field
        """
        prefix = self._effort(reasoning_effort)
        functions = functions_of(tools, "tools")
        turns = _with_attachments(turns_of(messages), functions, schema_of(response_format))
        drops = thinking and drop_thinking and not any(turn.tools for turn in turns)
        if drops:
            turns = without_old_thinking(turns)
        out = Writer(self.strings)
        out.control("bos")
        if thinking:
            out.text(prefix)
        first_kept = last_user(turns) if drops else -1
        for index in range(len(turns)):
            self._turn(out, turns, index, thinking, index > first_kept)
            self._opening(out, turns, index, thinking, thinking and index >= first_kept)
        return out.segments()

    def answer_segments(self, message: Mapping[str, Any], *, thinking: bool = False) -> list[Segment]:
        """What the model has to write after the prompt so that `message` results, with EOS.

        Appended to a prompt of the same mode it equals the prompt of the conversation that `message` ends.
        """
        turns = turns_of([message])
        if turns[0].role != "assistant":
            raise bad("messages[0].role", "must be assistant")
        out = Writer(self.strings)
        self._turn(out, turns, 0, thinking, True)
        return out.segments()

    def _effort(self, effort: str | None) -> str:
        chosen = self.strings.default_effort if effort is None else effort
        if chosen not in self.strings.efforts:
            known = ", ".join(self.strings.efforts)
            raise bad("reasoning_effort", f"must be one of {known}, not {effort!r}")
        return self.strings.efforts[chosen]

    def _turn(self, out: Writer, turns: Sequence[Turn], index: int, thinking: bool, keeps: bool) -> None:
        turn = turns[index]
        if turn.role == "assistant":
            answers_task = index > 0 and turns[index - 1].task is not None
            if thinking and keeps and not answers_task:
                out.text(turn.reasoning)
                out.control("think_end")
            out.text("\n\n".join(map(str, turn.blocks)))
            self._tool_calls(out, turn.calls)
            if turn.closed:
                out.control("eos")
            return
        if turn.role != "system":
            out.control("latest_reminder" if turn.role == "latest_reminder" else "user")
        for position, block in enumerate(turn.blocks):
            out.text("\n\n" if position else "")
            if isinstance(block, ToolResult):
                out.template("tool_output", {"content": block.text})
            else:
                out.text(block)
        if turn.role in ("system", "developer"):
            self._attachments(out, turn)

    def _opening(
        self, out: Writer, turns: Sequence[Turn], index: int, thinking: bool, thinks_here: bool
    ) -> None:
        """What follows turn `index` where the assistant, or a reminder, comes next."""
        following = turns[index + 1].role if index + 1 < len(turns) else "assistant"
        if following not in ("assistant", "latest_reminder"):
            return
        turn = turns[index]
        if turn.task is not None and turn.task not in self.strings.tasks:
            known = ", ".join(self.strings.tasks)
            raise bad("messages.task", f"must be one of {known}, not {turn.task!r}")
        if turn.task is None and turn.role in ("user", "developer"):
            out.control("assistant")
            out.control("think_start" if thinks_here else "think_end")
        elif turn.task is not None:
            if turn.task == "action":
                out.control("assistant")
                out.control("think_start" if thinking else "think_end")
            out.special(self.strings.tasks[turn.task])

    def _attachments(self, out: Writer, turn: Turn) -> None:
        if turn.tools:
            out.text("\n\n")
            out.template("tools", {"tool_schemas": "\n".join(map(to_json, turn.tools))})
        if turn.schema is not None:
            out.text("\n\n")
            out.template("response_format", {"schema": to_json(turn.schema)})

    def _tool_calls(self, out: Writer, calls: Sequence[Call]) -> None:
        if not calls:
            return
        inner: list[Segment] = []
        for call in calls:
            lines: list[Segment] = []
            for key, value in call.arguments.items():
                lines += [("\n", False)] if lines else []
                lines += self._parameter(key, value)
            one = Writer(self.strings)
            one.template("tool_call", {"name": call.name, "arguments": lines})
            inner += [("\n", False)] if inner else []
            inner += one.segments()
        out.text("\n\n")
        out.template("tool_calls", {"tool_calls": inner})

    def _parameter(self, key: str, value: Any) -> list[Segment]:
        """One line; text stands raw, everything else as JSON."""
        raw = isinstance(value, str)
        out = Writer(self.strings)
        out.text("<")
        out.control("dsml")
        out.text(f'parameter name="{key}" string="{"true" if raw else "false"}">')
        out.text(value if raw else to_json(value))
        out.text("</")
        out.control("dsml")
        out.text("parameter>")
        return out.segments()


def to_json(value: Any) -> str:
    """JSON with ", " and ": ", non-ASCII as it is, keys in their order."""
    return json.dumps(value, ensure_ascii=False)


def schema_of(response_format: Mapping[str, Any] | None) -> Any:
    """The schema that an OpenAI `response_format` asks for; None for text. Raises BadRequest."""
    if response_format is None:
        return None
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema":
        raise bad("response_format.type", f"must be text, json_object or json_schema, not {kind!r}")
    wrapper = response_format.get("json_schema")
    schema = wrapper.get("schema") if isinstance(wrapper, Mapping) else None
    if not isinstance(schema, (Mapping, bool)):
        raise bad("response_format.json_schema.schema", "must be a JSON schema")
    return schema


def _with_attachments(turns: list[Turn], tools: tuple[Mapping[str, Any], ...], schema: Any) -> list[Turn]:
    """Tools and schema of the request go to the first system turn; an empty one is made where none leads."""
    if not tools and schema is None:
        return turns
    head = turns[0] if turns[0].role == "system" else Turn("system", ("",))
    rest = turns[1:] if turns[0].role == "system" else turns
    wanted = head.schema if schema is None else schema
    attached = Turn("system", head.blocks, tools=head.tools + tools, schema=wanted, task=head.task)
    return [attached, *rest]
