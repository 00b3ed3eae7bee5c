"""Values of a field by kind: the JSON value, its schema, and how a text shows it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from training.tasks import words
from training.tasks.draw import Draw

ODD = (
    'the "{0}" {1}',
    "{0} \\ {1}",
    "C:\\{0}\\{1}",
    "{0}ë & {1}ö",
    "{0} – {1}",
    "{0}'s {1}",
    "<{0}> {1}",
    "{0}/{1}",
    "{0}, {1}",
    "{0}: {1}",
)
SMALL_NUMBERS = (
    *(
        "zero",
        "one",
        "two",
        "three",
        "four",
        "five",
        "six",
        "seven",
        "eight",
        "nine",
        "ten",
        "eleven",
        "twelve",
    ),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"),
)


@dataclass(frozen=True, slots=True)
class Value:
    """A drawn value. `shown` is how the input states it; `flag` marks yes/no values."""

    schema: dict[str, Any]
    value: Any
    shown: str
    flag: bool = False


def draw_value(draw: Draw, kind: str) -> Value:
    """A value of this kind. Raises KeyError for a kind that isn't known."""
    if "|" in kind:
        return _choice(draw, kind.split("|"))
    low, dash, high = kind.rpartition("-")
    if dash and high[:1].isdigit():
        return _decimal(draw, float(low), float(high)) if "." in kind else _whole(draw, int(low), int(high))
    return KINDS[kind](draw)


def _whole(draw: Draw, low: int, high: int) -> Value:
    value = draw.integer(low, high)
    shown = str(value)
    if 0 <= value <= 20 and draw.chance(0.06):
        shown = SMALL_NUMBERS[value]
    elif value >= 1000 and draw.chance(0.1):
        shown = f"{value:,}"
    schema: dict[str, Any] = {"type": "integer"}
    if draw.chance(0.08):
        schema["minimum"] = low
    if draw.chance(0.04):
        schema["maximum"] = high
    return Value(schema, value, shown)


def _decimal(draw: Draw, low: float, high: float) -> Value:
    value = round(low + (high - low) * draw.random.random(), draw.pick((1, 1, 2)))
    return Value({"type": "number"}, value, str(value))


def _choice(draw: Draw, choices: list[str]) -> Value:
    value = draw.pick(choices)
    shown = value.capitalize() if draw.chance(0.12) else value
    schema: dict[str, Any] = {"type": "string", "enum": choices} if draw.chance(0.5) else {"enum": choices}
    return Value(schema, value, shown)


def text(value: str, **more: Any) -> Value:
    """A string that the input shows as it is."""
    return Value({"type": "string", **more}, value, value)


def _flag(draw: Draw) -> Value:
    value = draw.chance(0.5)
    yes, no = draw.pick((("yes", "no"), ("yes", "no"), ("true", "false"), ("true", "false"), ("on", "off")))
    return Value({"type": "boolean"}, value, yes if value else no, flag=True)


def _date(draw: Draw) -> Value:
    value = words.date(draw)
    shown = value
    if draw.chance(0.1):
        year, month, day = value.split("-")
        shown = f"{int(day)} {words.MONTHS[int(month) - 1]} {year}"
    more = {"format": "date"} if shown != value or draw.chance(0.3) else {}
    return Value({"type": "string", **more}, value, shown)


def _list(draw: Draw, items: list[str]) -> Value:
    shown = items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
    return Value({"type": "array", "items": {"type": "string"}}, items, shown)


def _code(draw: Draw) -> Value:
    return text(words.code(draw), **({"maxLength": 12} if draw.chance(0.04) else {}))


def _numbers(draw: Draw) -> Value:
    items = [draw.integer(0, 99) for _ in range(draw.integer(2, 4))]
    shown = f"{', '.join(map(str, items[:-1]))} and {items[-1]}"
    return Value({"type": "array", "items": {"type": "integer"}}, items, shown)


def _odd(draw: Draw) -> Value:
    return text(draw.pick(ODD).format(words.noun(draw), draw.of(words.ADJECTIVES)))


def _note(draw: Draw) -> Value:
    """A text of one or two lines with what has to be escaped elsewhere."""
    first = draw.pick(ODD).format(words.noun(draw), draw.of(words.ADJECTIVES))
    return text(first if draw.chance(0.7) else f"{first}\n{words.thing(draw)}")


def _size(draw: Draw) -> Value:
    """A nested object."""
    width, height = draw.integer(1, 90), draw.integer(1, 90)
    properties = {"width": {"type": "integer"}, "height": {"type": "integer"}}
    schema = {"type": "object", "properties": properties, "required": ["width", "height"]}
    return Value(schema, {"width": width, "height": height}, f"{width} x {height}")


def _goods(draw: Draw) -> Value:
    """A list of objects."""
    goods = [
        {"item": item, "count": draw.integer(1, 30)}
        for item in draw.several_of(words.FOODS, draw.integer(1, 3))
    ]
    said = [f"{one['count']} {one['item']}" for one in goods]
    properties = {"item": {"type": "string"}, "count": {"type": "integer"}}
    schema = {
        "type": "array",
        "items": {"type": "object", "properties": properties, "required": ["item", "count"]},
    }
    return Value(schema, goods, said[0] if len(said) == 1 else f"{', '.join(said[:-1])} and {said[-1]}")


def _email(draw: Draw) -> Value:
    return text(f"{draw.of(words.FIRST).lower()}@{words.invented_word(draw)}.example")


def _file(draw: Draw) -> Value:
    return text(
        f"{draw.of(words.NOUNS)}{draw.pick(('', '_', '-'))}{draw.integer(1, 99)}.{draw.pick(_SUFFIXES)}"
    )


def _version(draw: Draw) -> Value:
    return text(f"{draw.integer(0, 9)}.{draw.integer(0, 30)}.{draw.integer(0, 20)}")


def _host(draw: Draw) -> Value:
    return text(f"{draw.of(words.NOUNS)}-{draw.integer(1, 99)}")


def _people(draw: Draw) -> Value:
    return _list(draw, [words.person(draw) for _ in range(draw.integer(1, 3))])


_SUFFIXES = ("txt", "md", "csv", "pdf", "png", "log", "json")

KINDS: dict[str, Callable[[Draw], Value]] = {
    "person": lambda draw: text(words.person(draw)),
    "city": lambda draw: text(words.city(draw)),
    "country": lambda draw: text(draw.of(words.COUNTRIES)),
    "job": lambda draw: text(draw.of(words.JOBS)),
    "colour": lambda draw: text(draw.of(words.COLOURS)),
    "product": lambda draw: text(draw.of(words.PRODUCTS)),
    "noun": lambda draw: text(words.noun(draw)),
    "thing": lambda draw: text(words.thing(draw)),
    "name": lambda draw: text(words.proper_name(draw)),
    "word": lambda draw: text(words.word(draw)),
    "clock": lambda draw: text(words.clock(draw)),
    "foods": lambda draw: _list(draw, draw.several_of(words.FOODS, draw.integer(1, 3))),
    "tags": lambda draw: _list(draw, draw.several_of(words.TAGS, draw.integer(1, 3))),
    "people": _people,
    "numbers": _numbers,
    "flag": _flag,
    "date": _date,
    "code": _code,
    "email": _email,
    "file": _file,
    "version": _version,
    "host": _host,
    "odd": _odd,
    "note": _note,
    "size": _size,
    "goods": _goods,
}
