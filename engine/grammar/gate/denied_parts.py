"""Denial of keywords about the members of objects and the items of arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.grammar.gate.alternatives import (
    ANYTHING,
    Alternative,
    Arr,
    Holds,
    Items,
    Members,
    Need,
    Obj,
    Str,
)
from engine.grammar.gate.denied_values import letters
from engine.grammar.gate.document import Node
from engine.grammar.gate.keywords import arr_of, map_in, texts_in, tree_of
from engine.grammar.gate.tree import Edge, Either, Seq

if TYPE_CHECKING:
    from engine.grammar.gate.expansion import Expansion

Union = tuple[Alternative, ...]


def properties_denied(expansion: Expansion, node: Node) -> Union:
    """Some member is there and isn't what is asked."""
    names = map_in(node, "properties")
    children = {name: expansion.document.child(node, "properties", name) for name in names}
    return tuple(
        Obj((Members(names=((name, ((child, False),)),)),), (name,))
        for name, child in children.items()
        if child.value is not True
    )


def additional_denied(expansion: Expansion, node: Node) -> Union:
    """Some member has a name that is neither listed nor matched, and isn't what is asked."""
    child = expansion.document.child(node, "additionalProperties")
    if child.value is True:
        return ()
    names = tuple(map_in(node, "properties"))
    trees = [tree_of(node, text, "patternProperties", text) for text in map_in(node, "patternProperties")]
    listed = [Seq((Edge(True), Either(tuple(letters(name) for name in names)), Edge(False)))] if names else []
    return (Obj(needs=(Need(Str(tuple((tree, False) for tree in (*listed, *trees))), ((child, False),)),)),)


def patterns_denied(expansion: Expansion, node: Node) -> Union:
    """Some member has a name that matches, and isn't what is asked."""
    found: list[Alternative] = []
    for text in map_in(node, "patternProperties"):
        child = expansion.document.child(node, "patternProperties", text)
        key = Str(((tree_of(node, text, "patternProperties", text), True),))
        found += [] if child.value is True else [Obj(needs=(Need(key, ((child, False),)),))]
    return tuple(found)


def names_denied(expansion: Expansion, node: Node) -> Union:
    """Some member has a name that isn't allowed."""
    wrong = expansion.schema(expansion.document.child(node, "propertyNames"), False)
    return tuple(Obj(needs=(Need(key, ANYTHING),)) for key in wrong if isinstance(key, Str))


def required_denied(expansion: Expansion, node: Node) -> Union:
    return tuple(expansion.lacking(name) for name in texts_in(node, "required"))


def items_denied(expansion: Expansion, node: Node) -> Union:
    """Some item isn't what is asked at its place."""
    asked = arr_of(expansion.document, node)
    found: list[Alternative] = []
    for items in asked.items if asked else ():
        for i, goal in enumerate(items.first):
            # A goal of a schema object is one schema, so its denial is that schema denied.
            found += [
                Arr((Items((*(ANYTHING,) * i, ((one, False),)), ANYTHING),), low=i + 1) for one, _ in goal
            ]
        for one, _ in items.rest:
            if items.first and one.value is not False:
                raise node.refuse("after prefixItems can't be denied", "items")
            found.append(
                Arr(low=len(items.first) + 1)
                if items.first
                else Arr(holds=(Holds(((one, False),), 1, None),))
            )
    return tuple(found)


def contains_denied(expansion: Expansion, node: Node) -> Union:
    """Too few, or too many."""
    asked = arr_of(expansion.document, node)
    if asked is None:
        return (Arr(),)
    found: list[Alternative] = []
    for one in asked.holds:
        if one.low:
            found.append(Arr(holds=(Holds(one.goal, 0, one.low - 1),)))
        if one.high is not None:
            found.append(Arr(holds=(Holds(one.goal, one.high + 1, None),)))
    return tuple(found)
