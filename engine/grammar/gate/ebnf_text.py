"""Pieces of xgrammar's EBNF: characters, literals, repetition, rules by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from engine.grammar.gate import charset
from engine.grammar.gate.charset import Ranges
from engine.grammar.gate.refusals import GrammarRefused

Spelling = Literal["json", "raw"]
"""How a character is written: inside a JSON string, or as itself."""

_CONTROL: Ranges = ((0, 0x1F),)
_QUOTED = charset.of('"\\')
_SHORT = {"\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}


def literal(text: str) -> str:
    """A text as an EBNF string."""
    return f'"{"".join(_character(ord(one)) for one in text)}"'


def _character(point: int) -> str:
    # \x takes any number of hexadecimal digits there, so it is never used.
    if point < 128 and (chr(point).isalnum() or chr(point) in " _:,;{}()/<>=.!"):
        return chr(point)
    return f"\\u{point:04x}" if point <= 0xFFFF else f"\\U{point:08x}"


def _class(ranges: Ranges) -> str:
    """A set of characters as an EBNF class; from the complement where that is shorter."""
    # Where a class is negated, the compiler lets bytes of surrogates through, which no UTF-8 has: name them.
    others = tuple(sorted((*charset.complement(ranges), (0xD800, 0xDFFF))))
    negated = len(others) < len(ranges)
    parts = [
        _class_character(low) if low == high else f"{_class_character(low)}-{_class_character(high)}"
        for low, high in (others if negated else ranges)
    ]
    return f"[{'^' if negated else ''}{''.join(parts)}]"


def _class_character(point: int) -> str:
    return chr(point) if point < 128 and chr(point).isalnum() else _escaped(point)


def _escaped(point: int) -> str:
    return f"\\u{point:04x}" if point <= 0xFFFF else f"\\U{point:08x}"


def one_of(ranges: Ranges, spelling: Spelling) -> str:
    """One character of a set, with one spelling each. Refuses a set without any that can be written."""
    if spelling == "raw":
        # NUL has no place in the text of a grammar; nobody means it in plain output.
        ranges = charset.minus(ranges, ((0, 0),))
        if not ranges:
            raise GrammarRefused("a set of characters is empty")
        return _class(ranges)
    plain = charset.minus(ranges, charset.union(_CONTROL, _QUOTED))
    options = [_class(plain)] if plain else []
    special = charset.intersect(ranges, charset.union(_CONTROL, _QUOTED))
    options += [literal(json_character(point)) for low, high in special for point in range(low, high + 1)]
    if not options:
        raise GrammarRefused("a set of characters is empty")
    return options[0] if len(options) == 1 else f"({' | '.join(options)})"


def json_character(point: int) -> str:
    """The spelling of one character inside a JSON string."""
    character = chr(point)
    if character in _SHORT:
        return "\\" + _SHORT[character]
    if character in '"\\':
        return "\\" + character
    return f"\\u{point:04x}" if point < 0x20 else character


def written(text: str, spelling: Spelling) -> str:
    """A text as it is spelt, without quotes around it."""
    return text if spelling == "raw" else "".join(json_character(ord(one)) for one in text)


def repeat(item: str, low: int, high: int | None) -> str:
    """An item some number of times."""
    if (low, high) == (1, 1):
        return item
    if high == 0:
        return '""'
    mark = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((low, high))
    if mark is None:
        mark = f"{{{low},{'' if high is None else high}}}" if low != high else f"{{{low}}}"
    return f"({item}){mark}"


def sequence(parts: Iterable[str]) -> str:
    """Parts one after another; empty ones left out."""
    kept = [part for part in parts if part and part != '""']
    return " ".join(kept) if kept else '""'


def choice(options: Sequence[str]) -> str:
    """One of several, as a whole rule's right side."""
    return " | ".join(dict.fromkeys(options))


class Rules:
    """The rules of one grammar. Equal right sides share a rule where `shared` makes it."""

    def __init__(self, limit: int, max_chars: int) -> None:
        self._limit = limit
        self._max_chars = max_chars
        self._chars = 0
        self._bodies: dict[str, str] = {}
        self._names: dict[str, str] = {}

    def fresh(self) -> str:
        """A name for a rule that will be set later. Refuses too many."""
        if len(self._bodies) >= self._limit:
            raise GrammarRefused(f"the grammar needs more than {self._limit} rules")
        name = f"r{len(self._bodies)}"
        self._bodies[name] = ""
        return name

    def set(self, name: str, body: str) -> None:
        """Give a rule its right side. Refuses a grammar that grows too long."""
        self._chars += len(body)
        if self._chars > self._max_chars:
            raise GrammarRefused(f"the grammar is longer than {self._max_chars} characters")
        self._bodies[name] = body

    def shared(self, body: str) -> str:
        """The name of a rule with this right side."""
        if body not in self._names:
            name = self.fresh()
            self.set(name, body)
            self._names[body] = name
        return self._names[body]

    def shared_loop(self, body: Callable[[str], str]) -> str:
        """The name of a rule whose right side is made of that name."""
        known = body("")
        if known not in self._names:
            name = self._names[known] = self.fresh()
            self.set(name, body(name))
        return self._names[known]

    def text(self, root: str) -> str:
        """The whole grammar, from the rule `root` on."""
        return "\n".join([f"root ::= {root}", *(f"{name} ::= {body}" for name, body in self._bodies.items())])
