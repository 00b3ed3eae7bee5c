"""Sets of numbers: conditions on values, and the automaton of their decimal spellings.

A condition holds for a value however it is spelt; the automaton reads spellings without an exponent.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from engine.grammar.gate.automaton import Dfa, explore
from engine.grammar.gate.refusals import GrammarRefused
from engine.grammar.gate.work import once_a_request

MAX_DIGITS = 400
MAX_DIVISOR = 1000
DOUBLE_DIGITS = 15
"""Digits that a double keeps: a longer number would be read as another one, which may not be allowed."""


@dataclass(frozen=True, slots=True)
class Number:
    """A number as the client spelt it."""

    lexeme: str

    @property
    def value(self) -> Fraction:
        """Its exact value. Refuses more than MAX_DIGITS digits."""
        mantissa, _, exponent = self.lexeme.lower().partition("e")
        if len(mantissa) > MAX_DIGITS or (exponent and abs(int(exponent[:9])) > MAX_DIGITS):
            raise GrammarRefused(f"the number {self.lexeme[:24]} has more than {MAX_DIGITS} digits")
        return Fraction(self.lexeme)


@lru_cache(maxsize=1024)
def _scaled(value: Fraction) -> tuple[int, int]:
    """(p, k) with value = p / 10**k."""
    places = 0
    while (value * 10**places).denominator != 1:
        places += 1
    return int(value * 10**places), places


@lru_cache(maxsize=1024)
def _digits(value: Fraction) -> tuple[str, str]:
    """Digits of a value from 0 on, before and after the point."""
    units, places = _scaled(value)
    text = str(units).rjust(places + 1, "0")
    return (text[: len(text) - places].lstrip("0") or "0"), text[len(text) - places :]


@dataclass(frozen=True, slots=True)
class Multiple:
    """A multiple of `divisor`, which is positive; 1 for integers."""

    divisor: Fraction

    def holds(self, value: Fraction) -> bool:
        """Exact, without rounding."""
        return (value / self.divisor).denominator == 1

    def first(self) -> Hashable:
        """(remainder, fraction digits read or -1 before the point, whether a digit beyond is nonzero)."""
        return 0, -1, False

    def step(self, state: Hashable, character: str) -> Hashable:
        """Digits up to the divisor's last place count; those after it must be zero."""
        assert isinstance(state, tuple)
        remainder, places, broken = state
        p, k = _scaled(self.divisor)
        if character == "-":
            return state
        if character == ".":
            return remainder, 0, broken
        if places == k:
            return remainder, places, broken or character != "0"
        return (remainder * 10 + int(character)) % p, places + (places >= 0), broken

    def accepts(self, state: Hashable) -> bool:
        """The places not written are zeros."""
        assert isinstance(state, tuple)
        remainder, places, broken = state
        p, k = _scaled(self.divisor)
        return not broken and remainder * 10 ** (k - max(places, 0)) % p == 0


@dataclass(frozen=True, slots=True)
class Bound:
    """Compared with `limit`: below it, at it or above it, as `allowed` (out of -1, 0, 1) says."""

    limit: Fraction
    allowed: frozenset[int]

    def holds(self, value: Fraction) -> bool:
        """Exact."""
        return (value > self.limit) - (value < self.limit) in self.allowed

    def first(self) -> Hashable:
        """(negative, nonzero, integer digits or -1 after the point, order so far, fraction digits)."""
        return False, False, 0, 0, 0

    def step(self, state: Hashable, character: str) -> Hashable:
        """Integer digits decide by their count first, then digit by digit; then the fraction."""
        assert isinstance(state, tuple)
        negative, nonzero, count, order, places = state
        whole, fraction = _digits(abs(self.limit))
        if character == "-":
            return True, nonzero, count, order, places
        if character == ".":
            return negative, nonzero, -1, self._settled(count, order), 0
        nonzero = nonzero or character != "0"
        if count >= 0:
            if not order and count < len(whole):
                order = (character > whole[count]) - (character < whole[count])
            return negative, nonzero, min(count + 1, len(whole) + 1), order, places
        if not order:
            against = fraction[places] if places < len(fraction) else "0"
            order = (character > against) - (character < against)
        return negative, nonzero, count, order, min(places + 1, len(fraction)) if not order else 0

    def _settled(self, count: int, order: int) -> int:
        """Order of the integer parts once all digits are read."""
        whole, _ = _digits(abs(self.limit))
        return order if count == len(whole) else (count > len(whole)) - (count < len(whole))

    def accepts(self, state: Hashable) -> bool:
        """Order of the number written so far against the limit."""
        assert isinstance(state, tuple)
        negative, nonzero, count, order, places = state
        _, fraction = _digits(abs(self.limit))
        if count >= 0:
            order, places = self._settled(count, order), 0
        if not order and fraction[places:].strip("0"):
            order = -1
        if negative and nonzero:
            order = -order if self.limit < 0 else -1
        elif self.limit < 0:
            order = 1
        return order in self.allowed


def at_least(limit: Fraction, *, strict: bool = False) -> Bound:
    """x >= limit, or x > limit."""
    return Bound(limit, frozenset((1,) if strict else (0, 1)))


def at_most(limit: Fraction, *, strict: bool = False) -> Bound:
    """x <= limit, or x < limit."""
    return Bound(limit, frozenset((-1,) if strict else (-1, 0)))


def equal_to(value: Fraction) -> Bound:
    """x = value."""
    return Bound(value, frozenset((0,)))


INTEGER = Multiple(Fraction(1))


def multiple_of(divisor: Fraction) -> Multiple:
    """x is a multiple. Refuses divisors that would need an automaton of too many states."""
    found = Multiple(divisor)
    if _scaled(divisor)[0] > MAX_DIVISOR:
        raise GrammarRefused(f"a divisor of more than {MAX_DIVISOR} units of its last place")
    return found


Signed = tuple[Multiple | Bound, bool]
_State = tuple[int, tuple[Hashable, ...]]


@once_a_request
def spellings(conditions: tuple[Signed, ...]) -> Dfa:
    """Decimal spellings, without an exponent, of numbers that meet each condition (False: that fail it).

    Integers may have any number of digits, others as many as a double keeps.
    """
    whole_numbers = any(
        wanted and isinstance(one, Multiple) and one.divisor.denominator == 1 for one, wanted in conditions
    )
    start = (0, tuple(condition.first() for condition, _ in conditions))

    def row(state: _State) -> list[tuple[int, int, _State]]:
        place, inner = state
        found = []
        for character, after in _syntax(place, whole_numbers):
            stepped = tuple(
                condition.step(one, character) for (condition, _), one in zip(conditions, inner, strict=True)
            )
            found.append((ord(character), ord(character), (after, stepped)))
        return found

    def accepts(state: _State) -> bool:
        return state[0] in _ENDS and all(
            condition.accepts(one) == wanted
            for (condition, wanted), one in zip(conditions, state[1], strict=True)
        )

    found = explore(start, row, accepts)
    return found if whole_numbers else _short(found)


def _short(dfa: Dfa) -> Dfa:
    """The spellings of at most DOUBLE_DIGITS digits."""

    def row(state: tuple[int, int]) -> list[tuple[int, int, tuple[int, int]]]:
        one, digits = state
        found = []
        for low, high, target in dfa.rows[one]:
            count = digits + (low >= ord("0"))
            if count <= DOUBLE_DIGITS:
                found.append((low, high, (target, count)))
        return found

    return explore((0, 0), row, lambda state: dfa.accepting[state[0]])


# Places in a spelling: 0 start, 1 after the sign, 2 after a leading zero, 3 in the integer part, 4 after the
# point, 5 in the fraction.
_ENDS = (2, 3, 5)


def _syntax(place: int, whole_numbers: bool) -> Sequence[tuple[str, int]]:
    """(character, next place) that JSON allows; no point where only integers are wanted."""
    point = [] if whole_numbers else [(".", 4)]
    if place in (0, 1):
        minus = [("-", 1)] if place == 0 else []
        return [*minus, ("0", 2), *((digit, 3) for digit in "123456789")]
    if place == 2:
        return point
    if place == 3:
        return [*((digit, 3) for digit in "0123456789"), *point]
    return [(digit, 5) for digit in "0123456789"]
