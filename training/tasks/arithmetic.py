"""Arithmetic: one to four steps, with the steps as reasoning or with the answer alone."""

from collections.abc import Callable
from dataclasses import dataclass

from training.tasks import words
from training.tasks.draw import Draw, lines
from training.tasks.example import Example, reply, user
from training.tasks.wording import styled

PLAIN = lines(
    """What is {0}?
    Calculate {0}.
    {0} = ?
    Compute {0}.
    How much is {0}?
    Work out {0}.
    Solve {0}.
    {0}
    Give the result of {0}."""
)
SENTENCE = lines(
    """The answer is {0}.
    It is {0}.
    That makes {0}.
    The result is {0}."""
)


@dataclass(slots=True)
class Problem:
    """A question, its steps as true equations, one a line, and the result."""

    question: str
    steps: list[str]
    result: str


def generate(draw: Draw, kind: str) -> Example:
    """One problem; questions of the held-out split never occur in training."""
    while True:
        problem = draw.weighted(MAKERS)(draw)
        if draw.allows(problem.question, 20):
            break
    thinking = draw.chance(0.55)
    says_number = problem.result.lstrip("-").replace(".", "", 1).isdigit()
    shown = problem.result
    if says_number and draw.chance(0.2):
        shown = draw.of(SENTENCE).format(problem.result)
    answer = reply(shown, "\n".join(problem.steps) if thinking else "")
    checker, expected = ("number", float(problem.result)) if says_number else ("worked", problem.result)
    effort = draw.weighted({None: 0.88, "high": 0.08, "max": 0.04}) if thinking else None
    messages = [user(problem.question)]
    return Example(kind, messages, answer, checker, expected, thinking=thinking, effort=effort)


def _number(draw: Draw) -> int:
    """A whole number of one to three digits; each length is as likely."""
    return draw.pick((draw.integer(0, 9), draw.integer(10, 99), draw.integer(100, 999)))


def _plain(draw: Draw) -> Problem:
    a, b = _number(draw), _number(draw)
    sign = draw.pick("++--**/")
    if sign == "+":
        steps, result = added(a, b), a + b
    elif sign == "-":
        steps, result = [f"{a} - {b} = {a - b}"], a - b
    elif sign == "*":
        steps, result = multiplied(a, b)
    else:
        b = draw.integer(1, 12)
        a = b * draw.integer(0, 99)
        steps, result = [f"{a} / {b} = {a // b}"], a // b
    shown = draw.pick((sign, sign, {"*": "x", "/": ":"}.get(sign, sign)))
    expression = f"{a} {shown} {b}" if draw.chance(0.8) else f"{a}{shown}{b}"
    return Problem(styled(draw, draw.of(PLAIN).format(expression)), steps, str(result))


def added(a: int, b: int) -> list[str]:
    """A sum; larger ones go column by column."""
    if a < 100 and b < 100:
        return [f"{a} + {b} = {a + b}"]
    steps, carry = [], 0
    for place in (1, 10, 100):
        x, y = a // place % 10, b // place % 10
        more = f" + {carry}" if carry else ""
        steps.append(f"{x} + {y}{more} = {x + y + carry}")
        carry = (x + y + carry) // 10
    return [*steps, f"{a} + {b} = {a + b}"]


def multiplied(a: int, b: int) -> tuple[list[str], int]:
    """A product by the digits of the second factor."""
    if a < 10 and b < 10:
        return [f"{a} * {b} = {a * b}"], a * b
    parts = [(int(digit) * 10**place) for place, digit in enumerate(reversed(str(b))) if digit != "0"]
    if len(parts) < 2:
        return [f"{a} * {b} = {a * b}"], a * b
    steps = [f"{a} * {part} = {a * part}" for part in parts]
    total = a * parts[0]
    for part in parts[1:]:
        steps.append(f"{total} + {a * part} = {total + a * part}")
        total += a * part
    return steps, total


def _chain(draw: Draw) -> Problem:
    """Three or four numbers from left to right, without products."""
    total = _number(draw) % 200
    text, steps = str(total), []
    for _ in range(draw.integer(2, 3)):
        more, sign = draw.integer(1, 99), draw.pick("+-")
        after = total + more if sign == "+" else total - more
        steps.append(f"{total} {sign} {more} = {after}")
        text, total = f"{text} {sign} {more}", after
    return Problem(styled(draw, draw.of(PLAIN).format(text)), steps, str(total))


def _percent(draw: Draw) -> Problem:
    percent = draw.pick((5, 10, 20, 25, 30, 40, 50, 60, 75))
    base = 20 * draw.integer(1, 60)
    result = base * percent // 100
    question = draw.pick(("What is {0} % of {1}?", "How much is {0} percent of {1}?", "Take {0} % of {1}."))
    steps = [f"{base} / 100 = {base / 100:g}", f"{base / 100:g} * {percent} = {result}"]
    return Problem(styled(draw, question.format(percent, base)), steps, str(result))


def _compare(draw: Draw) -> Problem:
    a, b = _number(draw), _number(draw)
    if a == b:
        b += 1
    larger = draw.chance(0.5)
    question = draw.pick(
        ("Which number is {0}, {1} or {2}?", "{1} or {2}: which is {0}?", "Give the {0} of {1} and {2}.")
    )
    word = "larger" if larger else "smaller"
    wanted = max(a, b) if larger else min(a, b)
    step = f"{max(a, b)} - {min(a, b)} = {abs(a - b)}"
    return Problem(question.format(word, a, b), [step], str(wanted))


def _average(draw: Draw) -> Problem:
    count = draw.integer(2, 4)
    mean = draw.integer(3, 60)
    items = [mean + draw.integer(-3, 3) for _ in range(count - 1)]
    items.append(mean * count - sum(items))
    steps, total = [], items[0]
    for item in items[1:]:
        steps.append(f"{total} + {item} = {total + item}")
        total += item
    steps.append(f"{total} / {count} = {mean}")
    listed = f"{', '.join(map(str, items[:-1]))} and {items[-1]}"
    question = draw.pick(("What is the average of {0}?", "Give the mean of {0}.", "Average of {0}?"))
    return Problem(styled(draw, question.format(listed)), steps, str(mean))


def _time(draw: Draw) -> Problem:
    """A start and a duration."""
    start, minutes = draw.integer(0, 22 * 60), 5 * draw.integer(1, 24)
    end = start + minutes
    question = draw.pick(
        (
            "A {2} starts at {0} and takes {1} minutes. When does it end?",
            "It is {0}. What time is it in {1} minutes?",
            "The {2} began at {0} and lasted {1} minutes. When was it over?",
        )
    ).format(_clock(start), minutes, draw.pick(("meeting", "film", "trip", "lesson", "game")))
    steps = [
        f"{start // 60} * 60 = {start // 60 * 60}",
        f"{start // 60 * 60} + {start % 60} = {start}",
        f"{start} + {minutes} = {end}",
        f"{end} - {end // 60 * 60} = {end % 60}",
    ]
    return Problem(question, steps, _clock(end))


def _clock(minutes: int) -> str:
    return f"{minutes // 60 % 24:02d}:{minutes % 60:02d}"


def _units(draw: Draw) -> Problem:
    small, large, factor = draw.pick(
        (
            ("cm", "m", 100),
            ("m", "km", 1000),
            ("g", "kg", 1000),
            ("minutes", "hours", 60),
            ("seconds", "minutes", 60),
        )
        + (("mm", "cm", 10), ("hours", "days", 24), ("months", "years", 12), ("cents", "euros", 100))
    )
    amount = draw.integer(2, 40)
    if draw.chance(0.5):
        question = draw.pick(("How many {1} are {0} {2}?", "Convert {0} {2} to {1}.", "{0} {2} in {1}?"))
        step, result = f"{amount} * {factor} = {amount * factor}", amount * factor
        return Problem(styled(draw, question.format(amount, small, large)), [step], str(result))
    question = draw.pick(("How many {2} are {0} {1}?", "Convert {0} {1} to {2}.", "{0} {1} in {2}?"))
    total = amount * factor
    text = question.format(total, small, large)
    return Problem(styled(draw, text), [f"{total} / {factor} = {amount}"], str(amount))


_STORIES = lines(
    """{n} has {a} {x} and buys {b} more. {d}How many {x} does {n} have?|+
    {n} had {a} {x} and gave {b} of them away. {d}How many are left?|-
    There are {b} boxes with {a} {x} each. {d}How many {x} are there?|*
    {n} sells {b} {x} for {a} euros each. {d}How much money is that?|*
    A shop had {a} {x} and sold {b}. {d}How many {x} remain?|-
    {n} found {a} {x} on Monday and {b} on Tuesday. {d}How many in all?|+
    {n} shares {p} {x} among {b} friends. {d}How many does each one get?|/
    {p} {x} go into {b} equal bags. {d}How many are in a bag?|/
    {n} reads {a} pages a day for {b} days. {d}How many pages are that?|*
    A bus with {a} people takes on {b} more. {d}How many people are in it?|+
    The {x} cost {a} euros, and {n} pays with {p2} euros. {d}How much comes back?|change
    {n} needs {p2} {x} and has {a}. {d}How many are missing?|change""",
    6,
)


def _story(draw: Draw) -> Problem:
    """A word problem; one in three has a number that doesn't matter."""
    text, _, sign = draw.of(_STORIES).rpartition("\n")
    a, b = draw.integer(2, 60), draw.integer(2, 12)
    if sign == "-":
        a += b
    larger = a + draw.integer(1, 40)
    name, things = draw.of(words.FIRST), draw.of(words.FOODS)
    extra = f"{draw.of(words.FIRST)} is {draw.integer(5, 80)} years old. " if draw.chance(0.33) else ""
    values = {"n": name, "a": a, "b": b, "x": things, "d": extra, "p": a * b, "p2": larger}
    steps, result = {
        "+": ([f"{a} + {b} = {a + b}"], a + b),
        "-": ([f"{a} - {b} = {a - b}"], a - b),
        "*": multiplied(a, b),
        "/": ([f"{a * b} / {b} = {a}"], a),
        "change": ([f"{larger} - {a} = {larger - a}"], larger - a),
    }[sign]
    return Problem(text.format(**values), steps, str(result))


MAKERS: dict[Callable[[Draw], Problem], float] = {
    _plain: 4.0,
    _chain: 1.5,
    _percent: 0.8,
    _compare: 0.8,
    _average: 0.7,
    _time: 0.7,
    _units: 1.0,
    _story: 2.5,
}
