"""An independent reading of clients' EBNF: `lark` for its syntax, sets of places for its texts."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

from lark import Lark, LarkError, Token, Transformer

Ends = Callable[[str, int], frozenset[int]]
"""Of a text and a place in it: where what begins there may end."""

SYNTAX = r"""
start: rule+
rule: NAME "::=" options
options: sequence ("|" sequence)*
sequence: part+
part: atom BOUNDS?
?atom: STRING -> string | CLASS -> one_of | NAME -> named | "(" options ")" | "(" ")" -> nothing
NAME: /[A-Za-z_.-][A-Za-z0-9_.-]*/
STRING: /"([^"\\\r\n]|\\[^\r\n])*"/
CLASS: /\[([^\]\\\r\n]|\\[^\r\n])*\]/
BOUNDS: "*" | "+" | "?" | /\{\s*[0-9]+\s*(,\s*[0-9]*\s*)?\}/
%ignore /[ \t\r\n]+/
%ignore /#[^\r\n]*/
"""
ESCAPED = re.compile(r"\\(?:x([0-9A-Fa-f]+)|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))|(.)", re.DOTALL)
CONTROLS = {
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "b": "\b",
    "f": "\f",
    "v": "\v",
    "a": "\a",
    "e": "\x1b",
    "0": "\0",
}


def characters(text: str) -> list[tuple[str, bool]]:
    """(character, whether it was escaped) of what stands between quotes or brackets."""
    found = []
    for match in ESCAPED.finditer(text):
        digits = match[1] or match[2] or match[3]
        if digits:
            found.append((chr(int(digits, 16)), True))
        else:
            found.append((CONTROLS.get(match[4], match[4]), True) if match[4] else (match[5], False))
    return found


def string(text: str) -> Ends:
    """A text as it stands."""
    return lambda given, at: frozenset([at + len(text)] if given.startswith(text, at) else [])


def member(ranges: list[tuple[str, str]], negated: bool) -> Ends:
    """One character of a set."""

    def ends(given: str, at: int) -> frozenset[int]:
        if at >= len(given):
            return frozenset()
        return frozenset([at + 1] if any(a <= given[at] <= b for a, b in ranges) != negated else [])

    return ends


def either(options: list[Ends]) -> Ends:
    """One of several."""
    return lambda given, at: frozenset().union(*(one(given, at) for one in options))


def following(parts: list[Ends]) -> Ends:
    """One after another."""

    def ends(given: str, at: int) -> frozenset[int]:
        places = frozenset([at])
        for part in parts:
            places = frozenset().union(*(part(given, place) for place in places))
        return places

    return ends


def repeated(part: Ends, low: int, high: int | None) -> Ends:
    """A part some number of times."""

    def step(given: str, places: frozenset[int]) -> frozenset[int]:
        return frozenset().union(*(part(given, place) for place in places))

    def ends(given: str, at: int) -> frozenset[int]:
        places = frozenset([at])
        for _ in range(low):
            before, places = places, step(given, places)
            if places == before:  # And so it stays.
                break
        found = fresh = places
        more = 0
        while fresh and (high is None or more < high - low):
            fresh = step(given, fresh) - found
            found |= fresh
            more += 1
        return found

    return ends


class Reader(Transformer[Token, dict[str, Ends]]):
    """From the tree of a grammar to its rules."""

    def __init__(self) -> None:
        super().__init__()
        self.rules: dict[str, Ends] = {}

    def start(self, rules: list[tuple[str, Ends]]) -> dict[str, Ends]:
        for name, ends in rules:
            if name in self.rules:
                raise ValueError(f"{name} is there twice")
            self.rules[name] = lru_cache(maxsize=None)(ends)
        return self.rules

    def rule(self, items: list[object]) -> tuple[str, object]:
        return str(items[0]), items[1]

    def options(self, items: list[Ends]) -> Ends:
        return either(items)

    def sequence(self, items: list[Ends]) -> Ends:
        return following(items)

    def part(self, items: list[object]) -> object:
        if len(items) == 1:
            return items[0]
        text = str(items[1])
        low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(text, (0, 0))
        if text[0] == "{":
            first, comma, second = (one.strip() for one in text.strip("{}").partition(","))
            low, high = int(first), int(second) if second else None if comma else int(first)
        return repeated(items[0], low, high)  # type: ignore[arg-type]

    def string(self, items: list[Token]) -> Ends:
        return string("".join(one for one, _ in characters(items[0][1:-1])))

    def one_of(self, items: list[Token]) -> Ends:
        text = items[0][1:-1]
        negated = text.startswith("^")
        marks = characters(text[negated:])
        ranges, at = [], 0
        while at < len(marks):
            ranged = at + 2 < len(marks) and marks[at + 1] == ("-", False)
            ranges.append((marks[at][0], marks[at + 2 if ranged else at][0]))
            at += 3 if ranged else 1
        return member(ranges, negated)

    def named(self, items: list[Token]) -> Ends:
        name = str(items[0])
        return lambda given, at: self.rules[name](given, at)

    def nothing(self, items: list[Token]) -> Ends:
        return string("")


PARSER = Lark(SYNTAX, parser="earley", lexer="basic")


def read(text: str) -> Callable[[str], bool]:
    """Whether a whole text is in the grammar's language. raises ValueError for what is no grammar."""
    try:
        rules = Reader().transform(PARSER.parse(text))
    except LarkError as error:
        raise ValueError(str(error)) from None
    return lambda given: len(given) in rules["root"](given, 0)
