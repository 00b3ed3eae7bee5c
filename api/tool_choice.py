"""Which tools a completion may or must call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from api.checks import bad
from engine.grammar.gate import Tool


@dataclass(frozen=True, slots=True)
class Forced:
    """What `tool_choice` says of the tools that the model is shown.

    required  the answer is a call
    name      of the one that must be called; empty: any
    """

    required: bool = False
    name: str = ""


FREE = Forced()


def forced_of(choice: str | dict[str, Any] | None, tools: Sequence[dict[str, Any]]) -> Forced:
    """Reads `tool_choice`. Raises BadRequest for an unknown one, and for a tool that isn't there."""
    if choice in (None, "auto", "none"):
        return FREE
    if choice == "required":
        if not tools:
            raise bad("tool_choice", "a call is required, but there is no tool")
        return Forced(True)
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(choice, dict) or choice.get("type") != "function" or not isinstance(name, str):
        raise bad("tool_choice", "must be auto, none, required, or a function by its name")
    if name not in [_function(tool).get("name") for tool in tools]:
        raise bad("tool_choice", f"there is no tool {name[:40]!r}")
    return Forced(True, name)


def tools_of(tools: Sequence[dict[str, Any]], only: str, texts: Sequence[str] = ()) -> list[Tool]:
    """The tools that a grammar is made of.

    only   the name of the one that may be called; empty: all
    texts  their parameters as the client spelt them
    Raises BadRequest for one without a name, or whose `strict` is neither true nor false.
    """
    found = []
    for place, tool in enumerate(tools):
        function = _function(tool)
        name, strict = function.get("name"), function.get("strict")
        if not isinstance(name, str) or not name:
            raise bad(f"tools[{place}].function.name", "must be a text")
        if not isinstance(strict, bool | None):
            raise bad(f"tools[{place}].function.strict", f"must be true or false, not {strict!r}")
        parameters = function.get("parameters")
        if isinstance(parameters, dict) and place < len(texts):
            parameters = texts[place]
        if not only or name == only:
            found.append(Tool(name, parameters, bool(strict), f"/{place}/function/parameters"))
    return found


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    return function if isinstance(function, dict) else {}
