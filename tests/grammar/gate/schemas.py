"""Random schemas, small and full of keywords that meet each other."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

SCALARS = [None, True, False, 0, 1, 2, -3, 1.5, "", "a", "ab", "x1", "abc"]
TYPES = ["object", "array", "string", "number", "integer", "object", "array", "null"]
UNIONS = [["string", "object"], ["integer", "null"], ["array", "boolean"]]
NAMES = ["a", "b", "ab", "x1"]
PATTERNS = ["^a", "b$", "^[a-c]+$", "x|1", "^.{2}$", "[^a]"]


class SchemaMaker:
    """Schemas from one seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def schema(self) -> Any:
        """A schema with one definition that it may refer to."""
        found = self._schema(3)
        if isinstance(found, dict):
            found["$defs"] = {"x": self._schema(1)}
        return found

    def _may(self, chance: float) -> bool:
        return self._random.random() < chance

    def _pick(self, options: list[Any]) -> Any:
        return self._random.choice(options)

    def _some(self, options: list[str], most: int = 2) -> list[str]:
        return self._random.sample(options, self._random.randint(1, most))

    def _schema(self, depth: int) -> Any:
        if depth == 0:
            leaf = {"enum": [self._pick(SCALARS) for _ in range(3)]}
            return self._pick(
                [True, {"type": "integer"}, {"type": "string"}, {"const": self._pick(SCALARS)}, leaf]
            )
        if self._may(0.04):
            return self._pick([True, False])
        found: dict[str, Any] = {}
        if self._may(0.7):
            found["type"] = self._pick(TYPES + UNIONS)
        parts: dict[str, Callable[[dict[str, Any], int], None]] = {
            "number": self._number,
            "string": self._string,
            "array": self._array,
            "object": self._object,
        }
        kind = found.get("type")
        named = "number" if kind == "integer" else kind
        for name in [named] if isinstance(named, str) else self._some(list(parts), 3):
            if name in parts:
                parts[name](found, depth)
        if self._may(0.25):
            self._values(found)
        if self._may(0.3):
            self._combination(found, depth)
        return found

    def _number(self, found: dict[str, Any], depth: int) -> None:
        chances = {
            "minimum": (0.5, [0, -1, 1.5, 3]),
            "maximum": (0.4, [5, 10, 2.25]),
            "exclusiveMinimum": (0.2, [0, 1]),
            "multipleOf": (0.3, [1, 2, 0.5, 3]),
        }
        found.update(
            {key: self._pick(options) for key, (chance, options) in chances.items() if self._may(chance)}
        )

    def _string(self, found: dict[str, Any], depth: int) -> None:
        chances = {"minLength": (0.4, [0, 1, 3]), "maxLength": (0.4, [1, 3, 5]), "pattern": (0.4, PATTERNS)}
        found.update(
            {key: self._pick(options) for key, (chance, options) in chances.items() if self._may(chance)}
        )

    def _array(self, found: dict[str, Any], depth: int) -> None:
        if self._may(0.4):
            found["items"] = self._schema(depth - 1)
        if self._may(0.3):
            found["prefixItems"] = [self._schema(depth - 1) for _ in range(self._pick([1, 2]))]
        if self._may(0.3):
            found["contains"] = self._schema(depth - 1)
        chances = {
            "minItems": (0.3, [0, 1, 3]),
            "maxItems": (0.3, [0, 2, 4]),
            "minContains": (0.15, [0, 1, 2]),
            "maxContains": (0.15, [1, 2]),
            "uniqueItems": (0.2, [True]),
            "unevaluatedItems": (0.15, [False, {"type": "integer"}]),
        }
        found.update(
            {key: self._pick(options) for key, (chance, options) in chances.items() if self._may(chance)}
        )

    def _object(self, found: dict[str, Any], depth: int) -> None:
        if self._may(0.7):
            found["properties"] = {name: self._schema(depth - 1) for name in self._some(NAMES, 3)}
        if self._may(0.4):
            found["required"] = self._some(["a", "b", "c"])
        if self._may(0.25):
            found["patternProperties"] = {
                name: self._schema(depth - 1) for name in self._some(["^a", "b", "1$"])
            }
        names = [{"maxLength": 2}, {"pattern": "^[a-c]"}, {"enum": ["a", "b", "c"]}, {"minLength": 1}]
        chances = {
            "additionalProperties": (0.4, [False, True, {"type": "integer"}]),
            "propertyNames": (0.2, names),
            "minProperties": (0.2, [0, 1, 2, 3]),
            "maxProperties": (0.2, [0, 1, 3]),
            "dependentRequired": (0.2, [{"a": ["b"]}]),
            "dependentSchemas": (0.15, [{"b": {"required": ["a"]}}, {"a": {"maxProperties": 1}}]),
            "unevaluatedProperties": (0.2, [False, {"type": "integer"}]),
        }
        found.update(
            {key: self._pick(options) for key, (chance, options) in chances.items() if self._may(chance)}
        )

    def _values(self, found: dict[str, Any]) -> None:
        if self._may(0.5):
            found["enum"] = [self._pick([*SCALARS, [1, "a"], {"a": 1}]) for _ in range(4)]
        else:
            found["const"] = self._pick([*SCALARS, [1], {"a": "b"}])

    def _combination(self, found: dict[str, Any], depth: int) -> None:
        kind = self._pick(["anyOf", "allOf", "oneOf", "not", "if", "$ref"])
        if kind == "$ref":
            found["$ref"] = self._pick(["#/$defs/x", "#"])
        elif kind == "not":
            found["not"] = self._schema(depth - 1)
        elif kind == "if":
            found["if"] = self._schema(depth - 1)
            found.update({key: self._schema(depth - 1) for key in ("then", "else") if self._may(0.7)})
        else:
            found[kind] = [self._schema(depth - 1) for _ in range(self._pick([1, 2, 3]))]
