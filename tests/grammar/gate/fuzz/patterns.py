"""Random regular expressions of ECMA-262, and what another engine of that language makes of them."""

from __future__ import annotations

import random
import re

import quickjs

ATOMS = [
    "a",
    "b",
    "c",
    "x",
    "0",
    "1",
    "-",
    "_",
    " ",
    "é",
    "😀",
    "\\.",
    "\\\\",
    '"',
    "\\n",
    "\\u0061",
    "\\x41",
    ".",
]
CLASSES = [
    "[abc]",
    "[a-c]",
    "[^a]",
    "[\\w-]",
    "\\d",
    "\\w",
    "\\s",
    "\\D",
    "\\W",
    "\\S",
    '[^\\s"]',
    "[0-9_]",
    "[\\]^]",
]
QUANTIFIERS = ["", "", "", "", "*", "+", "?", "{2}", "{0,2}", "{1,}", "*?", "+?", "{1,3}?"]
PIECES = [
    *"()[]{}|*+?^$.\\-,:=!<>/\"'#&0129abé😀\n\u2028\ud83d", "\\d", "\\W", "\\s", "\\b", "\\B", "\\p{L}",
    "\\u0061", "\\u{62}", "\\u00", "\\x4", "\\cA", "\\c", "\\0", "\\1", "\\k<n>", "(?:", "(?=", "(?!",
    "(?<n>", "(?<=", "(?i)", "(?", "[^", "[]", "[^]", "{2", "{,2}", "{2,1}", "{3}", "{0}", "a-z", "-]",
    "[a-", "||", "()", "\\", "\\/", "\\-", "\\_", "\\u{110000}", "\\ud800", "\0", "{1000}", "{99999}",
]  # fmt: skip


JUDGE_S = 0.3
JUDGE_BYTES = 256 << 20
"""What one question may take: engines that go back and try again need for ever for some patterns."""


class PatternMaker:
    """Valid patterns from a source of chance."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def pattern(self) -> str:
        """One that isn't empty, a few with lookaheads at their start."""
        found = self._either(3) or "a"
        if self._chance.random() < 0.15:
            ahead = "".join(
                f"({self._chance.choice(('?=', '?!'))}{self._either(1)})"
                for _ in range(self._chance.randint(1, 2))
            )
            return f"^{ahead}{self._sequence(2)}"
        return found

    def _either(self, depth: int) -> str:
        return "|".join(self._sequence(depth) for _ in range(self._chance.choice((1, 1, 1, 2, 3))))

    def _sequence(self, depth: int) -> str:
        found = [self._quantified(depth) for _ in range(self._chance.choice((0, 1, 1, 2, 2, 3, 4)))]
        if self._chance.random() < 0.1:
            found.insert(0, "^")
        if self._chance.random() < 0.1:
            found.append("$")
        return "".join(found)

    def _quantified(self, depth: int) -> str:
        draw = self._chance.random()
        if depth and draw < 0.25:
            atom = f"({self._chance.choice(('', '?:', '?:'))}{self._either(depth - 1)})"
        else:
            atom = self._chance.choice(CLASSES if draw < 0.5 else ATOMS)
        return atom + self._chance.choice(QUANTIFIERS)


UNCLOSED = re.compile(r"\{[0-9]+,[0-9]+(?![0-9}])")


class Undecided(Exception):
    """The judge can't say: it takes too long, or the standard's two dialects differ."""


class Ecma:
    """A pattern in a JavaScript engine: with the flag u where it takes that, else as Annex B has it.

    raises  ValueError where it takes neither; Undecided where a code point may be two characters
    """

    def __init__(self, pattern: str) -> None:
        self._js = quickjs.Context()
        self._js.set_time_limit(JUDGE_S)
        self._js.set_memory_limit(JUDGE_BYTES)
        self._test = self._js.eval("(pattern, flags, text) => new RegExp(pattern, flags).test(text)")
        self._pattern = pattern
        try:
            self._flags = "u"
            self.is_in("")
        except ValueError:
            self._flags = ""
            self.is_in("")
            if "\\u{" in pattern or not _is_basic(pattern):
                raise Undecided(pattern) from None

    def matches(self, text: str) -> bool:
        """Whether it covers the text."""
        return self._ask(f"^(?:{self._pattern})$", text)

    def is_in(self, text: str) -> bool:
        """Whether it is found in the text."""
        return self._ask(self._pattern, text)

    def _ask(self, pattern: str, text: str) -> bool:
        if not self._flags and not _is_basic(text):
            raise Undecided(text)
        try:
            return bool(self._test(pattern, self._flags, text))
        except quickjs.JSException as error:
            if "invalid repetition" in str(error) and UNCLOSED.search(self._pattern):
                raise Undecided("the engine takes bounds that aren't closed for a repetition") from None
            if str(error).startswith("SyntaxError"):
                raise ValueError(str(error).splitlines()[0]) from None
            raise Undecided(str(error)) from None


def _is_basic(text: str) -> bool:
    return not text or max(text) < "\U00010000"
