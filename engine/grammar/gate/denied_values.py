"""Denial of keywords that name types or values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.grammar.gate.alternatives import (
    Alternative,
    Arr,
    Bool,
    Null,
    Num,
    Obj,
    Str,
)
from engine.grammar.gate.charset import of
from engine.grammar.gate.document import Node
from engine.grammar.gate.keywords import enum_of, types_of
from engine.grammar.gate.numbers import INTEGER, Number, equal_to
from engine.grammar.gate.tree import Chars, Edge, Seq, Tree

if TYPE_CHECKING:
    from engine.grammar.gate.expansion import Expansion

Union = tuple[Alternative, ...]


def type_denied(expansion: Expansion, node: Node) -> Union:
    named = types_of(node)
    kinds: dict[str, Alternative] = {
        "null": Null(),
        "boolean": Bool(),
        "string": Str(),
        "array": Arr(),
        "object": Obj(),
    }
    found = [one for name, one in kinds.items() if name not in named]
    if "number" not in named:
        found.append(Num(((INTEGER, False),)) if "integer" in named else Num())
    return tuple(found)


def const_denied(expansion: Expansion, node: Node) -> Union:
    return _other_values(expansion, node, "const", [node.value["const"]])


def enum_denied(expansion: Expansion, node: Node) -> Union:
    return _other_values(expansion, node, "enum", enum_of(expansion.document, node))


def _other_values(expansion: Expansion, node: Node, keyword: str, values: list[Any]) -> Union:
    """Every value but these."""
    flags = tuple(
        flag for flag in (True, False) if flag not in [one for one in values if one is True or one is False]
    )
    numbers = tuple(dict.fromkeys((equal_to(one.value), False) for one in values if isinstance(one, Number)))
    texts = tuple(dict.fromkeys((just(one), False) for one in values if isinstance(one, str)))
    found: Union = (
        *([] if None in values else [Null()]),
        *([Bool(flags)] if flags else []),
        Num(numbers),
        Str(texts),
        Arr(),
        Obj(),
    )
    for one in values:
        if isinstance(one, list | dict):
            found = expansion.both(
                found, expansion.schema(expansion.constant(node, keyword, one), False), node
            )
    return found


def just(text: str) -> Tree:
    """The tree of one text and no other."""
    return Seq((Edge(True), letters(text), Edge(False)))


def letters(text: str) -> Tree:
    """The tree of a text, letter by letter."""
    return Seq(tuple(Chars(of(character)) for character in text))
