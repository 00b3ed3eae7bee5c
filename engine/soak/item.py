"""One request of the traffic, what it must be answered with, and what was found wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
ROUTES = (CHAT, COMPLETIONS, GENERATE)


@dataclass(frozen=True, slots=True)
class Choice:
    """One completion as a client puts it together.

    calls    (name, arguments) of each tool call
    scored   tokens with log probabilities, -1 where the answer has none
    """

    text: str
    finish: str
    calls: tuple[tuple[str, str], ...] = ()
    scored: int = -1


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer: its completions in order, and its usage."""

    choices: tuple[Choice, ...]
    prompt_tokens: int
    completion_tokens: int
    rank: int = -1


Check = Callable[[Reply], list[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A request.

    body         JSON, or bytes that are sent as they are
    completions  that the answer must have
    limit        most tokens of a completion
    statuses     each of which is right
    leave_s      the client closes after so many seconds
    same         answers of requests with the same word here must have equal texts
    check        further faults of a 200 answer
    """

    kind: str
    path: str
    body: dict[str, Any] | bytes
    method: str = "POST"
    headers: tuple[tuple[str, str], ...] = ()
    completions: int = 1
    limit: int = 0
    statuses: frozenset[int] = frozenset({200})
    leave_s: float | None = None
    same: str = ""
    check: Check | None = None
    code: str = field(default="", compare=False)

    @property
    def streamed(self) -> bool:
        """Whether the answer is an event stream."""
        return isinstance(self.body, dict) and bool(self.body.get("stream"))

    @property
    def demanded(self) -> int:
        """The rank that the client names; -1 for none."""
        return next(
            (int(v) for name, v in self.headers if name == "x-data-parallel-rank" and v.isdigit()), -1
        )
