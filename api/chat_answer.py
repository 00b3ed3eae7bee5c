"""The wording of chat answers: messages, chunks, reasoning apart from content, tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from api.served import Served
from api.shapes import Framing, Usage, chat_logprobs, finish_reason, shown_logprobs
from engine.messages import GOES_ON, LENGTH, Delta
from engine.model.dsml import Reply, ReplyParser, TextSplitter


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPlan:
    """What the answer depends on beyond the tokens.

    count     completions
    separate  reasoning goes into its own field
    calls     that a completion may make; those that the model writes beyond are dropped
    named     the client named the function: a call is no finish reason then, as OpenAI has it
    """

    rid: str
    created: int
    count: int
    thinking: bool
    separate: bool
    calls: int
    logprobs: bool
    with_usage: bool
    continuous: bool
    with_drafts: bool = False
    named: bool = False


class ChatChoice:
    """One completion's text on its way into a message."""

    def __init__(self, plan: ChatPlan, served: Served) -> None:
        strings = served.encoding.strings
        self._splitter = TextSplitter(strings)
        self._parser = ReplyParser(strings, thinking=plan.thinking)
        self._plan = plan
        self.reply = Reply()
        self.logprobs: list[dict[str, Any]] = []
        self.finish: str | None = None

    def read(self, delta: Delta) -> Reply:
        """What the chunk adds; it is part of `reply` afterwards."""
        piece = self._parse(delta)
        self.reply.add(piece)
        if delta.finish != GOES_ON:
            called = self.reply.calls and delta.finish != LENGTH and not self._plan.named
            self.finish = "tool_calls" if called else finish_reason(delta.finish)
        return piece

    def _parse(self, delta: Delta) -> Reply:
        piece = self._parser.feed(self._splitter.feed(delta.text))
        if delta.finish != GOES_ON:
            piece.add(self._parser.feed(self._splitter.finish()))
            piece.add(self._parser.finish())
        del piece.calls[max(0, self._plan.calls - len(self.reply.calls)) :]
        if not self._plan.separate:
            piece.content = piece.reasoning + piece.content
            piece.reasoning = ""
        return piece


class ChatAnswer:
    """An `Answer` of /v1/chat/completions."""

    def __init__(self, plan: ChatPlan, prompt_tokens: int, served: Served) -> None:
        self._plan = plan
        self._served = served
        self._choices = [ChatChoice(plan, served) for _ in range(plan.count)]
        self._usage = Usage(prompt_tokens, plan.with_drafts)
        head = self._head("chat.completion.chunk")
        self._framing = Framing(head, self._usage, plan.with_usage, plan.continuous)

    def opening(self) -> Sequence[bytes]:
        """The role, once a choice."""
        return [self._chunk(place, {"role": "assistant", "content": ""}) for place in range(self._plan.count)]

    def gain(self, place: int, delta: Delta) -> Sequence[bytes]:
        """Reasoning, content and calls each in its own chunk, then the finish reason in one of its own."""
        choice = self._choices[place]
        calls_before = len(choice.reply.calls)
        piece = self._read(place, delta)
        logprobs = {"content": choice.logprobs, "refusal": None} if choice.logprobs else None
        choice.logprobs = []
        parts: list[dict[str, Any]] = []
        if piece.reasoning:
            parts.append({"reasoning_content": piece.reasoning})
        if piece.content:
            parts.append({"content": piece.content})
        for number, call in enumerate(piece.calls, calls_before):
            parts += _call_parts(number, self._call_id(place, number), call.name, call.arguments)
        if logprobs and not parts:
            parts.append({"content": ""})
        events = []
        for part in parts:
            events.append(self._chunk(place, part, logprobs))
            logprobs = None
        if choice.finish is not None:
            events.append(self._chunk(place, {}, None, choice.finish))
        return events

    def closing(self) -> Sequence[bytes]:
        """The usage, where it is wanted."""
        return self._framing.last()

    def note(self, place: int, delta: Delta) -> None:
        """Collects."""
        self._read(place, delta)

    def whole(self) -> dict[str, Any]:
        """A chat.completion."""
        return {
            **self._head("chat.completion"),
            "choices": [self._whole_choice(place, choice) for place, choice in enumerate(self._choices)],
            "usage": self._usage.as_json(),
        }

    def _read(self, place: int, delta: Delta) -> Reply:
        self._usage.note(delta)
        choice = self._choices[place]
        if self._plan.logprobs:
            choice.logprobs += chat_logprobs(shown_logprobs(delta), self._served.tokenizer)
        return choice.read(delta)

    def _whole_choice(self, place: int, choice: ChatChoice) -> dict[str, Any]:
        reply = choice.reply
        message: dict[str, Any] = {"role": "assistant", "content": reply.content, "refusal": None}
        if self._plan.thinking and self._plan.separate:
            message["reasoning_content"] = reply.reasoning
        if reply.calls:
            message["content"] = reply.content or None
            message["tool_calls"] = [
                _call(self._call_id(place, number), call.name, call.arguments)
                for number, call in enumerate(reply.calls)
            ]
        return {
            "index": place,
            "message": message,
            "logprobs": {"content": choice.logprobs, "refusal": None} if self._plan.logprobs else None,
            "finish_reason": choice.finish,
        }

    def _chunk(
        self, place: int, part: dict[str, Any], logprobs: Any = None, finish: str | None = None
    ) -> bytes:
        return self._framing.chunk(
            {"index": place, "delta": part, "logprobs": logprobs, "finish_reason": finish}
        )

    def _head(self, kind: str) -> dict[str, Any]:
        plan = self._plan
        return {"id": plan.rid, "object": kind, "created": plan.created, "model": self._served.name}

    def _call_id(self, place: int, number: int) -> str:
        return f"call_{self._plan.rid}_{place}_{number}"


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _call_parts(number: int, call_id: str, name: str, arguments: str) -> list[dict[str, Any]]:
    """First the call without arguments, then the arguments: what clients of streams add up."""
    first = {"index": number, **_call(call_id, name, "")}
    later = {"index": number, "function": {"arguments": arguments}}
    return [{"tool_calls": [first]}, {"tool_calls": [later]}]
