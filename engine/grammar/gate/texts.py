"""Choices and regular expressions: grammars of plain text."""

from __future__ import annotations

from typing import Any

from engine.grammar.gate import jsontext, pattern
from engine.grammar.gate.alternatives import Str, plainly_empty
from engine.grammar.gate.ebnf_text import Rules, choice, literal
from engine.grammar.gate.jsontext import LIMITS, Limits
from engine.grammar.gate.refusals import GrammarRefused
from engine.grammar.gate.scalars import string
from engine.grammar.gate.schema import MAX_GRAMMAR_CHARS
from engine.grammar.gate.tree import Edge, Seq, Tree
from engine.grammar.key import GrammarKey


def choice_grammar(choices: Any, limits: Limits = LIMITS) -> GrammarKey:
    """One of several texts, letter by letter. Refuses what isn't a list of different, non-empty strings."""
    found = jsontext.from_value(choices, limits)
    if not isinstance(found, list) or not found:
        raise GrammarRefused("must be a list of strings")
    if len(found) > limits.enum:
        raise GrammarRefused(f"{len(found)} choices are more than {limits.enum}")
    for i, one in enumerate(found):
        if not isinstance(one, str) or not one or "\0" in one:
            raise GrammarRefused("must be a string that isn't empty and has no NUL", f"/{i}")
    texts = dict.fromkeys(found)
    return GrammarKey("choice", f"root ::= {choice([literal(text) for text in texts])}")


def regex_grammar(text: Any, limits: Limits = LIMITS) -> GrammarKey:
    """Texts that match as a whole. Refuses a construct by its name and position."""
    return GrammarKey("regex", regex_text(text, limits))


def regex_text(text: Any, limits: Limits = LIMITS) -> str:
    """EBNF of the texts that match a regular expression as a whole."""
    if not isinstance(text, str) or not text:
        raise GrammarRefused("must be a string that isn't empty")
    one = Str(((whole(pattern.parse(text)), True),))
    if plainly_empty(one):
        raise GrammarRefused("no text matches")
    rules = Rules(limits.rules, MAX_GRAMMAR_CHARS)
    return rules.text(string(one, rules, "raw", ""))


def whole(tree: Tree) -> Tree:
    """A tree that must cover the text; edges that say so already are not doubled."""
    parts = tree.parts if isinstance(tree, Seq) else (tree,)
    start = 1 if parts and parts[0] == Edge(True) else 0
    end = len(parts) - 1 if len(parts) > start and parts[-1] == Edge(False) else len(parts)
    return Seq((Edge(True), *parts[start:end], Edge(False)))
