"""Arrays and objects as the schemas that they alone meet."""

from __future__ import annotations

from typing import Any

from engine.grammar.gate.numbers import Number


def exactly(value: Any) -> Any:
    """A schema for one array or object and nothing else."""
    if isinstance(value, list):
        size = Number(str(len(value)))
        items = {"prefixItems": [{"const": one} for one in value]} if value else {}
        return {"type": "array", **items, "items": False, "minItems": size, "maxItems": size}
    names = {name: {"const": one} for name, one in value.items()}
    return {"type": "object", "properties": names, "required": list(names), "additionalProperties": False}
