"""Requests whose answers must have a form, and the check of each by a library that the server doesn't use."""

from __future__ import annotations

import json
import random
import re
from typing import Any

from engine.errors import ConfigError
from engine.soak.item import CHAT, COMPLETIONS, Item, Reply

LIMIT = 160
"""Tokens: enough for every form below, so that a cut answer is a fault."""

WORD = {"type": "string", "pattern": "^[a-z]{1,6}$"}
DIGITS = {"type": "integer", "minimum": 0, "maximum": 99}
SCHEMAS: tuple[dict[str, Any], ...] = (
    {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]},
    {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "green"]}, "count": DIGITS},
        "required": ["colour", "count"],
    },
    {"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 1, "maxItems": 4},
    {"type": "object", "properties": {"name": WORD, "tags": {"type": "array", "items": WORD, "maxItems": 2}},
     "required": ["name"]},
    {"anyOf": [{"const": "yes"}, {"const": "no"}]},
)  # fmt: skip
REGEXES = ("(yes|no)", "[0-9]{1,4}", "[A-F]-[0-9]{2}", "(ab|cd){1,3}x?")
CHOICES = (["left", "right"], ["one", "two", "three"], ["a b", "c d"])
PARAMETERS = {"type": "object", "properties": {"city": WORD, "days": DIGITS},
              "required": ["city", "days"]}  # fmt: skip


def validator(schema: dict[str, Any]) -> Any:
    """The library's validator. raises ConfigError where the library isn't installed."""
    try:
        from jsonschema import Draft202012Validator  # type: ignore[import-untyped, unused-ignore]
    except ImportError as error:
        raise ConfigError(
            "soak checks structured answers with jsonschema, which is not installed: install the package "
            "with its [test] extra, or leave these kinds out with --kinds"
        ) from error
    return Draft202012Validator(schema)


class Forms:
    """Makes such requests. Making it needs the library."""

    def __init__(self) -> None:
        self._schemas = [validator(schema) for schema in SCHEMAS]
        self._parameters = validator(PARAMETERS)

    def schema(self, draw: random.Random, prompt: str) -> Item:
        """A JSON schema, over chat."""
        valid = draw.choice(self._schemas)
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": valid.schema}}
        body = {
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": LIMIT,
            "response_format": form,
        }

        def check(reply: Reply) -> list[str]:
            return [fault for one in reply.choices for fault in json_faults(one.text, one.finish, valid)]

        return Item(kind="json_schema", path=CHAT, body=body, limit=LIMIT, check=check)

    def regex(self, draw: random.Random, prompt: str) -> Item:
        """A regular expression, over completions."""
        pattern = draw.choice(REGEXES)
        return self._plain("regex", "regex", pattern, lambda text: bool(re.fullmatch(pattern, text)), prompt)

    def choice(self, draw: random.Random, prompt: str) -> Item:
        """One of some texts, over completions."""
        texts = draw.choice(CHOICES)
        return self._plain("guided_choice", "guided_choice", texts, lambda text: text in texts, prompt)

    def _plain(self, kind: str, name: str, form: Any, fits: Any, prompt: str) -> Item:
        def check(reply: Reply) -> list[str]:
            return [
                f"{one.text[:200]!r} ({one.finish}) is not of {name} {form!r}"
                for one in reply.choices
                if one.finish != "stop" or not fits(one.text)
            ]

        body = {"prompt": prompt, "max_tokens": LIMIT, name: form}
        return Item(kind=kind, path=COMPLETIONS, body=body, limit=LIMIT, check=check)

    def call(self, draw: random.Random, prompt: str) -> Item:
        """A tool that must be called, its arguments strict."""
        named = draw.random() < 0.5
        choice = {"type": "function", "function": {"name": "weather"}} if named else "required"
        body = {
            **tools(prompt, strict=True), "max_tokens": LIMIT, "tool_choice": choice,
            "parallel_tool_calls": False,
        }  # fmt: skip

        def check(reply: Reply) -> list[str]:
            faults = []
            for one in reply.choices:
                if len(one.calls) != 1 or one.calls[0][0] != "weather":
                    faults.append(
                        f"a call of weather was demanded, but came {one.calls!r}, {one.text[:200]!r}"
                    )
                else:
                    finish = "stop" if named or one.finish == "tool_calls" else one.finish
                    faults += json_faults(one.calls[0][1], finish, self._parameters)
            return faults

        return Item(kind="tool_forced", path=CHAT, body=body, limit=LIMIT, check=check)


def tools(prompt: str, strict: bool) -> dict[str, Any]:
    """The part of a chat that shows a tool."""
    function = {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": PARAMETERS,
        "strict": strict,
    }
    return {
        "messages": [{"role": "user", "content": prompt}],
        "tools": [{"type": "function", "function": function}],
    }


def json_faults(text: str, finish: str, valid: Any) -> list[str]:
    """What is wrong with a text that must be JSON of a schema."""
    if finish != "stop":
        return [f"a constrained answer ended with {finish}: {text[:200]!r}"]
    try:
        value = json.loads(text)
    except ValueError as error:
        return [f"not JSON ({error}): {text[:200]!r}"]
    return [f"{error.message}: {text[:200]!r} against {valid.schema}" for error in valid.iter_errors(value)]
