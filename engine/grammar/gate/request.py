"""The fields by which clients of several servers ask for structured output -> one grammar key, or none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.grammar.gate.ebnf import ebnf_grammar
from engine.grammar.gate.jsontext import LIMITS, Limits
from engine.grammar.gate.layout import Whitespace
from engine.grammar.gate.refusals import GrammarRefused
from engine.grammar.gate.schema import object_grammar, schema_grammar
from engine.grammar.gate.tags import tag_grammar
from engine.grammar.gate.texts import choice_grammar, regex_grammar
from engine.grammar.gate.work import bounded_work
from engine.grammar.key import GrammarKey

ANY_JSON = "$$ANY$$"
"""SGLang's spelling of a schema that every object meets."""


@dataclass(frozen=True, slots=True)
class GatePolicy:
    """What a server decides.

    whitespace    inside generated JSON, where the request doesn't choose
    open_objects  listed properties alone don't close an object, as the standard has it
    """

    whitespace: Whitespace = "compact"
    open_objects: bool = False
    limits: Limits = LIMITS


FIELDS = (
    "response_format",
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structured_outputs",
)
"""Fields that are read; all others are left alone."""

FORMATS = ("text", "json_object", "json_schema", "structural_tag")
"""Types of a `response_format`; no schema has one of them as its `type`."""

_SAME = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "ebnf",
}
_INNER = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "ebnf",
    "json_object": "json_object",
    "structural_tag": "structural_tag",
}


def parse_request(
    fields: Mapping[str, Any], policy: GatePolicy | None = None, prefix: str = ""
) -> GrammarKey | None:
    """The grammar that a request asks for; None where it asks for none.

    fields  of the body, as decoded; None is the same as missing
    prefix  of field names in refusals, such as `sampling_params.`
    Raises GrammarRefused, a BadRequest, with the field and the place in it; also for two wishes at once.
    """
    policy = policy or GatePolicy()
    wishes = [
        (name, *_wish(name, fields[name], prefix, policy)) for name in FIELDS if fields.get(name) is not None
    ]
    wishes = [wish for wish in wishes if wish[1]]
    if len(wishes) > 1:
        named = " and ".join(name for name, *_ in wishes)
        raise GrammarRefused(f"{named} are given; only one of them can be met", param=prefix + wishes[1][0])
    for name, kind, value, path, whitespace in wishes:
        try:
            with bounded_work():
                return _make(kind, value, policy, whitespace)
        except GrammarRefused as error:
            raise error.within(prefix + name, path) from error
    return None


def _make(kind: str, value: Any, policy: GatePolicy, whitespace: Whitespace) -> GrammarKey:
    limits = policy.limits
    if kind == "json_object" or (kind == "json_schema" and value == ANY_JSON):
        return object_grammar(whitespace=whitespace)
    if kind == "json_schema":
        return schema_grammar(value, whitespace=whitespace, open_objects=policy.open_objects, limits=limits)
    if kind == "structural_tag":
        return tag_grammar(value, whitespace=whitespace, open_objects=policy.open_objects, limits=limits)
    makers: dict[str, Callable[[Any, Limits], GrammarKey]] = {
        "regex": regex_grammar,
        "ebnf": ebnf_grammar,
        "choice": choice_grammar,
    }
    return makers[kind](value, limits)


Wish = tuple[str, Any, str, Whitespace]
"""(kind or "", value, JSON pointer of the value in its field, white space)."""


def _wish(name: str, value: Any, prefix: str, policy: GatePolicy) -> Wish:
    if name == "response_format":
        return _response_format(value, prefix + name, policy)
    if name == "structured_outputs":
        return _structured_outputs(value, prefix + name, policy)
    return _SAME.get(name, name), value, "", policy.whitespace


def _response_format(value: Any, param: str, policy: GatePolicy) -> Wish:
    """OpenAI's field, and SGLang's type structural_tag in it."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return "", None, "", policy.whitespace
    if kind == "json_object":
        return "json_object", None, "", policy.whitespace
    if kind == "structural_tag":
        return "structural_tag", value, "", policy.whitespace
    if kind != "json_schema":
        raise GrammarRefused(f"the type {str(kind)[:40]!r} is none of {', '.join(FORMATS)}", "/type", param)
    inner = value.get("json_schema")
    if not isinstance(inner, dict) or inner.get("schema", inner.get("schema_")) is None:
        raise GrammarRefused("a schema is missing", "/json_schema/schema", param)
    if not isinstance(inner.get("strict"), bool | None):
        raise GrammarRefused("must be true or false", "/json_schema/strict", param)
    # What isn't strict is enforced all the same: an answer without a constraint would be a silent one.
    name = "schema" if "schema" in inner else "schema_"
    return "json_schema", inner[name], f"/json_schema/{name}", policy.whitespace


def _structured_outputs(value: Any, param: str, policy: GatePolicy) -> Wish:
    """vLLM's field: exactly one kind inside."""
    if not isinstance(value, dict):
        raise GrammarRefused("must be an object", "", param)
    whitespace = policy.whitespace
    if value.get("disable_any_whitespace"):
        whitespace = "none"
    given = {name: one for name, one in value.items() if one is not None and one is not False}
    given.pop("disable_any_whitespace", None)
    for name in given:
        if name not in _INNER:
            raise GrammarRefused("this field is not supported", f"/{name[:40]}", param)
    if len(given) != 1:
        raise GrammarRefused(f"{len(given)} kinds are given; give one of {', '.join(_INNER)}", "", param)
    ((name, one),) = given.items()
    return _INNER[name], one, f"/{name}", whitespace
