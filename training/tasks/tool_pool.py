"""Invented functions that a model may call, with the ways in which people ask for them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.tasks.draw import Draw, Pool
from training.tasks.topics import TOPICS
from training.tasks.values import draw_value

# One function a line: name | what it does | parameters, "?" for optional ones | requests
_TABLE = Path(__file__).with_name("functions.txt")


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter with the kind of its values."""

    name: str
    kind: str
    required: bool = True


@dataclass(frozen=True, slots=True)
class Function:
    """A callable function; each request is a sentence with `{parameter}`s."""

    name: str
    description: str
    parameters: tuple[Parameter, ...]
    requests: tuple[str, ...]


def _parse(line: str) -> Function:
    name, description, parameters, requests = (part.strip() for part in line.split(" | ", 3))
    found = []
    for parameter in parameters.split():
        key, _, kind = parameter.partition(":")
        found.append(Parameter(key.rstrip("?"), kind, not key.endswith("?")))
    return Function(
        name, description, tuple(found), tuple(request.strip() for request in requests.split(" ; "))
    )


def _of_topic(topic: str) -> list[Function]:
    """Four functions on the records of a topic."""
    fields = [Parameter(name, kind) for name, kind in TOPICS[topic]]
    said = topic.replace("_", " ")
    key, wide = fields[0], tuple(fields[:3])
    listed = ", ".join(f"{field.name.replace('_', ' ')} {{{field.name}}}" for field in wide)
    one = f"{key.name.replace('_', ' ')} {{{key.name}}}"
    a_said = f"{'an' if said[0] in 'aeiou' else 'a'} {said}"
    shown, second = f"{{{key.name}}}", fields[1].name.replace("_", " ")
    value = f"{{{fields[1].name}}}"
    return [
        Function(
            f"create_{topic}",
            f"Create {a_said}",
            wide,
            (f"Create {a_said}: {listed}.", f"New {said}: {listed}"),
        ),
        Function(
            f"find_{topic}",
            f"Find {a_said}",
            (key,),
            (f"Find the {said} with {one}.", f"Which {said} has {one}?"),
        ),
        Function(
            f"delete_{topic}",
            f"Delete {a_said}",
            (key,),
            (f"Delete the {said} {shown}.", f"Remove {said} {shown}."),
        ),
        Function(
            f"update_{topic}",
            f"Change {a_said}",
            tuple(fields[:2]),
            (
                f"Change {said} {shown}: {second} is now {value}.",
                f"Set {second} of {said} {shown} to {value}.",
            ),
        ),
    ]


_HAND = [_parse(line) for line in _TABLE.read_text(encoding="utf-8").splitlines()]
FUNCTIONS = {f.name: f for f in (*_HAND, *(f for topic in TOPICS for f in _of_topic(topic)))}
HAND_NAMES = Pool([function.name for function in _HAND])
NAMES = Pool(tuple(FUNCTIONS))


def draw_function(draw: Draw) -> Function:
    """One function; those written by hand are as likely as all others together."""
    return FUNCTIONS[draw.of(HAND_NAMES if draw.chance(0.5) else NAMES)]


def tool_of(draw: Draw, function: Function) -> dict[str, Any]:
    """The function as an entry of an OpenAI tool list. Schemas are drawn: bounds come and go."""
    properties = {p.name: draw_value(draw, p.kind).schema for p in function.parameters}
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    required = [p.name for p in function.parameters if p.required]
    if required:
        parameters["required"] = required
    entry: dict[str, Any] = {"name": function.name, "parameters": parameters}
    if draw.chance(0.75):
        entry = {"name": function.name, "description": function.description, "parameters": parameters}
    return {"type": "function", "function": entry}
