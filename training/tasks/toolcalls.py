"""Tool calls: one call or several, answers from results, errors, nothing that fits, a missing argument."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from training.tasks import words
from training.tasks.draw import Draw, lines
from training.tasks.example import Example, Message, reply, system, user
from training.tasks.fields import PLACEHOLDER, make_field
from training.tasks.tool_pool import Function, draw_function, tool_of
from training.tasks.values import draw_value
from training.tasks.wording import SYSTEMS

BEFORE = lines(
    """I will look that up.
    One moment.
    Let me check.
    Sure.
    I'll do that now.
    OK.""",
    6,
)
NOTHING = lines(
    """None of the tools can do that.
    I have no tool for that.
    I can't do that with these tools.""",
    3,
)
FAILED = lines(
    """That did not work: {0}.
    The tool failed: {0}.
    There was an error: {0}.""",
    3,
)
ERRORS = lines(
    """not found
    no permission
    service not reachable
    time limit reached
    unknown id
    too many requests""",
    6,
)
OTHER_REQUESTS = lines(
    """Write a poem about the {0}.
    Tell me a joke about a {0}.
    How do I paint a {0}?
    Who invented the {0}?
    Sing a song for {1}.
    What is your favourite {0}?
    Draw a {0} for {1}.
    How old is {1}?""",
    8,
)
_BOUNDS = ("minimum", "maximum", "maxLength", "format")


@dataclass(slots=True)
class Wanted:
    """One request in words and the call that it wants."""

    function: Function
    text: str
    arguments: dict[str, Any]


def generate(draw: Draw, kind: str) -> Example:
    """One example with one to four tools in its prompt."""
    maker = draw.weighted(MAKERS)
    return maker(draw, kind)


def _one_call(draw: Draw, kind: str) -> Example:
    wanted = _wanted(draw, draw_function(draw))
    return _calls(draw, kind, [wanted], [user(wanted.text)])


def _several_calls(draw: Draw, kind: str) -> Example:
    """Two or three calls: of one function with other values, or of different ones."""
    first = draw_function(draw)
    count = draw.weighted({2: 0.75, 3: 0.25})
    functions = (
        [first] * count if draw.chance(0.5) else [first, *(draw_function(draw) for _ in range(count - 1))]
    )
    several = [_wanted(draw, function) for function in functions]
    between = draw.pick((" ", " Also: ", "\n", " And then: "))
    return _calls(draw, kind, several, [user(between.join(wanted.text for wanted in several))])


def _calls(draw: Draw, kind: str, several: Sequence[Wanted], messages: list[Message]) -> Example:
    """The example whose answer is these calls."""
    tools = _tools(draw, [wanted.function for wanted in several])
    thinking = draw.chance(0.35)
    answer = reply(draw.of(BEFORE) if draw.chance(0.15) else "", _thoughts(several) if thinking else "")
    answer["tool_calls"] = [_tool_call(draw, wanted) for wanted in several]
    expected = [(wanted.function.name, wanted.arguments) for wanted in several]
    head = [system(draw.of(SYSTEMS))] if draw.chance(0.15) else []
    return Example(kind, [*head, *messages], answer, "calls", expected, tools=tools, thinking=thinking)


def _from_result(draw: Draw, kind: str) -> Example:
    """The results are there: an answer in words that holds every value."""
    wanted = _wanted(draw, draw_function(draw))
    field = make_field(draw, (draw.pick(("state", "total", "name", "count", "place", "time")), "name"))
    number = make_field(draw, (draw.pick(("amount", "size", "level", "value")), "0-999"))
    fields = [field, number] if draw.chance(0.5) else [draw.pick((field, number))]
    result = json.dumps({one.key: one.value.value for one in fields})
    said = " and ".join(f"the {one.label} is {one.value.value}" for one in fields)
    text = f"{said[0].upper()}{said[1:]}."
    values = [str(one.value.value) for one in fields]
    return _after_call(draw, kind, wanted, result, text, "contains", values)


def _error(draw: Draw, kind: str) -> Example:
    """The call failed: a plain report."""
    error = draw.of(ERRORS)
    text = draw.of(FAILED).format(error)
    wanted = _wanted(draw, draw_function(draw))
    return _after_call(draw, kind, wanted, json.dumps({"error": error}), text, "contains", [error])


def _after_call(
    draw: Draw, kind: str, wanted: Wanted, result: str, text: str, checker: str, expected: list[str]
) -> Example:
    call = _tool_call(draw, wanted)
    call["id"] = "call_1"
    messages = [
        user(wanted.text),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": result},
    ]
    return Example(kind, messages, reply(text), checker, expected, tools=_tools(draw, [wanted.function]))


def _corrected(draw: Draw, kind: str) -> Example:
    """The tool wants another form of a date: the same call again, corrected."""
    function = draw_function(draw)
    while not any(p.kind == "date" and p.required for p in function.parameters):
        function = draw_function(draw)
    wanted = _wanted(draw, function)
    key = next(p.name for p in function.parameters if p.kind == "date" and p.required)
    if key not in wanted.arguments:
        return _one_call(draw, kind)
    year, month, day = wanted.arguments[key].split("-")
    wrong = Wanted(function, wanted.text, {**wanted.arguments, key: f"{day}.{month}.{year}"})
    call = _tool_call(draw, wrong)
    call["id"] = "call_1"
    error = json.dumps({"error": f"{key} must be YYYY-MM-DD"})
    messages = [
        user(wanted.text),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": error},
    ]
    return _calls(draw, kind, [wanted], messages)


def _no_tool(draw: Draw, kind: str) -> Example:
    text = draw.of(OTHER_REQUESTS).format(draw.of(words.NOUNS), draw.of(words.FIRST))
    answers = [line.rstrip(".") for line in NOTHING]
    tools = _tools(draw, [draw_function(draw)])
    return Example(kind, [user(text)], reply(draw.pick(NOTHING.train)), "one_of", answers, tools=tools)


def _missing(draw: Draw, kind: str) -> Example:
    """A required argument isn't told: a question back that names it."""
    function = draw_function(draw)
    while len([p for p in function.parameters if p.required]) < 2:
        function = draw_function(draw)
    left_out = draw.pick([p for p in function.parameters if p.required])
    told = [p for p in function.parameters if p.required and p is not left_out]
    said = ", ".join(f"{p.name.replace('_', ' ')} {draw_value(draw, p.kind).shown}" for p in told)
    text = f"{function.description}, please: {said}."
    label = left_out.name.replace("_", " ")
    question = draw.pick(("What is the {0}?", "Which {0}?", "Please tell me the {0}.")).format(label)
    return Example(kind, [user(text)], reply(question), "contains", [label], tools=_tools(draw, [function]))


def _wanted(draw: Draw, function: Function) -> Wanted:
    """A request that gives every required parameter, and the arguments that it states."""
    required = {p.name for p in function.parameters if p.required}
    sound = [text for text in function.requests if required <= set(PLACEHOLDER.findall(text))]
    text = draw.pick(sound)
    named = set(PLACEHOLDER.findall(text))
    values = {p.name: draw_value(draw, p.kind) for p in function.parameters if p.name in named}
    filled = PLACEHOLDER.sub(lambda match: values[match.group(1)].shown, text)
    return Wanted(function, filled, {name: value.value for name, value in values.items()})


def _tool_call(draw: Draw, wanted: Wanted) -> dict[str, Any]:
    arguments = json.dumps(wanted.arguments, ensure_ascii=False)
    return {"type": "function", "function": {"name": wanted.function.name, "arguments": arguments}}


def _thoughts(several: Sequence[Wanted]) -> str:
    """One line a call: which function, and what it needs."""
    lines_ = []
    for wanted in several:
        needs = ", ".join(wanted.arguments) or "nothing"
        lines_.append(f"Call {wanted.function.name} with {needs}.")
    return "\n".join(lines_)


def _tools(draw: Draw, needed: Sequence[Function]) -> list[dict[str, Any]]:
    """The needed functions among up to two others, in random order, without bounds on values."""
    functions = {function.name: function for function in needed}
    for _ in range(draw.weighted({0: 0.4, 1: 0.4, 2: 0.2})):
        other = draw_function(draw)
        functions.setdefault(other.name, other)
    tools = [tool_of(draw, function) for function in draw.shuffled(list(functions.values()))]
    for tool in tools:
        for schema in tool["function"]["parameters"]["properties"].values():
            for bound in _BOUNDS:
                schema.pop(bound, None)
    return tools


MAKERS: dict[Callable[[Draw, str], Example], float] = {
    _one_call: 5.0,
    _several_calls: 1.4,
    _from_result: 1.5,
    _error: 0.5,
    _corrected: 0.3,
    _no_tool: 0.7,
    _missing: 0.7,
}
