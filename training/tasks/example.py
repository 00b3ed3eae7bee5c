"""One training example: a conversation, the reply that is wanted, and how a reply is judged."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Example:
    """What the encoder needs for the prompt, and the reply.

    messages         OpenAI-shaped, ending where the assistant has to reply
    answer           the assistant's message: content, and reasoning_content and tool_calls where wanted
    checker          a name in `training.tasks.checking.CHECKERS`
    expected         what that checker compares with
    thinking         the prompt ends with an open `<think>`
    """

    kind: str
    messages: Sequence[Message]
    answer: Mapping[str, Any]
    checker: str
    expected: Any
    tools: Sequence[Mapping[str, Any]] | None = None
    response_format: Mapping[str, Any] | None = None
    thinking: bool = False
    effort: str | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `Encoding.segments` beside the messages."""
        return {
            "thinking": self.thinking,
            "tools": self.tools,
            "response_format": self.response_format,
            "reasoning_effort": self.effort,
        }


def user(text: str) -> Message:
    """A user message."""
    return {"role": "user", "content": text}


def system(text: str) -> Message:
    """A system message."""
    return {"role": "system", "content": text}


def reply(text: str, reasoning: str = "") -> Message:
    """An assistant message."""
    message = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    return message
