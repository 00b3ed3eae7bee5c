"""JSON schemas: a text becomes the EBNF of the values that it allows, or is refused by keyword and place."""

from __future__ import annotations

from typing import Any

from engine.grammar.gate import jsontext
from engine.grammar.gate.document import Document
from engine.grammar.gate.ebnf_text import Rules
from engine.grammar.gate.expansion import Expansion
from engine.grammar.gate.jsontext import LIMITS, Limits
from engine.grammar.gate.layout import LAYOUTS, WS_RULE, Whitespace
from engine.grammar.gate.lowering import Lowering
from engine.grammar.gate.work import bounded_work
from engine.grammar.key import GrammarKey

MAX_GRAMMAR_CHARS = 500_000

OBJECT_LEVELS = 32
"""Objects and arrays in one another that JSON mode writes. Without an end a model that opens brackets goes on
for ever, and parsers refuse what it wrote: the strictest common ones read 64 levels. Each level has rules of
its own: over 129,280 tokens 32 of them compile in 0.3 s, 64 in 0.9 s."""


def schema_grammar(
    schema: Any, *, whitespace: Whitespace = "compact", open_objects: bool = False, limits: Limits = LIMITS
) -> GrammarKey:
    """The key of a JSON schema, given as text or as a decoded value.

    open_objects  listed properties alone don't close an object, as the standard has it
    Raises GrammarRefused with the JSON pointer of what can't be enforced.
    """
    value = (
        jsontext.parse(schema, limits)
        if isinstance(schema, str | bytes)
        else jsontext.from_value(schema, limits)
    )
    with bounded_work():
        return parsed_grammar(value, whitespace, open_objects=open_objects, limits=limits)


def parsed_grammar(
    value: Any, whitespace: Whitespace, *, open_objects: bool, limits: Limits = LIMITS
) -> GrammarKey:
    """The same of a schema that was read already."""
    lowering = lowering_of(value, whitespace, open_objects=open_objects, limits=limits)
    root = lowering.expansion.document.root
    name = lowering.lower(((root, True),))
    text = lowering.rules.text(name) + (f"\n{WS_RULE}" if whitespace == "flexible" else "")
    return GrammarKey("json_schema", text, (("whitespace", whitespace), ("open_objects", open_objects)))


def lowering_of(
    value: Any, whitespace: Whitespace, *, open_objects: bool, limits: Limits = LIMITS
) -> Lowering:
    """A parsed schema, ready to lower its root or parts of it."""
    expansion = Expansion(Document(value, limits))
    rules = Rules(limits.rules, MAX_GRAMMAR_CHARS)
    return Lowering(expansion, rules, LAYOUTS[whitespace], open_objects=open_objects)


def object_grammar(*, whitespace: Whitespace = "compact") -> GrammarKey:
    """Any JSON object of at most OBJECT_LEVELS levels."""
    scalars = ["null", "boolean", "number", "string"]
    levels: dict[str, Any] = {"0": {"type": scalars}}
    for level in range(1, OBJECT_LEVELS):
        inside = {"$ref": f"#/$defs/{level - 1}"}
        every = {"type": [*scalars, "array", "object"], "items": inside, "additionalProperties": inside}
        levels[str(level)] = every
    inside = {"$ref": f"#/$defs/{OBJECT_LEVELS - 1}"}
    schema = {"type": "object", "additionalProperties": inside, "$defs": levels}
    made = parsed_grammar(schema, whitespace, open_objects=True)
    return GrammarKey("json_object", made.text, (("whitespace", whitespace),))
