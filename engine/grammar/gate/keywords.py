"""Keywords of one JSON type each, read from a schema object into an alternative of that type."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from engine.grammar.gate import formats, numbers, pattern
from engine.grammar.gate.alternatives import ANYTHING, Arr, Goal, Holds, Items, Members, Num, Obj, Seen, Str
from engine.grammar.gate.document import Document, Node
from engine.grammar.gate.jsontext import step
from engine.grammar.gate.numbers import Number, Signed
from engine.grammar.gate.refusals import GrammarRefused
from engine.grammar.gate.tree import Tree

MAX_COUNT = 1 << 31
TYPES = ("null", "boolean", "object", "array", "number", "string", "integer")


def count_of(node: Node, keyword: str, default: int | None = None) -> int | None:
    """A keyword that is a whole number from 0; its default where it isn't there."""
    if keyword not in node.value:
        return default
    found = node.value[keyword]
    if not isinstance(found, Number) or found.value.denominator != 1 or not 0 <= found.value < MAX_COUNT:
        raise node.refuse("must be a whole number from 0", keyword)
    return int(found.value)


def number_of(node: Node, keyword: str) -> Fraction | None:
    """A keyword that is a number, None where it isn't there."""
    if keyword not in node.value:
        return None
    found = node.value[keyword]
    if not isinstance(found, Number):
        raise node.refuse("must be a number", keyword)
    try:
        return found.value
    except GrammarRefused as error:
        raise node.refuse(error.why, keyword) from error


def texts_in(node: Node, *keys: str) -> tuple[str, ...]:
    """A keyword that is a list of different strings."""
    found: Any = node.value
    for key in keys:
        found = found[key]
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise node.refuse("must be a list of strings", *keys)
    return tuple(dict.fromkeys(found))


def map_in(node: Node, keyword: str) -> dict[str, Any]:
    """A keyword that is an object; empty where it isn't there."""
    found = node.value.get(keyword, {})
    if not isinstance(found, dict):
        raise node.refuse("must be an object", keyword)
    return found


def goal_of(document: Document, node: Node, *keys: str | int) -> Goal:
    """The goal to meet one subschema."""
    child = document.child(node, *keys)
    return ANYTHING if child.value is True else ((child, True),)


def tree_of(node: Node, text: str, *keys: str | int) -> Tree:
    """A pattern's tree. Refuses by keyword and construct."""
    try:
        return pattern.parse(text)
    except GrammarRefused as error:
        raise node.refuse(error.why, *keys) from error


def bounds_of(node: Node) -> list[tuple[str, Signed]]:
    """(keyword, condition) of every keyword about numbers. Booleans in exclusive bounds are draft 4's."""
    found: list[tuple[str, Signed]] = []
    for keyword, make in (("minimum", numbers.at_least), ("maximum", numbers.at_most)):
        exclusive = "exclusive" + keyword.capitalize()
        strict = node.value.get(exclusive) is True
        limit = number_of(node, keyword)
        if limit is not None:
            found.append((keyword, (make(limit, strict=strict), True)))
        if not isinstance(node.value.get(exclusive), bool):
            limit = number_of(node, exclusive)
            if limit is not None:
                found.append((exclusive, (make(limit, strict=True), True)))
    divisor = number_of(node, "multipleOf")
    if divisor is not None:
        if divisor <= 0:
            raise node.refuse("must be above 0", "multipleOf")
        try:
            found.append(("multipleOf", (numbers.multiple_of(divisor), True)))
        except GrammarRefused as error:
            raise node.refuse(error.why, "multipleOf") from error
    return found


def num_of(node: Node, *, whole: bool) -> Num:
    """Numbers, or integers."""
    conditions = ((numbers.INTEGER, True),) if whole else ()
    return Num(conditions + tuple(condition for _, condition in bounds_of(node)))


def str_of(node: Node) -> Str | None:
    """Strings; None where lengths contradict each other."""
    low, high = count_of(node, "minLength", 0) or 0, count_of(node, "maxLength")
    matches: list[tuple[Tree, bool]] = []
    if "pattern" in node.value:
        if not isinstance(node.value["pattern"], str):
            raise node.refuse("must be a string", "pattern")
        matches.append((tree_of(node, node.value["pattern"], "pattern"), True))
    name = node.value.get("format")
    if name is not None:
        tree = formats.format_tree(name) if isinstance(name, str) else None
        if tree is not None:
            matches.append((tree, True))
        elif name not in formats.HINTS:
            raise node.refuse(f"the format {str(name)[:40]!r} is not enforced", "format")
    return None if high is not None and low > high else Str(tuple(matches), None, low, high)


def arr_of(document: Document, node: Node) -> Arr | None:
    """Arrays; None where counts contradict each other. A list in `items` is prefixItems, spelt of old."""
    value = node.value
    old = isinstance(value.get("items"), list)
    if old and "prefixItems" in value:
        raise node.refuse("a list beside prefixItems", "items")
    listed, rest_key = ("items", "additionalItems") if old else ("prefixItems", "items")
    first: tuple[Goal, ...] = ()
    if listed in value:
        if not isinstance(value[listed], list):
            raise node.refuse("must be a list of schemas", listed)
        first = tuple(goal_of(document, node, listed, i) for i in range(len(value[listed])))
    rest = goal_of(document, node, rest_key) if rest_key in value else ANYTHING
    items = (Items(first, rest),) if first or rest else ()
    low, high = count_of(node, "minItems", 0) or 0, count_of(node, "maxItems")
    holds: tuple[Holds, ...] = ()
    if "contains" in value:
        least, most = count_of(node, "minContains", 1) or 0, count_of(node, "maxContains")
        if most is not None and least > most:
            return None
        if least or most is not None:
            holds = (Holds(goal_of(document, node, "contains"), least, most),)
    unique = value.get("uniqueItems", False)
    if not isinstance(unique, bool):
        raise node.refuse("must be true or false", "uniqueItems")
    seen = None if rest_key in value else len(first)
    where = step(node.path, "uniqueItems") if unique else None
    return None if high is not None and low > high else Arr(items, holds, low, high, where, seen)


def obj_of(document: Document, node: Node) -> Obj | None:
    """Objects; None where counts contradict each other."""
    value = node.value
    listed = map_in(node, "properties")
    if len(listed) > document.limits.properties:
        raise node.refuse(f"{len(listed)} names are more than {document.limits.properties}", "properties")
    names = tuple((name, goal_of(document, node, "properties", name)) for name in listed)
    patterns = tuple(
        (tree_of(node, text, "patternProperties", text), goal_of(document, node, "patternProperties", text))
        for text in map_in(node, "patternProperties")
    )
    says = "additionalProperties" in value
    rest = goal_of(document, node, "additionalProperties") if says else ANYTHING if patterns else None
    required = texts_in(node, "required") if "required" in value else ()
    keys = goal_of(document, node, "propertyNames") if "propertyNames" in value else ANYTHING
    low, high = count_of(node, "minProperties", 0) or 0, count_of(node, "maxProperties")
    if high is not None and max(low, len(required)) > high:
        return None
    members = (Members(names, patterns, rest, bool(names)),) if names or patterns or says else ()
    seen = Seen(frozenset(listed), tuple(tree for tree, _ in patterns), says)
    return Obj(members, required, keys, low, high, (), seen)


def types_of(node: Node) -> tuple[str, ...]:
    """The types that a schema allows, in its order; without `type` all of them."""
    found = node.value.get("type", ["null", "boolean", "number", "string", "array", "object"])
    names = [found] if isinstance(found, str) else found
    if not isinstance(names, list) or not names or any(name not in TYPES for name in names):
        raise node.refuse(f"must be one or more of {', '.join(TYPES)}", "type")
    return tuple(name for name in dict.fromkeys(names) if not (name == "integer" and "number" in names))


def enum_of(document: Document, node: Node) -> list[Any]:
    """The values of `enum`."""
    found = node.value["enum"]
    if not isinstance(found, list) or not found:
        raise node.refuse("must be a list of values", "enum")
    if len(found) > document.limits.enum:
        raise node.refuse(f"{len(found)} values are more than {document.limits.enum}", "enum")
    return found
