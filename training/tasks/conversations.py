"""Two to six turns: follow-ups, corrections, changes of format, recall, a tool call in the middle, thanks."""

from collections.abc import Callable, Sequence
from typing import Any

from training.tasks import words
from training.tasks.draw import Draw, Pool, lines
from training.tasks.example import Example, Message, reply, system, user
from training.tasks.fields import Field, draw_specs, make_literal_field
from training.tasks.json_short import minified
from training.tasks.stating import state
from training.tasks.tool_pool import FUNCTIONS, tool_of
from training.tasks.wording import SYSTEMS

HELLO = lines(
    """Hello!
    Hi.
    Good morning.
    Hi there!
    Hello, can you help me?
    Good evening!
    Hey.""",
    7,
)
GREETED = "Hello! How can I help?"
THANKS = lines(
    """Thanks!
    Thank you.
    Thank you very much.
    Great, thanks.
    That helps, thank you.
    Perfect.""",
    6,
)
WELCOME = "You are welcome."
ASKED_AGAIN = Pool(("get_weather", "get_time", "track_order", "count_rows", "read_sensor", "get_balance"))


def generate(draw: Draw, kind: str) -> Example:
    """One conversation; the last answer is judged."""
    example = draw.weighted(MAKERS)(draw, kind)
    messages = list(example.messages)
    if draw.chance(0.2):
        messages = [user(draw.of(HELLO)), reply(GREETED), *messages]
    if draw.chance(0.15):
        messages = [system(draw.of(SYSTEMS)), *messages]
    if draw.chance(0.08) and not example.tools:
        return Example(
            kind, [*messages, dict(example.answer), user(draw.of(THANKS))], reply(WELCOME), "text", WELCOME
        )
    return Example(
        kind,
        messages,
        example.answer,
        example.checker,
        example.expected,
        tools=example.tools,
        response_format=example.response_format,
        thinking=example.thinking,
    )


def _recall(draw: Draw, kind: str) -> Example:
    """Facts told in the first turn are asked for later."""
    keys = draw.some(list(FACTS), draw.integer(1, 3))
    facts = {key: FACTS[key](draw) for key in keys}
    told = " ".join(f"My {key} is {value}." for key, value in facts.items())
    messages = [user(told), reply(draw.pick(("OK.", "I will remember that.", "Noted.")))]
    for _ in range(draw.integer(0, 2)):
        messages += _small_task(draw)
    key = draw.pick(keys)
    question = draw.pick(("What is my {0}?", "Do you remember my {0}?", "My {0}?", "Tell me my {0}."))
    return Example(kind, [*messages, user(question.format(key))], reply(facts[key]), "text", facts[key])


FACTS: dict[str, Callable[[Draw], str]] = {
    "name": words.person,
    "city": words.city,
    "job": lambda draw: draw.of(words.JOBS),
    "color": lambda draw: draw.of(words.COLOURS),
    "code": words.code,
    "pet": words.proper_name,
    "number": lambda draw: str(draw.integer(2, 999)),
    "food": lambda draw: draw.of(words.FOODS),
}


def _small_task(draw: Draw) -> list[Message]:
    """A turn about something else."""
    form = draw.integer(0, 3)
    if form == 0:
        a, b = draw.integer(2, 40), draw.integer(2, 40)
        return [user(f"What is {a} + {b}?"), reply(str(a + b))]
    if form == 1:
        items = draw.several_of(words.FOODS, draw.integer(2, 4))
        return [user(f"Sort these words: {', '.join(items)}"), reply(", ".join(sorted(items)))]
    if form == 2:
        word = words.invented_word(draw)
        return [user(f"Write {word} in capitals."), reply(word.upper())]
    return [user(draw.of(THANKS)), reply(WELCOME)]


def _fields(draw: Draw, low: int = 2, high: int = 4) -> list[Field]:
    """Fields whose sentence forms are clear."""
    while True:
        fields = [make_literal_field(draw, spec) for spec in draw_specs(draw, draw.integer(low, high))[1]]
        if len(fields) >= low:
            return fields


def _value(fields: Sequence[Field]) -> dict[str, Any]:
    return {field.key: field.value.value for field in fields}


def _correction(draw: Draw, kind: str) -> Example:
    """JSON, then one value is corrected."""
    fields = _fields(draw)
    messages = [user(f"Write the data as JSON.\n\n{state(draw, fields)}"), reply(minified(_value(fields)))]
    index = draw.integer(0, len(fields) - 1)
    old = fields[index]
    new = make_literal_field(draw, (old.name, _kind_of(old)))
    changed = {**_value(fields), old.key: new.value.value}
    request = draw.pick(
        ("No, the {0} is {1}.", "Sorry, {0} is {1}.", "Change the {0} to {1}.", "Set {0} to {1}.")
    )
    messages.append(user(request.format(old.label, new.shown)))
    return Example(kind, messages, reply(minified(changed)), "json", changed)


def _kind_of(field: Field) -> str:
    """A kind of value like the one that the field has."""
    value = field.value.value
    if isinstance(value, bool):
        return "flag"
    if isinstance(value, int):
        return "0-999"
    if isinstance(value, float):
        return "0.5-99.9"
    if isinstance(value, list):
        return "tags"
    return "|".join(field.value.schema["enum"]) if "enum" in field.value.schema else "name"


def _as_json(draw: Draw, kind: str) -> Example:
    """A value out of a text, then all of it as JSON."""
    fields = _fields(draw)
    asked = draw.pick(fields)
    messages = [user(f"What is the {asked.label}?\n\n{state(draw, fields)}"), reply(asked.shown)]
    keys = ", ".join(field.key for field in fields)
    request = draw.pick(
        ("Now all of it as JSON with the keys {0}.", "And {0} as JSON?", "As JSON, please: {0}.")
    )
    value = _value(fields)
    return Example(kind, [*messages, user(request.format(keys))], reply(minified(value)), "json", value)


def _other_field(draw: Draw, kind: str) -> Example:
    """A value out of a text, then another one."""
    fields = _fields(draw)
    first, *others = draw.shuffled(fields)
    messages = [user(f"{state(draw, fields)}\n\nWhat is the {first.label}?"), reply(first.shown)]
    for field in others[:-1]:
        messages += [user(f"And the {field.label}?"), reply(field.shown)]
    last = others[-1]
    return Example(kind, [*messages, user(f"And the {last.label}?")], reply(last.shown), "text", last.shown)


def _the_second(draw: Draw, kind: str) -> Example:
    """A list, then one of its items by place."""
    items = draw.several_of(draw.pick((words.FOODS, words.CITIES, words.NOUNS)), draw.integer(3, 6))
    ordered = sorted(items) if draw.chance(0.5) else items[::-1]
    request = "Sort these words." if ordered == sorted(items) else "Reverse this list."
    messages = [user(f"{request}\n\n{', '.join(items)}"), reply(", ".join(ordered))]
    place, index = draw.pick((("first", 0), ("second", 1), ("third", 2), ("last", -1)))
    question = draw.pick(("Which one is {0}?", "Give me the {0} one.", "The {0} one?"))
    return Example(
        kind, [*messages, user(question.format(place))], reply(ordered[index]), "text", ordered[index]
    )


def _go_on(draw: Draw, kind: str) -> Example:
    """Arithmetic that goes on from the last result; with thinking, earlier reasoning is dropped or kept."""
    thinking = draw.chance(0.4)
    a, b = draw.integer(2, 90), draw.integer(2, 90)
    total = a + b
    messages = [user(f"What is {a} + {b}?"), reply(str(total), f"{a} + {b} = {total}" if thinking else "")]
    step = ""
    for turn in range(draw.integer(1, 3)):
        c = draw.integer(1, 40)
        adds = draw.chance(0.5)
        after = total + c if adds else total - c
        step = f"{total} {'+' if adds else '-'} {c} = {after}"
        if turn:
            messages.append(reply(str(total)))
        messages.append(user(f"And {'plus' if adds else 'minus'} {c}?"))
        total = after
    answer = reply(str(total), step if thinking else "")
    return Example(kind, messages, answer, "number", float(total), thinking=thinking)


def _tool_in_the_middle(draw: Draw, kind: str) -> Example:
    """A call, its result, an answer, and a follow-up with another value for the same call."""
    name = draw.of(ASKED_AGAIN)
    function = FUNCTIONS[name]
    key = function.parameters[0].name
    first, second = (_argument(draw, name) for _ in range(2))
    result = {"value": draw.integer(1, 900)}
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": name, "arguments": minified({key: first})},
    }
    messages = [
        user(function.requests[0].format(**{key: first})),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": minified(result)},
        reply(f"The value is {result['value']}."),
        user(draw.pick(("And for {0}?", "What about {0}?", "Now for {0}.")).format(second)),
    ]
    answer = reply("")
    again = {"name": name, "arguments": minified({key: second})}
    answer["tool_calls"] = [{"id": "call_2", "type": "function", "function": again}]
    tools = [tool_of(draw, function)]
    return Example(kind, messages, answer, "calls", [(name, {key: second})], tools=tools)


def _argument(draw: Draw, name: str) -> str:
    if name in ("get_weather", "get_time"):
        return words.city(draw)
    return draw.of(words.NOUNS) if name == "count_rows" else words.code(draw)


MAKERS: dict[Callable[[Draw, str], Example], float] = {
    _recall: 2.0,
    _correction: 2.0,
    _as_json: 2.0,
    _other_field: 1.5,
    _the_second: 1.0,
    _go_on: 1.2,
    _tool_in_the_middle: 1.2,
}
