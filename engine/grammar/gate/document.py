"""One schema text: its subschemas by place, and where references lead. Nothing is fetched."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urljoin

from engine.grammar.gate.jsontext import Limits, step
from engine.grammar.gate.refusals import GrammarRefused

DIALECTS = re.compile(r"https?://json-schema\.org/((draft/20(19-09|20-12)|draft-0[467])/)?schema#?\Z")

_ONE = ("additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames")
_ONE_MORE = ("then", "unevaluatedItems", "unevaluatedProperties", "contentSchema")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("$defs", "definitions", "dependentSchemas", "dependencies", "patternProperties", "properties")


@dataclass(eq=False, slots=True)
class Node:
    """One schema at one place. Two nodes are equal only where they are the same object.

    path   JSON pointer from the text's root
    value  True, False or an object
    base   URI that references are relative to
    """

    path: str
    value: Any
    base: str
    made: dict[str, Node] = field(default_factory=dict)

    def refuse(self, why: str, *keys: str | int) -> GrammarRefused:
        """A refusal that names this place, or one inside it."""
        return GrammarRefused(why, step(self.path, *keys) or "/")


class Document:
    """A parsed schema text. Raises GrammarRefused for what isn't a schema."""

    def __init__(self, value: Any, limits: Limits) -> None:
        self.limits = limits
        self._nodes: dict[str, Node] = {}
        self._resources: dict[str, Node] = {}
        self._anchors: dict[tuple[str, str], Node] = {}
        self._dynamic: dict[str, list[Node]] = {}
        self.root = self._node("", value, "")
        self.nothing = Node("", False, "")
        self._resources.setdefault("", self.root)
        self._walk(self.root)

    def child(self, node: Node, *keys: str | int) -> Node:
        """The subschema at `keys` below a node."""
        value, path, base = node.value, node.path, node.base
        for key in keys:
            value, path = value[key], step(path, key)
        return self._node(path, value, base)

    def made(self, node: Node, key: str, value: Any) -> Node:
        """A schema that isn't in the text but says what `key` of the node means; one for each key."""
        if key not in node.made:
            node.made[key] = Node(step(node.path, key.split(" ")[0]), value, node.base)
        return node.made[key]

    def target(self, node: Node, keyword: str) -> Node:
        """What `$ref`, `$dynamicRef` or `$recursiveRef` leads to. Refuses what isn't in this text."""
        ref = node.value[keyword]
        if not isinstance(ref, str):
            raise node.refuse("must be a string", keyword)
        if keyword == "$recursiveRef" and ref != "#":
            raise node.refuse("must be #", keyword)
        found = self._resolve(node.base, ref)
        if found is None:
            raise node.refuse(f"{ref[:100]!r} leads to nothing in this schema; nothing is fetched", keyword)
        if keyword != "$ref" and isinstance(found.value, dict):
            self._check_dynamic(node, found, keyword)
        if not isinstance(found.value, dict | bool):
            raise node.refuse(f"{ref[:100]!r} doesn't lead to a schema", keyword)
        return found

    def _check_dynamic(self, node: Node, found: Node, keyword: str) -> None:
        """A dynamic reference is a plain one where its anchor is alone; else its target is not fixed."""
        name = found.value.get("$dynamicAnchor") if keyword == "$dynamicRef" else "$recursiveAnchor"
        rivals = self._dynamic.get(name, []) if isinstance(name, str) else []
        if [one for one in rivals if one is not found]:
            raise node.refuse("has several possible targets, chosen by the way that leads here", keyword)

    def _resolve(self, base: str, ref: str) -> Node | None:
        uri = base + ref if ref.startswith("#") else urljoin(base, ref)
        uri, _, fragment = uri.partition("#")
        fragment = unquote(fragment)
        root = self._resources.get(uri)
        if root is None or (fragment and not fragment.startswith("/")):
            return self._anchors.get((uri, fragment))
        value, path, base = root.value, root.path, root.base
        for part in fragment.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(value, dict) and key in value:
                value = value[key]
            elif isinstance(value, list) and key.isdigit() and int(key) < len(value):
                value = value[int(key)]
            else:
                return None
            path = step(path, key)
            if isinstance(value, dict) and isinstance(value.get("$id"), str):
                base = urljoin(base, value["$id"])
        return self._node(path, value, base)

    def _node(self, path: str, value: Any, base: str) -> Node:
        if path not in self._nodes:
            if not isinstance(value, dict | bool):
                raise GrammarRefused("a schema is an object, true or false", path or "/")
            identity = _identity(value) if isinstance(value, dict) else None
            uri = urljoin(base, identity).partition("#")[0] if identity else base
            self._nodes[path] = Node(path, value, uri)
        return self._nodes[path]

    def _walk(self, root: Node) -> None:
        """Find every identifier and anchor, at the places where schemas are."""
        todo = [root]
        while todo:
            node = todo.pop()
            if not isinstance(node.value, dict):
                continue
            self._register(node)
            todo += [self.child(node, key) for key in (*_ONE, *_ONE_MORE) if _is_schema(node.value.get(key))]
            for key in _LISTS:
                inner = node.value.get(key)
                if isinstance(inner, list):
                    todo += [self.child(node, key, i) for i, one in enumerate(inner) if _is_schema(one)]
            for key in _MAPS:
                inner = node.value.get(key)
                if isinstance(inner, dict):
                    todo += [self.child(node, key, name) for name, one in inner.items() if _is_schema(one)]

    def _register(self, node: Node) -> None:
        dialect = node.value.get("$schema")
        if dialect is not None and not (isinstance(dialect, str) and DIALECTS.match(dialect)):
            raise node.refuse(f"the dialect {str(dialect)[:100]!r} is not known", "$schema")
        identity = _identity(node.value)
        if identity is not None:
            if identity.startswith("#"):
                self._anchors.setdefault((node.base, identity[1:]), node)
            else:
                self._resources.setdefault(node.base, node)
        for key in ("$anchor", "$dynamicAnchor"):
            name = node.value.get(key)
            if isinstance(name, str):
                self._anchors.setdefault((node.base, name), node)
        if isinstance(node.value.get("$dynamicAnchor"), str):
            self._dynamic.setdefault(node.value["$dynamicAnchor"], []).append(node)
        if node.value.get("$recursiveAnchor") is True:
            self._dynamic.setdefault("$recursiveAnchor", []).append(node)


def _identity(value: dict[str, Any]) -> str | None:
    found = value.get("$id")
    return found if isinstance(found, str) else None


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)
