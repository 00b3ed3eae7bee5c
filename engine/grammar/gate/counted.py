"""Texts of so many items, written so that a token's characters stay inside of one rule.

The compiler finds the tokens that may come at a place of a rule once, as long as they end inside of it; what
goes on behind the rule's end is tried token by token whenever a mask is made. With `item{low,high}` every
token of two characters is such a one: a mask of any string took 2.7 ms with 8,192 tokens and 80 ms with
129,280, and takes 7 us and 0.5 ms where each item is followed, in its own rule, by the rule of what is left.
A rule costs its share of the compile (0.9 ms and 10 ms), so that long counts are counted in blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.grammar.gate.ebnf_text import Rules, choice, repeat, sequence

Item = Sequence[str]
"""Alternatives of one item."""

BLOCK = 32
WRITTEN_OUT = 48
"""Items that are counted one by one; more of them in blocks, at whose ends tokens are tried."""


def counted(item: Item, low: int, high: int | None, end: str, rules: Rules) -> str:
    """`low` to `high` items (None: without end), then `end`, as an EBNF expression.

    end  a literal, such as the closing quote
    """
    if high is None:
        blocks, need = divmod(low, BLOCK) if low > WRITTEN_OUT else (0, low)
        return sequence((_blocks(item, blocks, blocks, rules), _endless(item, need, end, rules)))
    if high <= WRITTEN_OUT:
        return _rest(item, low, high, end, rules)
    first, need = divmod(low, BLOCK)
    last, left = divmod(high, BLOCK)
    if first == last:
        return sequence((_blocks(item, first, last, rules), _rest(item, need, left, end, rules)))
    # A text's length says how many blocks it has: no text can be read in two ways.
    ways = [(first, last - 1, 0, BLOCK - 1), (last, last, 0, left)]
    if need:
        ways = [(first, first, need, BLOCK - 1), (first + 1, last - 1, 0, BLOCK - 1), ways[1]]
    options = [
        sequence((_blocks(item, least, most, rules), _rest(item, need, left, end, rules)))
        for least, most, need, left in ways
        if least <= most
    ]
    return rules.shared(choice(options))


def _rest(item: Item, low: int, high: int, end: str, rules: Rules) -> str:
    """The rule of the first item, each of which names the next one's."""
    name = rules.shared(end)
    for left in range(1, high + 1):
        may_end = low <= high - left
        name = rules.shared(choice([*([end] if may_end else []), *_each(item, name)]))
    return name


def _endless(item: Item, low: int, end: str, rules: Rules) -> str:
    name = rules.shared_loop(lambda own: choice([end, *_each(item, own)]))
    for _ in range(low):
        name = rules.shared(choice(_each(item, name)))
    return name


def _blocks(item: Item, low: int, high: int, rules: Rules) -> str:
    if not high:
        return ""
    name = rules.shared(choice(item))
    for _ in range(BLOCK - 1):
        name = rules.shared(choice(_each(item, name)))
    return repeat(name, low, high)


def _each(item: Item, name: str) -> list[str]:
    """Each alternative and the rule behind it: so written, it compiles in a fifth of the time of a group."""
    return [sequence((option, name)) for option in item]
