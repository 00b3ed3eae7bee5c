"""Longer JSON from a schema: more fields, nested objects, lists of objects, references, alternatives."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from training.tasks import words
from training.tasks.draw import Draw
from training.tasks.example import Example, reply, system, user
from training.tasks.fields import Field, draw_specs, make_field
from training.tasks.json_short import ASK, minified, schema_text
from training.tasks.stating import state
from training.tasks.values import SMALL_NUMBERS
from training.tasks.wording import SYSTEMS, styled

PARTS = (
    "address",
    "owner",
    "details",
    "contact",
    "size",
    "place",
    "origin",
    "source",
    "limits",
    "settings",
    "extra",
)
LISTS = ("items", "entries", "rows", "parts", "stops", "steps", "members", "lines")
PATTERNS = (("^[A-Z]{2}-[0-9]{4}$", "AB"), ("^[a-z]+-[0-9]+$", "word"), ("^#[0-9a-f]{6}$", "hex"))


@dataclass(slots=True)
class Node:
    """A part of the value with its schema and the text that states it, one line or more."""

    schema: dict[str, Any]
    value: Any
    text: str


def generate(draw: Draw, kind: str) -> Example:
    """One example with a nested or wide schema."""
    definitions: dict[str, Any] = {}
    node = _object(draw, draw.integer(2, 5), draw.integer(1, 2), definitions)
    schema = {**node.schema, "$defs": definitions} if definitions else node.schema
    ask = styled(draw, draw.of(ASK))
    indented = draw.chance(0.1)
    ask += draw.pick((" Indent by two spaces.", " Pretty-print it.")) if indented else ""
    answer = json.dumps(node.value, ensure_ascii=False, indent=2) if indented else minified(node.value)
    head = [system(draw.of(SYSTEMS))] if draw.chance(0.2) else []
    if draw.chance(0.45):
        wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        messages = [*head, user(f"{ask}\n\n{node.text}" if indented or draw.chance(0.6) else node.text)]
    else:
        wanted = None
        parts = [ask, schema_text(draw, schema), node.text]
        messages = [*head, user("\n\n".join(parts if draw.chance(0.7) else parts[::-1]))]
    checker, expected = ("json_text", answer) if indented else ("json", node.value)
    return Example(kind, messages, reply(answer), checker, expected, response_format=wanted)


def _object(draw: Draw, width: int, depth: int, definitions: dict[str, Any]) -> Node:
    """An object of scalar fields, and below it up to two parts."""
    _, specs = draw_specs(draw, width)
    fields = [make_field(draw, spec) for spec in specs]
    taken = {field.key for field in fields}
    parts: dict[str, Node] = {}
    for name in draw.some([name for name in (*PARTS, *LISTS) if name not in taken], 2 if depth > 1 else 1):
        if draw.chance(0.65) and depth:
            parts[name] = _part(draw, name, depth, definitions)
    for name, node in (("code_no", _patterned(draw)), ("reading", _alternative(draw))):
        if draw.chance(0.12):
            parts[name] = node
    properties = {field.key: field.value.schema for field in fields}
    properties |= {name: node.schema for name, node in parts.items()}
    value = {field.key: field.value.value for field in fields} | {
        name: node.value for name, node in parts.items()
    }
    schema: dict[str, Any] = {"type": "object", "properties": properties, "required": list(properties)}
    if draw.chance(0.4):
        schema["additionalProperties"] = False
    stated = [state(draw, fields), *(node.text for node in parts.values())]
    return Node(schema, value, "\n".join(stated))


def _part(draw: Draw, name: str, depth: int, definitions: dict[str, Any]) -> Node:
    """A nested object, or a list of objects of one shape."""
    if name in LISTS:
        return _rows(draw, name, definitions)
    inner = _object(draw, draw.integer(1, 3), depth - 1, definitions)
    return Node(
        _shared(draw, name, inner.schema, definitions), inner.value, f"{name}:\n{_indented(inner.text)}"
    )


def _rows(draw: Draw, name: str, definitions: dict[str, Any]) -> Node:
    """A list of objects with the same fields, stated as a table or as lines."""
    _, specs = draw_specs(draw, draw.integer(1, 3))
    rows: list[list[Field]] = []
    for _ in range(draw.integer(1, 4)):
        again = rows[0] if rows else None
        rows.append([_same_schema(draw, spec, again, i) for i, spec in enumerate(specs)])
    first = rows[0]
    item = {
        "type": "object",
        "properties": {field.key: field.value.schema for field in first},
        "required": [field.key for field in first],
    }
    values = [{field.key: field.value.value for field in row} for row in rows]
    schema = {"type": "array", "items": _shared(draw, name.rstrip("s"), item, definitions)}
    return Node(
        schema, values, f"{name}:\n{_table(rows)}" if draw.chance(0.4) else f"{name}:\n{_bullets(rows)}"
    )


def _same_schema(draw: Draw, spec: tuple[str, str], first: Sequence[Field] | None, index: int) -> Field:
    """A field whose schema is the first row's; bounds differ by chance, so draw until they agree."""
    while True:
        field = make_field(draw, spec)
        if first is None or field.value.schema == first[index].value.schema:
            return field


def _table(rows: Sequence[Sequence[Field]]) -> str:
    head = " | ".join(field.key for field in rows[0])
    return "\n".join([head, *(" | ".join(field.shown for field in row) for row in rows)])


def _bullets(rows: Sequence[Sequence[Field]]) -> str:
    return "\n".join("- " + "; ".join(f"{field.label}: {field.shown}" for field in row) for row in rows)


def _shared(draw: Draw, name: str, schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema itself, or a reference to it under `$defs`."""
    if name in definitions or not draw.chance(0.25):
        return schema
    definitions[name] = schema
    return {"$ref": f"#/$defs/{name}"}


def _patterned(draw: Draw) -> Node:
    pattern, form = draw.pick(PATTERNS)
    if form == "AB":
        value = f"{draw.pick('ABCDEFGH')}{draw.pick('KLMNPRST')}-{draw.integer(1000, 9999)}"
    elif form == "word":
        value = f"{words.invented_word(draw)}-{draw.integer(1, 999)}"
    else:
        value = f"#{draw.integer(0, 0xFFFFFF):06x}"
    return Node({"type": "string", "pattern": pattern}, value, f"code no: {value}")


def _alternative(draw: Draw) -> Node:
    """A value of one of two types."""
    schema = {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    if draw.chance(0.5):
        number = draw.integer(0, 20)
        return Node(schema, number, f"reading: {SMALL_NUMBERS[number] if draw.chance(0.1) else number}")
    value = words.proper_name(draw)
    return Node(schema, value, f"reading: {value}")


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.split("\n"))
