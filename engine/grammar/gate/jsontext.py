"""JSON as the gate reads it: nothing after the value, no key twice, numbers as they are spelt, bounded."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.grammar.gate.numbers import Number
from engine.grammar.gate.refusals import GrammarRefused


@dataclass(frozen=True, slots=True)
class Limits:
    """What a client may send.

    chars       of one schema, pattern, grammar or tag
    depth       of nested objects and arrays
    values      objects, arrays and scalars of one text
    enum        values of one enum, or choices
    properties  names declared in one schema object
    branches    of one anyOf, oneOf or allOf
    rules       of the grammar that is made
    """

    chars: int = 262_144
    depth: int = 64
    values: int = 50_000
    enum: int = 5_000
    properties: int = 512
    branches: int = 256
    rules: int = 20_000


LIMITS = Limits()


def parse(text: str | bytes | msgspec.Raw, limits: Limits = LIMITS) -> Any:
    """The value, with `Number` for numbers. Raises GrammarRefused with what is wrong and where."""
    if not isinstance(text, str):
        try:
            text = bytes(text).decode("utf-8")
        except UnicodeError as error:
            raise GrammarRefused(f"the text is not UTF-8: {error}") from error
    if len(text) > limits.chars:
        raise GrammarRefused(f"{len(text)} characters are more than {limits.chars}")
    _check_depth(text, limits)
    try:
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_int=Number,
            parse_float=Number,
            parse_constant=_constant,
        )
    except ValueError as error:
        raise GrammarRefused(f"the text is not JSON: {error}") from error
    _check_values(value, limits)
    return value


def from_value(value: Any, limits: Limits = LIMITS) -> Any:
    """The same of a value that was decoded elsewhere; its numbers get Python's spelling."""
    try:
        return parse(json.dumps(value, ensure_ascii=False, allow_nan=False), limits)
    except (TypeError, ValueError, RecursionError) as error:
        raise GrammarRefused(f"the value is not JSON: {error}") from error


def render(value: Any) -> str:
    """Compact JSON; keys in their order, numbers as they were spelt."""
    if isinstance(value, Number):
        return value.lexeme
    if isinstance(value, dict):
        return "{" + ",".join(f"{render(key)}:{render(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(render, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def step(path: str, *keys: str | int) -> str:
    """A JSON pointer, some steps further."""
    return path + "".join(f"/{str(key).replace('~', '~0').replace('/', '~1')}" for key in keys)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise GrammarRefused(f"the key {key[:64]!r} is there twice in one object")
        found[key] = value
    return found


def _constant(name: str) -> Any:
    raise GrammarRefused(f"{name} is not JSON")


def _check_depth(text: str, limits: Limits) -> None:
    """Before any recursive parser sees it."""
    depth = 0
    for token in re.finditer(r'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]', text, re.DOTALL):
        mark = token.group(0)
        depth += (mark in "[{") - (mark in "]}")
        if depth > limits.depth:
            raise GrammarRefused(f"nesting is deeper than {limits.depth} at character {token.start()}")


def _check_values(value: Any, limits: Limits) -> None:
    """Count values; texts are Unicode scalars."""
    count, todo = 0, [(value, "")]
    while todo:
        one, path = todo.pop()
        count += 1
        if count > limits.values:
            raise GrammarRefused(f"more than {limits.values} values")
        if isinstance(one, dict):
            todo += [(inner, step(path, key)) for key, inner in one.items()]
            texts = list(one)
        else:
            texts = [one] if isinstance(one, str) else []
            todo += [(inner, step(path, i)) for i, inner in enumerate(one)] if isinstance(one, list) else []
        for text in texts:
            if re.search(r"[\ud800-\udfff]", text):
                raise GrammarRefused("half of a surrogate pair in a string", path)
