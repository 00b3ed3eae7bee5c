"""Random grammars in EBNF, laid out as people do and as nobody would."""

from __future__ import annotations

import random

STRINGS = ['"a"', '"b"', '"ab"', '""', '"x1"', '"\\n"', '"\\""', '"é"', '"\\u0062"', '"-"', '"\\\\"', '"😀"']
CLASSES = [
    "[abc]",
    "[a-c]",
    "[^a]",
    "[0-9_]",
    '[^"\\\\]',
    "[a-]",
    "[\\]^]",
    "[é😀]",
    "[^\\n]",
    "[\\u0061-\\u0063x]",
]
QUANTIFIERS = ["", "", "", "", "*", "+", "?", "{2}", "{0,2}", "{1,}", "{ 1 , 3 }"]
BOUNDED = ["", "", "", "?", "{2}", "{0,2}", "*"]
"""Of what may be empty or endless itself: more of them would be refused most of the time."""

SPACES = [" ", " ", " ", "  ", "\t", "\n  ", " # note\n  "]
PIECES = [
    *"()[]{}|*+?^\"\\-,:=#.'/0129abé😀\n\r\t\x0b", "::=", ":=", "root", "r1", "root ::=", "\nr9 ::= ",
    '""', '"a"', "[]", "[^]", "[^a-c]", "[c-a]", "{2}", "{2,1}", "{,2}", "{0}", "{9999}", "{1,99999}",
    "(=", "()", "(|", "| |", "**", "\\d", "\\w", "\\S", "\\x41", "\\x4", "\\x{41}", "\\u0041", "\\u41",
    "\\U00000041", "\\U0001F600", "\\ud800", "\\e", "\\-", "\\?", "\\$", "\\(", "\\/", "\\0", "\\'",
    "\\]", "# note", "Token(5)", "TagDispatch(", "[max_tokens=3]", "//", "\0", "\ud83d", "\\\n",
]  # fmt: skip


class GrammarMaker:
    """Grammars without left recursion: a rule begins with another one only if that comes later."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._names = ["root", *(f"r{i}" for i in range(1, chance.randint(1, 4)))]

    def grammar(self) -> str:
        """The whole text, rules in any order."""
        rules = [
            f"{name}{self._space()}::={self._space()}{self._either(i, 2)}"
            for i, name in enumerate(self._names)
        ]
        if self._chance.random() < 0.3:
            self._chance.shuffle(rules)
        return "\n".join(rules)

    def _space(self) -> str:
        return self._chance.choice(SPACES)

    def _either(self, rule: int, depth: int) -> str:
        options = [self._sequence(rule, depth) for _ in range(self._chance.choice((1, 1, 2, 3)))]
        return f"{self._space()}|{self._space()}".join(options)

    def _sequence(self, rule: int, depth: int) -> str:
        parts = [self._part(rule, depth, i > 0) for i in range(self._chance.choice((1, 1, 2, 3)))]
        return self._space().join(parts)

    def _part(self, rule: int, depth: int, later: bool) -> str:
        draw = self._chance.random()
        names = self._names[rule + 1 :]
        if draw < 0.2 and names:
            return self._chance.choice(names) + self._chance.choice(BOUNDED)
        if draw < 0.25 and later:
            # Behind something that isn't empty, and optional: it may be the rule itself.
            return f'"(" {self._chance.choice(self._names)}? ")"'
        if draw < 0.45 and depth:
            return f"({self._either(rule, depth - 1)}){self._chance.choice(BOUNDED)}"
        return self._chance.choice(CLASSES if draw < 0.7 else STRINGS) + self._chance.choice(QUANTIFIERS)
