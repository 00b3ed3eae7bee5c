"""What a schema denies, as a union: some keyword of it isn't met. Exact, or refused by the keyword's name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from engine.grammar.gate.alternatives import (
    ANYTHING,
    EVERYTHING,
    Alternative,
    Arr,
    Bool,
    Holds,
    Items,
    Members,
    Need,
    Null,
    Num,
    Obj,
    Str,
    without_marks,
)
from engine.grammar.gate.charset import of
from engine.grammar.gate.document import Node
from engine.grammar.gate.keywords import (
    arr_of,
    bounds_of,
    count_of,
    enum_of,
    map_in,
    texts_in,
    tree_of,
    types_of,
)
from engine.grammar.gate.numbers import INTEGER, Number, equal_to
from engine.grammar.gate.pattern import Chars, Edge, Either, Seq, Tree

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
        found += _items(expansion, node)
    return expansion.either((without_marks(one) for one in found), node)


def _type(expansion: Expansion, node: Node) -> Union:
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


def _const(expansion: Expansion, node: Node) -> Union:
    return _other_values(expansion, node, "const", [node.value["const"]])


def _enum(expansion: Expansion, node: Node) -> Union:
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


def _items(expansion: Expansion, node: Node) -> Union:
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


def _contains(expansion: Expansion, node: Node) -> Union:
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


def _unique(expansion: Expansion, node: Node) -> Union:
    if node.value["uniqueItems"] is False:
        return ()
    raise node.refuse("can't be denied", "uniqueItems")


def _properties(expansion: Expansion, node: Node) -> Union:
    """Some member is there and isn't what is asked."""
    names = map_in(node, "properties")
    children = {name: expansion.document.child(node, "properties", name) for name in names}
    return tuple(
        Obj((Members(names=((name, ((child, False),)),)),), (name,))
        for name, child in children.items()
        if child.value is not True
    )


def _additional(expansion: Expansion, node: Node) -> Union:
    """Some member has a name that is neither listed nor matched, and isn't what is asked."""
    child = expansion.document.child(node, "additionalProperties")
    if child.value is True:
        return ()
    names = tuple(map_in(node, "properties"))
    trees = [tree_of(node, text, "patternProperties", text) for text in map_in(node, "patternProperties")]
    listed = [Seq((Edge(True), Either(tuple(letters(name) for name in names)), Edge(False)))] if names else []
    return (Obj(needs=(Need(Str(tuple((tree, False) for tree in (*listed, *trees))), ((child, False),)),)),)


def _patterns(expansion: Expansion, node: Node) -> Union:
    """Some member has a name that matches, and isn't what is asked."""
    found: list[Alternative] = []
    for text in map_in(node, "patternProperties"):
        child = expansion.document.child(node, "patternProperties", text)
        key = Str(((tree_of(node, text, "patternProperties", text), True),))
        found += [] if child.value is True else [Obj(needs=(Need(key, ((child, False),)),))]
    return tuple(found)


def _names(expansion: Expansion, node: Node) -> Union:
    """Some member has a name that isn't allowed."""
    wrong = expansion.schema(expansion.document.child(node, "propertyNames"), False)
    return tuple(Obj(needs=(Need(key, ANYTHING),)) for key in wrong if isinstance(key, Str))


def _required(expansion: Expansion, node: Node) -> Union:
    return tuple(expansion.lacking(name) for name in texts_in(node, "required"))


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
    ("type", _type),
    ("const", _const),
    ("enum", _enum),
    *((keyword, _ref(keyword)) for keyword in ("$ref", "$dynamicRef", "$recursiveRef")),
    ("pattern", _pattern),
    ("minLength", _under("minLength", lambda size: Str(high=size))),
    ("maxLength", _over("maxLength", lambda size: Str(low=size))),
    ("minItems", _under("minItems", lambda size: Arr(high=size))),
    ("maxItems", _over("maxItems", lambda size: Arr(low=size))),
    ("minProperties", _under("minProperties", lambda size: Obj(high=size))),
    ("maxProperties", _over("maxProperties", lambda size: Obj(low=size))),
    ("uniqueItems", _unique),
    ("contains", _contains),
    ("properties", _properties),
    ("additionalProperties", _additional),
    ("patternProperties", _patterns),
    ("propertyNames", _names),
    ("required", _required),
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
