"""Grammars that clients write in EBNF: read in full, so that what is passed on is known to be harmless.

The accepted language is the plain part of the compiler's: rules, strings, classes, groups, alternatives and
repetition. Token sets, dispatch, lookahead and rule attributes are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from engine.grammar.gate import charset
from engine.grammar.gate.ebnf_rules import Atom, Group, Part, Ref, check_rules
from engine.grammar.gate.jsontext import LIMITS, Limits
from engine.grammar.gate.refusals import GrammarRefused
from engine.grammar.key import GrammarKey

MAX_CHARS = 65_536
MAX_DEPTH = 64
MAX_REPEAT = 10_000
MAX_ITEMS = 20_000

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\n]+|\#[^\r\n]*)
      |(?P<name>[A-Za-z_.-][A-Za-z0-9_.-]*)
      |(?P<assign>::=)
      |(?P<string>"(?:[^"\\\r\n]|\\.)*")
      |(?P<class>\[(?:[^\]\\\r\n]|\\.)*\])
      |(?P<bounds>\{[ \t\r\n]*[0-9]{1,9}[ \t\r\n]*(?:,[ \t\r\n]*(?:[0-9]{1,9})?[ \t\r\n]*)?\})
      |(?P<ahead>\(=)
      |(?P<mark>[|()*+?])
      |(?P<other>[,=]|[0-9]+)""",
    re.VERBOSE,
)
_CODES = r"x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}"
_ESCAPES = {
    "string": re.compile(rf"\\(?:[nrtbfva0e'\"?\\/]|{_CODES})"),
    "class": re.compile(rf"\\(?:[nrtbfva0e'\"?\\^$.*+()\[\]{{}}|/-]|{_CODES})"),
}
_MEMBER = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|x([0-9A-Fa-f]{2})|(.))|([^\\])", re.DOTALL)
_CONTROLS = {"n": 10, "r": 13, "t": 9, "b": 8, "f": 12, "v": 11, "a": 7, "e": 27}
WORDS = ("true", "false")
MACROS = ("TagDispatch", "Token", "ExcludeToken", "TokenTagDispatch")


def ebnf_grammar(text: Any, limits: Limits = LIMITS) -> GrammarKey:
    """The key of a client's grammar. Raises GrammarRefused with the position of what is wrong.

    Its text is the client's but for classes: the compiler would let bytes of surrogates through them.
    """
    if not isinstance(text, str) or not text.strip():
        raise GrammarRefused("must be a grammar that isn't empty")
    if len(text) > min(limits.chars, MAX_CHARS):
        raise GrammarRefused(f"{len(text)} characters are more than {min(limits.chars, MAX_CHARS)}")
    if "\0" in text or re.search(r"[\ud800-\udfff]", text):
        raise GrammarRefused("a NUL or half of a surrogate pair")
    parser = _Parser(text)
    check_rules(parser.rules())
    return GrammarKey("ebnf", parser.without_surrogates())


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._items: list[tuple[str, str, int]] = list(self._tokens())
        self._at = 0
        self._depth = 0

    def _tokens(self) -> Iterable[tuple[str, str, int]]:
        at, count = 0, 0
        while at < len(self._text):
            match = _TOKEN.match(self._text, at)
            if not match or match.lastgroup is None:
                raise self._bad(f"{self._text[at : at + 12]!r} is not understood", at)
            if match.lastgroup in ("string", "class"):
                self._check_escapes(match.lastgroup, match.group(), at)
            if match.lastgroup != "space":
                count += 1
                yield match.lastgroup, match.group(), at
            if count > MAX_ITEMS:
                raise GrammarRefused(f"more than {MAX_ITEMS} parts")
            at = match.end()

    def _bad(self, why: str, at: int) -> GrammarRefused:
        line = self._text.count("\n", 0, at) + 1
        return GrammarRefused(f"{why} (line {line}, column {at - self._text.rfind(chr(10), 0, at)})")

    def _check_escapes(self, kind: str, text: str, at: int) -> None:
        for escape in re.finditer(r"\\.", text):
            known = _ESCAPES[kind].match(text, escape.start())
            hexadecimal = known and known.group().startswith("\\x")
            # The compiler reads as many digits after \x as there are.
            if not known or (hexadecimal and re.match("[0-9A-Fa-f]", text[known.end() : known.end() + 1])):
                raise self._bad(f"the escape {text[escape.start() : escape.start() + 4]!r}", at)
            if known.group() in ("\\0", "\\x00", "\\u0000", "\\U00000000"):
                raise self._bad("a NUL", at)
            if known.group()[1] in "uU" and not _is_character(int(known.group()[2:], 16)):
                raise self._bad(f"{known.group()} is no character", at)

    def _check_ranges(self, text: str, at: int) -> None:
        """In a class, as the compiler reads it."""
        if any(low > high for low, high, _ in _ranges(text)):
            raise self._bad("a range that isn't in order", at)

    def _peek(self, ahead: int = 0) -> tuple[str, str, int]:
        at = self._at + ahead
        return self._items[at] if at < len(self._items) else ("end", "", len(self._text))

    def without_surrogates(self) -> str:
        """The text, with surrogates named in negated classes and left out of ranges that hold them."""
        found = self._text
        for kind, text, at in reversed(self._items):
            if kind == "class" and text.startswith("[^"):
                found = f"{found[: at + 2]}\\ud800-\\udfff{found[at + 2 :]}"
            elif kind == "class":
                for low, high, hyphen in reversed(_ranges(text)):
                    if low < 0xD800 and high > 0xDFFF:
                        found = f"{found[: at + hyphen]}-\\ud7ff\\ue000{found[at + hyphen :]}"
        return found

    def rules(self) -> dict[str, Group]:
        """Rules by name."""
        found: dict[str, Group] = {}
        while self._peek()[0] != "end":
            kind, name, at = self._peek()
            if kind != "name" or self._peek(1)[0] != "assign":
                what = "attributes of a rule are" if self._peek(1)[0] == "class" else "a rule must be"
                raise self._bad(f"{what} not understood; write `name ::= ...`", at)
            if self._text[:at].rstrip(" \t")[-1:] not in ("", "\n", "\r"):
                raise self._bad(f"the rule {name!r} must be at the beginning of a line", at)
            if name in WORDS:
                raise self._bad(f"{name} is no name of a rule", at)
            if name in found:
                raise self._bad(f"the rule {name!r} is there twice", at)
            self._at += 2
            found[name] = self._group(1, 1)
        if "root" not in found:
            raise GrammarRefused("there is no rule named root")
        return found

    def _group(self, low: int, high: int | None) -> Group:
        options: list[tuple[Part, ...]] = []
        while True:
            at = self._peek()[2]
            options.append(self._sequence())
            if not options[-1]:
                raise self._bad('an empty alternative; write ""', at)
            if self._peek()[1] != "|":
                return Group(tuple(options), low, high)
            self._at += 1

    def _sequence(self) -> tuple[Part, ...]:
        parts: list[Part] = []
        while True:
            kind, text, at = self._peek()
            if kind == "end" or text in ("|", ")") or (kind == "name" and self._peek(1)[0] == "assign"):
                return tuple(parts)
            parts.append(self._repeated(self._part(kind, text, at)))

    def _part(self, kind: str, text: str, at: int) -> Part:
        self._at += 1
        if kind == "string":
            return Atom(text == '""')
        if kind == "class":
            if text in ("[]", "[^]"):
                raise self._bad("an empty class", at)
            self._check_ranges(text, at)
            return Atom(False)
        if kind == "name":
            if text in MACROS and self._peek()[1] == "(":
                raise self._bad(f"{text} is not supported", at)
            return Ref(text, at)
        if kind == "ahead":
            raise self._bad("lookahead is not supported", at)
        if text != "(":
            raise self._bad(f"{text!r} without an item", at)
        if self._peek()[1] == ")":
            self._at += 1
            return Atom(True)
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._bad(f"nesting deeper than {MAX_DEPTH}", at)
        group = self._group(1, 1)
        if self._peek()[1] != ")":
            raise self._bad("a group that isn't closed", at)
        self._at += 1
        self._depth -= 1
        return group

    def _repeated(self, part: Part) -> Part:
        kind, text, at = self._peek()
        if text not in ("*", "+", "?") and kind != "bounds":
            return part
        self._at += 1
        low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(text) or self._bounds(text, at)
        kind, again, at = self._peek()
        if again in ("*", "+", "?") or kind == "bounds":
            raise self._bad(f"{text} and {again} one after another; put a group around the first", at)
        return Group(((part,),), low, high)

    def _bounds(self, text: str, at: int) -> tuple[int, int | None]:
        first, comma, second = (part.strip() for part in text.strip("{}").partition(","))
        low = int(first)
        high = int(second) if second else None if comma else low
        if max(low, high or 0) > MAX_REPEAT or (high is not None and high < low):
            raise self._bad(f"the repetition {text} (bounds in order, at most {MAX_REPEAT})", at)
        return low, high


def _ranges(text: str) -> list[tuple[int, int, int]]:
    """(first character, last, place of the hyphen) of each range of a class."""
    begin = 2 if text.startswith("[^") else 1
    marks = list(_MEMBER.finditer(text, begin, len(text) - 1))
    found, place = [], 0
    while place < len(marks):
        ranged = place + 2 < len(marks) and marks[place + 1].group() == "-"
        if ranged:
            found.append((_point(marks[place]), _point(marks[place + 2]), marks[place + 1].start()))
        place += 3 if ranged else 1
    return found


def _point(member: re.Match[str]) -> int:
    digits = member[1] or member[2] or member[3]
    if digits:
        return int(digits, 16)
    return _CONTROLS.get(member[4], ord(member[4])) if member[4] else ord(member[5])


def _is_character(point: int) -> bool:
    return point <= charset.LAST and not 0xD800 <= point <= 0xDFFF
