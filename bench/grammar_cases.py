"""Schemas for `bench grammar`: 64 different ones, each with a bound on the longest text that it allows."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

SCHEMAS = 64
SEED = 20_26
NAMES = ("name", "city", "kind", "count", "price", "tags", "owner", "active", "note", "size", "items", "day")
WORDS = ("red", "green", "blue", "small", "large", "north", "south", "open", "closed", "daily")
CHAR_BYTES = 12
"""One character of a string at its longest: two escapes of six, for one outside the basic plane."""


@dataclass(frozen=True)
class Case:
    """One schema.

    longest  bytes of the longest text that it allows, as text without white space but one blank behind each
             comma and colon; a token has at least one byte
    """

    number: int
    schema: dict[str, Any]
    longest: int


def cases(count: int = SCHEMAS) -> list[Case]:
    """The same ones each time; no two are equal."""
    draw = random.Random(SEED)
    found: list[Case] = []
    seen: set[str] = set()
    while len(found) < count:
        schema, longest = an_object(draw, 2)
        text = json.dumps(schema)
        if text not in seen:
            seen.add(text)
            found.append(Case(len(found), schema, longest))
    return found


Made = tuple[dict[str, Any], int]
"""(schema, bytes of its longest text)."""


def an_object(draw: random.Random, depth: int) -> Made:
    """Two to four members, some of them optional; closed."""
    names = draw.sample(NAMES, draw.randint(2, 4))
    members = {name: a_value(draw, depth - 1) for name in names}
    schema = {
        "type": "object",
        "properties": {name: schema for name, (schema, _) in members.items()},
        "required": sorted(draw.sample(names, draw.randint(1, len(names)))),
        "additionalProperties": False,
    }
    return schema, 2 + sum(len(name) + 6 + longest for name, (_, longest) in members.items())


def a_value(draw: random.Random, depth: int) -> Made:
    """Of one of the kinds; nested ones while `depth` lasts."""
    flat = (a_text, a_choice, a_pattern, a_number, a_flag, a_constant, a_union, a_date)
    return draw.choice((*flat, an_array, an_object) if depth > 0 else flat)(draw, depth)


def a_text(draw: random.Random, depth: int) -> Made:
    """Of bounded length."""
    most = draw.randint(3, 12)
    return {"type": "string", "minLength": draw.randint(0, 2), "maxLength": most}, 2 + CHAR_BYTES * most


def a_choice(draw: random.Random, depth: int) -> Made:
    """One of a few words."""
    words = draw.sample(WORDS, draw.randint(2, 5))
    return {"enum": words}, 2 + max(map(len, words))


def a_pattern(draw: random.Random, depth: int) -> Made:
    """A code of letters and digits."""
    letters, digits = draw.randint(1, 4), draw.randint(1, 4)
    pattern = f"^[A-Z]{{{letters}}}-[0-9]{{1,{digits}}}$"
    return {"type": "string", "pattern": pattern}, 2 + CHAR_BYTES * (letters + digits + 1)


def a_number(draw: random.Random, depth: int) -> Made:
    """A whole number between two bounds."""
    low = draw.choice((-1000, -5, 0, 1, 17))
    high = low + draw.choice((3, 99, 12_345))
    return {"type": "integer", "minimum": low, "maximum": high}, 1 + max(len(str(low)), len(str(high)))


def a_flag(draw: random.Random, depth: int) -> Made:
    """True or false."""
    return {"type": "boolean"}, 5


def a_constant(draw: random.Random, depth: int) -> Made:
    """One value alone."""
    value = draw.choice((None, 3, "fixed", [1, 2], {"a": True}))
    return {"const": value}, len(json.dumps(value))


def a_union(draw: random.Random, depth: int) -> Made:
    """A number, or nothing."""
    schema, longest = a_number(draw, depth)
    return {"anyOf": [schema, {"type": "null"}]}, max(4, longest)


def a_date(draw: random.Random, depth: int) -> Made:
    """A day of the calendar."""
    return {"type": "string", "format": "date"}, 2 + CHAR_BYTES * 10


def an_array(draw: random.Random, depth: int) -> Made:
    """A few values of one kind."""
    schema, longest = a_value(draw, depth - 1)
    most = draw.randint(1, 4)
    low = draw.randint(0, 1)
    return {"type": "array", "items": schema, "minItems": low, "maxItems": most}, 2 + most * (longest + 2)
