"""Regular expressions of ECMA-262 as trees. What isn't handled is refused by name and position."""

from __future__ import annotations

import re

from engine.grammar.gate import charset
from engine.grammar.gate.charset import Ranges
from engine.grammar.gate.refusals import GrammarRefused
from engine.grammar.gate.tree import Ahead, Chars, Edge, Either, Repeat, Seq, Tree
from engine.grammar.gate.work import once_a_request

MAX_CHARS = 1024
MAX_DEPTH = 32
MAX_REPEAT = 10_000


_COUNTED = re.compile(r"\{([0-9]{1,9})(,([0-9]{0,9}))?\}")
_CLASSES = {"d": charset.DIGIT, "w": charset.WORD, "s": charset.SPACE}
_CONTROLS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "0": 0}
_GROUPS = {
    "(?=": "a lookahead",
    "(?!": "a negative lookahead",
    "(?<=": "a lookbehind",
    "(?<!": "a negative lookbehind",
    "(?P": "a group in Python's spelling",
    "(?>": "an atomic group",
    "(?(": "a conditional group",
}


@once_a_request
def parse(text: str) -> Tree:
    """The tree of a pattern. Raises GrammarRefused with the construct and its position."""
    if len(text) > MAX_CHARS:
        raise GrammarRefused(f"a pattern of {len(text)} characters is longer than {MAX_CHARS}")
    return _Parser(text).whole()


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0
        # Behind `^` and the lookaheads that follow it.
        self._lead = 1 if text.startswith("^") else -1

    def whole(self) -> Tree:
        tree = self._either()
        if self._at < len(self._text):
            raise self._bad("an unbalanced )")
        if isinstance(tree, Either) and self._lead > 1:
            raise self._bad("a lookahead in one of several alternatives")
        return tree

    def _bad(self, what: str) -> GrammarRefused:
        return GrammarRefused(f"{what} at character {self._at} of the pattern is not supported")

    def _peek(self, size: int = 1) -> str:
        return self._text[self._at : self._at + size]

    def _take(self) -> str:
        character = self._peek()
        if not character:
            raise self._bad("an unfinished construct")
        self._at += 1
        return character

    def _either(self) -> Tree:
        options = [self._seq()]
        while self._peek() == "|":
            self._at += 1
            options.append(self._seq())
        return options[0] if len(options) == 1 else Either(tuple(options))

    def _seq(self) -> Tree:
        parts: list[Tree] = []
        while self._peek() not in ("", "|", ")"):
            parts.append(self._quantified())
        return parts[0] if len(parts) == 1 else Seq(tuple(parts))

    def _quantified(self) -> Tree:
        item = self._atom()
        bounds = self._bounds()
        if bounds is None:
            return item
        if isinstance(item, Edge | Ahead):
            raise self._bad("a repeated ^, $ or lookahead")
        if self._peek() == "?":
            self._at += 1  # lazy: the same language
        if self._peek() == "+" or self._peek() == "*":
            raise self._bad("a possessive or doubled quantifier")
        return Repeat(item, *bounds)

    def _bounds(self) -> tuple[int, int | None] | None:
        character = self._peek()
        if character in ("*", "+", "?") and character:
            self._at += 1
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[character]
        counted = _COUNTED.match(self._text, self._at)
        if not counted:
            return None
        self._at = counted.end()
        low = int(counted.group(1))
        high = low if counted.group(2) is None else int(counted.group(3)) if counted.group(3) else None
        if max(low, high or 0) > MAX_REPEAT or (high is not None and high < low):
            raise self._bad(f"the repetition {counted.group(0)} (bounds in order, at most {MAX_REPEAT})")
        return low, high

    def _atom(self) -> Tree:
        character = self._take()
        if character == "(":
            return self._group()
        if character == "[":
            return Chars(self._set())
        if character == ".":
            return Chars(charset.complement(charset.LINE_END))
        if character in "^$":
            return Edge(character == "^")
        if character in "*+?" or (character == "{" and _COUNTED.match(self._text, self._at - 1)):
            raise self._bad("a quantifier without an item")
        if character == "\\":
            return Chars(self._escape(in_set=False))
        return Chars(self._literal(character))

    def _literal(self, character: str) -> Ranges:
        if 0xD800 <= ord(character) <= 0xDFFF:
            raise self._bad("half of a surrogate pair")
        return charset.of(character)

    def _group(self) -> Tree:
        self._at -= 1
        if self._at == self._lead and self._peek(3) in ("(?=", "(?!"):
            wanted = self._peek(3) == "(?="
            self._at += 3
            tree = self._inside()
            self._lead = self._at
            return Ahead(tree, wanted)
        for start, name in _GROUPS.items():
            if self._peek(len(start)) == start:
                raise self._bad(name)
        named = re.compile(r"\((?:\?:|\?<[A-Za-z_$][\w$]*>)?").match(self._text, self._at)
        self._at = named.end() if named else self._at
        if self._peek() == "?":
            raise self._bad("inline flags")
        return self._inside()

    def _inside(self) -> Tree:
        """What stands in a group, up to its end."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._bad(f"nesting deeper than {MAX_DEPTH}")
        tree = self._either()
        if self._peek() != ")":
            raise self._bad("an unclosed group")
        self._at += 1
        self._depth -= 1
        return tree

    def _set(self) -> Ranges:
        negated = self._peek() == "^"
        self._at += negated
        parts: list[Ranges] = []
        while (low := self._member()) is not None:
            if self._peek() == "-" and self._peek(2) not in ("-]", "-"):
                self._at += 1
                high = self._member()
                parts.append(self._range(low, high or ()))
            else:
                parts.append(low)
        ranges = charset.union(*parts)
        return charset.complement(ranges) if negated else ranges

    def _member(self) -> Ranges | None:
        character = self._take()
        if character == "]":
            return None
        return self._escape(in_set=True) if character == "\\" else self._literal(character)

    def _range(self, low: Ranges, high: Ranges) -> Ranges:
        single = len(low) == len(high) == 1 and low[0][0] == low[0][1] and high[0][0] == high[0][1]
        if not single or low[0][0] > high[0][0]:
            raise self._bad("a range that isn't between two characters in order")
        return charset.normal([(low[0][0], high[0][0])])

    def _escape(self, *, in_set: bool) -> Ranges:
        character = self._take()
        if character.lower() in _CLASSES:
            found = _CLASSES[character.lower()]
            return found if character.islower() else charset.complement(found)
        if character == "b" and in_set:
            return charset.of("\b")
        if character == "0" and self._peek().isdigit():
            raise self._bad("an octal escape")
        if character in _CONTROLS:
            return charset.normal([(_CONTROLS[character],) * 2])
        if character in "xu":
            return self._code_point(2 if character == "x" else 4)
        if character == "c" and re.match(r"[A-Za-z]", self._peek()):
            return charset.normal([(ord(self._take()) % 32,) * 2])
        names = {
            "b": "a word boundary",
            "B": "a word boundary",
            "p": "a Unicode property",
            "k": "a backreference",
        }
        if character in names or character == "P":
            raise self._bad(names.get(character, "a Unicode property"))
        if character.isalnum():
            what = "a backreference" if character.isdigit() else f"the escape \\{character}"
            raise self._bad(what)
        return self._literal(character)

    def _code_point(self, digits: int) -> Ranges:
        found = re.compile(r"\{([0-9A-Fa-f]{1,6})\}" if self._peek() == "{" else f"([0-9A-Fa-f]{{{digits}}})")
        match = found.match(self._text, self._at)
        point = int(match.group(1), 16) if match else charset.LAST + 1
        if not match or point > charset.LAST or 0xD800 <= point <= 0xDFFF:
            raise self._bad("an escape that is no character")
        self._at = match.end()
        return charset.normal([(point, point)])
