"""Numbers and strings as EBNF."""

from __future__ import annotations

from engine.grammar.gate import charset
from engine.grammar.gate.alternatives import Num, Str, texts_meeting, texts_of
from engine.grammar.gate.automaton import MAX_STATES, Dfa, without
from engine.grammar.gate.counted import counted
from engine.grammar.gate.ebnf_text import Rules, Spelling, choice, literal, one_of, repeat, sequence, written
from engine.grammar.gate.numbers import INTEGER, spellings
from engine.grammar.gate.refusals import GrammarRefused
from engine.grammar.gate.tree import Ahead, Chars, Edge, Either, Repeat, Seq, Tree

INTEGER_TEXT = '"-"? ("0" | [1-9] [0-9]*)'
NUMBER_TEXT = '"-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [+\\-]? [0-9]{1,3})?'
# Any JSON string: every escape, but none that makes half of a surrogate pair.
_HEX = "[0-9a-cefA-CEF] [0-9a-fA-F]{3} | [dD] [0-7] [0-9a-fA-F]{2}"
_ESCAPED = f'["\\\\/bfnrt] | "u" ({_HEX})'
_PLAIN = '[^"\\\\\\u0000-\\u001f\\ud800-\\udfff]'
FEW_STATES = 48


def number(one: Num, rules: Rules) -> str:
    """Numbers of an alternative."""
    if one.chosen is not None:
        return choice([literal(chosen.lexeme) for chosen in one.chosen])
    if not one.conditions:
        return rules.shared(NUMBER_TEXT)
    if one.conditions == ((INTEGER, True),):
        return rules.shared(INTEGER_TEXT)
    return automaton_rules(spellings(one.conditions), "raw", "", rules)


def string(one: Str, rules: Rules, spelling: Spelling = "json", quote: str = '"') -> str:
    """Texts of an alternative, between quotes where there are any."""
    if one.chosen is not None:
        return choice([literal(quote + written(text, spelling) + quote) for text in one.chosen])
    edge = literal(quote) if quote else ""
    if not one.matches:
        if spelling == "raw":
            return sequence((edge, repeat(one_of(charset.ALL, spelling), one.low, one.high), edge))
        single = (_PLAIN, f'"\\\\" {rules.shared(_ESCAPED)}')
        return sequence((edge, counted(single, one.low, one.high, edge or '""', rules)))
    if len(one.matches) == 1 and one.matches[0][1]:
        tree = _with_length(one.matches[0][0], one.low, one.high)
        if tree is not None and not _nested(tree) and (_counts(tree) or _states(one) > FEW_STATES):
            only = tree.parts[0] if isinstance(tree, Seq) and len(tree.parts) == 1 else tree
            # A class alone the compiler itself counts inside of its rule.
            if isinstance(only, Repeat) and (item := tree_text(only.item, spelling)).startswith("("):
                return sequence((edge, counted((item,), only.low, only.high, edge or '""', rules)))
            return sequence((edge, tree_text(tree, spelling), edge))
    return automaton_rules(texts_meeting(one), spelling, quote, rules)


def _states(one: Str) -> int:
    try:
        return len(texts_of(one.matches).rows)
    except GrammarRefused:
        return MAX_STATES + 1


def _with_length(tree: Tree, low: int, high: int | None) -> Tree | None:
    """The tree between `^` and `$`, with lengths put into it; None where that isn't simple."""
    parts = tree.parts if isinstance(tree, Seq) else (tree,)
    if len(parts) < 2 or parts[0] != Edge(True) or parts[-1] != Edge(False):
        return None
    inner = parts[1:-1]
    if any(_has_edge(part) for part in inner):
        return None
    if not low and high is None:
        return Seq(inner)
    only = inner[0] if len(inner) == 1 else None
    if isinstance(only, Repeat) and isinstance(only.item, Chars):
        least = max(low, only.low)
        most = only.high if high is None else high if only.high is None else min(high, only.high)
        if most is None or least <= most:
            return Repeat(only.item, least, most)
    return None


def _has_edge(tree: Tree) -> bool:
    return any(isinstance(one, Edge | Ahead) for one in _parts(tree))


def _parts(tree: Tree) -> list[Tree]:
    """A tree and all below it."""
    found = [tree]
    for one in found:
        if isinstance(one, Seq):
            found += one.parts
        elif isinstance(one, Either):
            found += one.options
        elif isinstance(one, Repeat):
            found.append(one.item)
    return found


def _counts(tree: Tree) -> bool:
    """Whether the tree counts so far that an automaton of single states would be long."""
    repeats = [one for one in _parts(tree) if isinstance(one, Repeat)]
    return any(max(one.low, one.high or 0) > FEW_STATES for one in repeats)


def _nested(tree: Tree) -> bool:
    """Whether an endless repetition is inside another: its grammar takes cubic time to match."""
    endless = [one for one in _parts(tree) if isinstance(one, Repeat) and one.high is None]
    return any(
        isinstance(inner, Repeat) and inner.high is None for one in endless for inner in _parts(one.item)
    )


def tree_text(tree: Tree, spelling: Spelling) -> str:
    """A tree without edges as an EBNF expression."""
    if isinstance(tree, Chars):
        return one_of(tree.ranges, spelling)
    if isinstance(tree, Either):
        return f"({choice([tree_text(option, spelling) for option in tree.options])})"
    if isinstance(tree, Repeat):
        return repeat(tree_text(tree.item, spelling), tree.low, tree.high)
    return sequence(tree_text(part, spelling) for part in tree.parts) if isinstance(tree, Seq) else '""'


def automaton_rules(dfa: Dfa, spelling: Spelling, quote: str, rules: Rules) -> str:
    """An automaton as one rule a state; the closing quote, where there is one, ends an accepting state."""
    if spelling == "raw":
        dfa = without(dfa, ((0, 0),))
    if dfa.empty:
        raise GrammarRefused("no text meets what is asked")
    names = [rules.fresh() for _ in dfa.rows]
    end = literal(quote) if quote else '""'
    for name, row, accepting in zip(names, dfa.rows, dfa.accepting, strict=True):
        targets: dict[int, list[tuple[int, int]]] = {}
        for low, high, target in row:
            targets.setdefault(target, []).append((low, high))
        options = [end] if accepting else []
        for target, ranges in targets.items():
            options.append(sequence((one_of(charset.normal(ranges), spelling), names[target])))
        rules.set(name, choice(options))
    return sequence((literal(quote) if quote else "", names[0]))
