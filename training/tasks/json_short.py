"""Short JSON from a schema: one to four fields, a text that states them, minified JSON in schema order.

This is what the shipped model is judged on, so most prompts stay under 110 tokens.
"""

import json
from collections.abc import Sequence
from typing import Any

from training.tasks.draw import Draw, lines
from training.tasks.example import Example, Message, reply, system, user
from training.tasks.fields import Field, draw_sentence, draw_specs, make_field
from training.tasks.stating import fill_sentence, state
from training.tasks.values import Value
from training.tasks.wording import SYSTEMS, styled

ASK = lines(
    """Return JSON that matches the schema.
    Reply with JSON that matches this schema.
    Fill in this form as JSON.
    Turn the text into JSON.
    Write the data as JSON.
    Extract the fields as JSON.
    Give me a JSON object for this schema.
    Answer in JSON.
    Convert the text to JSON by the schema.
    Put this into JSON.
    Read the text and return the JSON object.
    Use the schema. Return only JSON.
    Make a JSON object from the text.
    Produce JSON with these fields.
    Output JSON only.
    Return the values as a JSON object.
    Parse this into JSON.
    Structure the text by the schema.
    Create the JSON record.
    Represent the text as JSON that fits the schema.
    Find the values and return them as JSON.
    Transform this into a JSON object.
    I need this as JSON.
    Which values does the text give? Answer as JSON.
    Send back JSON that validates.
    Fill the schema from the text."""
)
LIST_ASK = lines(
    """Return JSON with the keys {0}.
    Give {0} as JSON.
    Extract {0} as a JSON object.
    Make JSON with {0} from this text.
    As JSON, please: {0}.
    JSON with {0}:
    Write a JSON object with the fields {0}.
    What are {0}? Answer as JSON.
    I want {0} in JSON.
    Keys: {0}. Return JSON."""
)
TEXT_NAMES = ("Text", "Input", "Data", "Message", "Note")
NO_DATA = lines(
    """There is no data to fill in.
    The text is empty, so there is nothing to return.
    I have no data for this form.""",
    3,
)


def generate(draw: Draw, kind: str) -> Example:
    """One short example."""
    fields, text = _fields_and_text(draw)
    schema, value = schema_and_value(draw, fields)
    if draw.chance(0.012):
        return _without_data(draw, kind, schema)
    messages, response_format = _prompt(draw, fields, schema, text)
    answer, checker = minified(value), "json"
    layout = draw.random.random()
    if layout < 0.025:
        messages[-1] = _with_wish(
            messages[-1], draw.pick(("Indent the JSON by two spaces.", "Pretty-print it."))
        )
        answer, checker = json.dumps(value, ensure_ascii=False, indent=2), "json_text"
    elif layout < 0.045 and response_format is None:
        messages[-1] = _with_wish(messages[-1], "Put the JSON in a code block.")
        answer, checker = f"```json\n{answer}\n```", "fenced_json"
    expected = answer if checker == "json_text" else value
    return Example(kind, messages, reply(answer), checker, expected, response_format=response_format)


def minified(value: Any) -> str:
    """JSON without spaces, non-ASCII as it is."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _fields_and_text(draw: Draw) -> tuple[list[Field], str]:
    """The fields that are asked for, in schema order, and a text that states all but missing ones."""
    count = draw.weighted({1: 0.14, 2: 0.30, 3: 0.36, 4: 0.20})
    camel = draw.chance(0.1)
    if draw.chance(0.3):
        sentence, specs, asked = draw_sentence(draw, count)
        stated = {spec[0]: make_field(draw, spec, camel=camel) for spec in specs}
        return [stated[name] for name, _ in asked], fill_sentence(sentence, list(stated.values()))
    _, specs = draw_specs(draw, count)
    fields = [make_field(draw, spec, camel=camel) for spec in specs]
    if draw.chance(0.06) and len(fields) > 1:
        index = draw.integer(0, len(fields) - 1)
        fields[index] = _missing(draw, fields[index])
    stated_fields = [field for field in fields if field.shown]
    if draw.chance(0.1):
        extra = make_field(draw, draw_specs(draw, 1)[1][0], camel=camel)
        stated_fields += [extra] if extra.key not in {field.key for field in fields} else []
    return fields, state(draw, draw.shuffled(stated_fields) if draw.chance(0.3) else stated_fields)


def _missing(draw: Draw, field: Field) -> Field:
    """A field that the text doesn't state: absent from the answer, or null where the schema wants it."""
    required = draw.chance(0.5)
    schema = dict(field.value.schema)
    if required and "enum" in schema:
        schema = {"enum": [*schema["enum"], None]}
    elif required:
        schema["type"] = [schema["type"], "null"]
    return Field(field.key, field.name, field.label, Value(schema, None, ""), "", required)


def schema_and_value(draw: Draw, fields: Sequence[Field]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The schema of an object with these fields in this order, and the object itself."""
    properties = {field.key: dict(field.value.schema) for field in fields}
    value = {
        field.key: field.value.value for field in fields if field.value.value is not None or field.required
    }
    if draw.chance(0.04):
        properties[draw.pick(list(properties))]["description"] = draw.pick(
            ("as given", "from the text", "required")
        )
    if draw.chance(0.03) and "version" not in properties:
        constant = draw.pick(("v1", "form", 1, True))
        properties["version"] = {"const": constant}
        value["version"] = constant
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    optional = {field.key for field in fields if not field.required}
    if optional or draw.chance(0.75):
        schema["required"] = [key for key in properties if key not in optional]
    if draw.chance(0.3):
        schema["additionalProperties"] = False
    return schema, value


def _prompt(
    draw: Draw, fields: Sequence[Field], schema: dict[str, Any], text: str
) -> tuple[list[Message], dict[str, Any] | None]:
    """Where schema, request and text stand."""
    ask = styled(draw, draw.of(ASK))
    place = draw.random.random()
    head = [system(draw.of(SYSTEMS))] if draw.chance(0.12) else []
    if place < 0.38:
        wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        said = text if draw.chance(0.55) else _joined(draw, ask, text)
        return [*head, user(said)], wanted
    simple = all(map(_needs_no_schema, fields)) and len(schema["properties"]) == len(fields)
    if place < 0.5 and simple:
        listed = _listed(draw, fields)
        wanted_object = {"type": "json_object"} if draw.chance(0.4) else None
        return [
            *head,
            user(_joined(draw, styled(draw, draw.of(LIST_ASK)).format(listed), text)),
        ], wanted_object
    shown = schema_text(draw, schema)
    if place < 0.62:
        return [system(f"{ask}\n{shown}"), user(text)], None
    parts = [f"{ask}\n{shown}", text] if draw.chance(0.6) else [ask, _named(draw, text), f"Schema: {shown}"]
    if draw.chance(0.25):
        parts.reverse()
    return [*head, user(draw.pick(("\n\n", "\n", "\n\n")).join(parts))], None


def _needs_no_schema(field: Field) -> bool:
    """Whether the text shows the value as the answer has to have it."""
    value = field.value.value
    return value is not None and (not isinstance(value, str) or field.value.shown == value)


def schema_text(draw: Draw, schema: dict[str, Any]) -> str:
    """A schema as people paste it: mostly minified."""
    if draw.chance(0.7):
        return minified(schema)
    return json.dumps(schema, ensure_ascii=False)


def _listed(draw: Draw, fields: Sequence[Field]) -> str:
    """The wanted keys without a schema."""
    if draw.chance(0.3) or any(isinstance(field.value.value, bool) for field in fields):
        return ", ".join(f"{field.key} ({field.value.schema.get('type', 'string')})" for field in fields)
    keys = [field.key for field in fields]
    if len(keys) == 1 or draw.chance(0.5):
        return ", ".join(keys)
    return f"{', '.join(keys[:-1])} and {keys[-1]}"


def _named(draw: Draw, text: str) -> str:
    return f"{draw.pick(TEXT_NAMES)}: {text}" if draw.chance(0.6) else text


def _joined(draw: Draw, ask: str, text: str) -> str:
    parts = [ask, _named(draw, text)]
    if draw.chance(0.3):
        parts.reverse()
    return draw.pick(("\n\n", "\n", " ", "\n\n")).join(parts)


def _with_wish(message: Message, wish: str) -> Message:
    return {**message, "content": f"{message['content']}\n{wish}"}


def _without_data(draw: Draw, kind: str, schema: dict[str, Any]) -> Example:
    """Nothing to fill in: a short honest answer."""
    empty = draw.pick(("", "Text: ", "Input: (empty)", "There is no text yet."))
    asked = f"{styled(draw, draw.of(ASK))}\n{schema_text(draw, schema)}\n\n{empty}".strip()
    answer = draw.pick(NO_DATA)
    return Example(kind, [user(asked)], reply(answer), "one_of", [text.rstrip(".") for text in NO_DATA])
