"""Draws the fields of a form: names that belong together or were never seen together, kinds, values."""

import re
from dataclasses import dataclass, replace

from training.tasks import words
from training.tasks.draw import Draw
from training.tasks.topics import SENTENCES, TOPIC_NAMES, TOPICS
from training.tasks.values import Value, draw_value

Spec = tuple[str, str]
"""(name, kind of value)"""

UNITS = {
    "kg": "kg",
    "cm": "cm",
    "gb": "GB",
    "kb": "kB",
    "mg": "mg",
    "m": "m",
    "m2": "m2",
    "ha": "ha",
    "kmh": "km/h",
}
PLACEHOLDER = re.compile(r"\{(\w+)\}")
_ARRAYS = frozenset(("foods", "tags", "people", "numbers"))


@dataclass(frozen=True, slots=True)
class Field:
    """One field. `key` is its name in the schema, `label` what a text calls it, `shown` its value there."""

    key: str
    name: str
    label: str
    value: Value
    shown: str
    required: bool = True


def draw_specs(draw: Draw, count: int) -> tuple[str, list[Spec]]:
    """A topic ("" for none), and at most `count` names and kinds that the split may use together."""
    while True:
        topic = draw.of(TOPIC_NAMES) if draw.chance(0.62) else ""
        specs = draw.some(TOPICS[topic], count) if topic else _compound_specs(draw, count)
        if not draw.chance(0.3):
            specs = _without_second_array(specs)
        if allowed(draw, specs):
            return topic, specs


def draw_sentence(draw: Draw, count: int) -> tuple[str, list[Spec], list[Spec]]:
    """A sentence of a topic, the fields that it states, and those of them that are asked for."""
    while True:
        topic = draw.of(TOPIC_NAMES)
        if topic not in SENTENCES:
            continue
        sentence = draw.pick(SENTENCES[topic])
        stated = [spec for spec in TOPICS[topic] if f"{{{spec[0]}}}" in sentence]
        asked = stated if draw.chance(0.6) else draw.some(stated, count)
        if len(asked) <= count and allowed(draw, asked):
            return sentence, stated, asked


def allowed(draw: Draw, specs: list[Spec]) -> bool:
    """Whether this set of names belongs to the split: one set in 25 is never used in training."""
    return draw.allows(" ".join(sorted(name for name, _ in specs)))


def make_field(draw: Draw, spec: Spec, *, camel: bool = False, required: bool = True) -> Field:
    """A field with a drawn value."""
    name, kind = spec
    value = draw_value(draw, kind)
    key = camel_case(name) if camel else name
    label, shown = name.replace("_", " "), value.shown
    stem, _, unit = name.rpartition("_")
    if unit in UNITS and draw.chance(0.6):
        label, shown = stem.replace("_", " "), f"{shown} {UNITS[unit]}"
    return Field(key, name, label, value, shown, required)


def make_literal_field(draw: Draw, spec: Spec) -> Field:
    """A field that the text shows as JSON has it: for requests without a schema, which can't ask for more."""
    field = make_field(draw, spec)
    value = field.value.value
    if isinstance(value, str):
        return replace(field, shown=value, value=replace(field.value, shown=value))
    if isinstance(value, (bool, list)):
        return field
    return replace(field, shown=str(value), value=replace(field.value, shown=str(value)))


def camel_case(name: str) -> str:
    """`bolt_count` -> `boltCount`."""
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


def _compound_specs(draw: Draw, count: int) -> list[Spec]:
    """Names put together from word lists; half of the sets share their noun."""
    shared = words.noun(draw) if draw.chance(0.5) else ""
    specs: dict[str, str] = {}
    while len(specs) < count:
        name, kind = _compound_spec(draw, shared or words.noun(draw))
        specs[name] = kind
    return list(specs.items())


def _compound_spec(draw: Draw, noun: str) -> Spec:
    form = draw.random.random()
    if form < 0.4:
        last = draw.of(words.PROPERTIES)
        kind = draw.pick(("0-20", "0-99", "0-999", "100-9999", "1.0-99.9", "0.5-999.9"))
    elif form < 0.75:
        last = draw.of(words.LABELS)
        kind = draw.pick(
            ("person", "city", "name", "name", "code", "thing", "noun", "word", "product", "odd")
        )
    elif form < 0.85:
        return draw.of(words.FLAGS), "flag"
    else:
        last = draw.pick(
            ("date", "time", "tags", "state", "items", "numbers", "version", "file", "email", "colour")
        )
        kind = _KIND_OF.get(last) or "|".join(draw.several_of(words.TAGS, draw.integer(2, 4)))
    name = last.replace(" ", "_")
    return (name if draw.chance(0.35) else f"{noun}_{name}"), kind


_KIND_OF = {
    "date": "date",
    "time": "clock",
    "tags": "tags",
    "items": "foods",
    "numbers": "numbers",
    "version": "version",
    "file": "file",
    "email": "email",
    "colour": "colour",
}


def _without_second_array(specs: list[Spec]) -> list[Spec]:
    """At most one list, which keeps the input short and its commas clear."""
    arrays = [spec for spec in specs if spec[1] in _ARRAYS]
    return [spec for spec in specs if spec not in arrays[1:]]
