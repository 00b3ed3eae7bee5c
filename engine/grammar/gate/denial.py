"""What a schema denies, as a union: some keyword of it isn't met. Exact, or refused by the keyword's name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from engine.grammar.gate.alternatives import (
    EVERYTHING,
    Alternative,
    Arr,
    Num,
    Obj,
    Str,
    without_marks,
)
from engine.grammar.gate.denied_parts import (
    additional_denied,
    contains_denied,
    items_denied,
    names_denied,
    patterns_denied,
    properties_denied,
    required_denied,
)
from engine.grammar.gate.denied_values import const_denied, enum_denied, type_denied
from engine.grammar.gate.document import Node
from engine.grammar.gate.keywords import (
    bounds_of,
    count_of,
    map_in,
    texts_in,
    tree_of,
)

if TYPE_CHECKING:
    from engine.grammar.gate.expansion import Expansion

Union = tuple[Alternative, ...]

UNDENIABLE = (
    "format",
    "unevaluatedItems",
    "unevaluatedProperties",
    "additionalItems",
)


def denied(expansion: Expansion, node: Node) -> Union:
    """Values that the schema at a node doesn't allow."""
    value = node.value
    for keyword in UNDENIABLE:
        if keyword in value:
            raise node.refuse("can't be denied, as by `not`, `else` or an overlapping oneOf", keyword)
    found: list[Alternative] = []
    for keyword, deny in _DENIALS:
        if keyword in value:
            found += deny(expansion, node)
    found += [Num(((condition, False),)) for _, (condition, _) in bounds_of(node)]
    if any(keyword in value for keyword in ("items", "prefixItems")):
        found += items_denied(expansion, node)
    return expansion.either((without_marks(one) for one in found), node)


def _pattern(expansion: Expansion, node: Node) -> Union:
    if not isinstance(node.value["pattern"], str):
        raise node.refuse("must be a string", "pattern")
    return (Str(((tree_of(node, node.value["pattern"], "pattern"), False),)),)


def _under(keyword: str, make: Callable[[int], Alternative]) -> Callable[[Expansion, Node], Union]:
    """A lower limit: there are fewer."""

    def deny(expansion: Expansion, node: Node) -> Union:
        limit = count_of(node, keyword) or 0
        return (make(limit - 1),) if limit else ()

    return deny


def _over(keyword: str, make: Callable[[int], Alternative]) -> Callable[[Expansion, Node], Union]:
    """An upper limit: there are more."""

    def deny(expansion: Expansion, node: Node) -> Union:
        return (make((count_of(node, keyword) or 0) + 1),)

    return deny


def _unique(expansion: Expansion, node: Node) -> Union:
    if node.value["uniqueItems"] is False:
        return ()
    raise node.refuse("can't be denied", "uniqueItems")


def _all_of(expansion: Expansion, node: Node) -> Union:
    branches = expansion.branches(node, "allOf")
    return tuple(one for branch in branches for one in expansion.schema(branch, False))


def _any_of(expansion: Expansion, node: Node) -> Union:
    found = EVERYTHING
    for branch in expansion.branches(node, "anyOf"):
        found = expansion.both(found, expansion.schema(branch, False), node)
    return found


def _one_of(expansion: Expansion, node: Node) -> Union:
    """None of the branches, or two of them."""
    branches = expansion.branches(node, "oneOf")
    none = EVERYTHING
    for branch in branches:
        none = expansion.both(none, expansion.schema(branch, False), node)
    two: list[Alternative] = []
    for i, one in enumerate(branches):
        for other in branches[:i]:
            two += expansion.both(expansion.schema(one), expansion.schema(other), node)
    return expansion.either((*none, *two), node)


def _not(expansion: Expansion, node: Node) -> Union:
    return expansion.schema(expansion.document.child(node, "not"))


def _if(expansion: Expansion, node: Node) -> Union:
    test, found = expansion.document.child(node, "if"), list[Alternative]()
    for keyword, wanted in (("then", True), ("else", False)):
        if keyword in node.value:
            branch = expansion.schema(expansion.document.child(node, keyword), False)
            found += expansion.both(expansion.schema(test, wanted), branch, node)
    return tuple(found)


def _ref(keyword: str) -> Callable[[Expansion, Node], Union]:
    def deny(expansion: Expansion, node: Node) -> Union:
        return expansion.schema(expansion.document.target(node, keyword), False)

    return deny


def _dependent(keyword: str) -> Callable[[Expansion, Node], Union]:
    """Some name is there and what it asks for isn't met."""

    def deny(expansion: Expansion, node: Node) -> Union:
        found: list[Alternative] = []
        for name, asked in map_in(node, keyword).items():
            there: Union = (Obj(required=(name,)),)
            if isinstance(asked, list):
                lacking = tuple(expansion.lacking(other) for other in texts_in(node, keyword, name))
                found += expansion.both(there, lacking, node)
            else:
                child = expansion.document.child(node, keyword, name)
                found += expansion.both(there, expansion.schema(child, False), node)
        return tuple(found)

    return deny


_DENIALS: tuple[tuple[str, Callable[[Expansion, Node], Union]], ...] = (
    ("type", type_denied),
    ("const", const_denied),
    ("enum", enum_denied),
    *((keyword, _ref(keyword)) for keyword in ("$ref", "$dynamicRef", "$recursiveRef")),
    ("pattern", _pattern),
    ("minLength", _under("minLength", lambda size: Str(high=size))),
    ("maxLength", _over("maxLength", lambda size: Str(low=size))),
    ("minItems", _under("minItems", lambda size: Arr(high=size))),
    ("maxItems", _over("maxItems", lambda size: Arr(low=size))),
    ("minProperties", _under("minProperties", lambda size: Obj(high=size))),
    ("maxProperties", _over("maxProperties", lambda size: Obj(low=size))),
    ("uniqueItems", _unique),
    ("contains", contains_denied),
    ("properties", properties_denied),
    ("additionalProperties", additional_denied),
    ("patternProperties", patterns_denied),
    ("propertyNames", names_denied),
    ("required", required_denied),
    ("allOf", _all_of),
    ("anyOf", _any_of),
    ("oneOf", _one_of),
    ("not", _not),
    ("if", _if),
    *(
        (keyword, _dependent(keyword))
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies")
    ),
)
