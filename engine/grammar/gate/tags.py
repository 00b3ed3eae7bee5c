"""Structural tags: free text with constrained parts, checked part by part and written anew.

Schemas and patterns inside become grammars of the gate's own, so that nothing in them is dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.grammar.gate import jsontext
from engine.grammar.gate.ebnf import ebnf_grammar
from engine.grammar.gate.jsontext import LIMITS, Limits, render, step
from engine.grammar.gate.layout import Whitespace
from engine.grammar.gate.numbers import Number
from engine.grammar.gate.refusals import GrammarRefused
from engine.grammar.gate.schema import parsed_grammar
from engine.grammar.gate.texts import regex_text
from engine.grammar.key import GrammarKey

MAX_TAGS = 256
MAX_REPEAT = 10_000


def tag_grammar(
    value: Any, *, whitespace: Whitespace = "compact", open_objects: bool = False, limits: Limits = LIMITS
) -> GrammarKey:
    """The key of a structural tag, in its present form or the older one with `structures` and `triggers`."""
    found = (
        jsontext.parse(value, limits)
        if isinstance(value, str | bytes)
        else jsontext.from_value(value, limits)
    )
    if not isinstance(found, dict) or found.get("type", "structural_tag") != "structural_tag":
        raise GrammarRefused("must be an object of the type structural_tag")
    writer = _Writer(whitespace, open_objects, limits)
    made = writer.format(found["format"], "/format") if "format" in found else writer.structures(found)
    text = render({"type": "structural_tag", "format": made})
    return GrammarKey("structural_tag", text, (("whitespace", whitespace), ("open_objects", open_objects)))


class _Writer:
    def __init__(self, whitespace: Whitespace, open_objects: bool, limits: Limits) -> None:
        self._whitespace: Whitespace = whitespace
        self._open = open_objects
        self._limits = limits
        self._kinds: dict[str, Callable[[dict[str, Any], str], dict[str, Any]]] = {
            "const_string": self._const,
            "json_schema": self._schema,
            "regex": self._regex,
            "grammar": self._grammar,
            "any_text": self._any_text,
            "sequence": self._several,
            "or": self._several,
            "tag": self._tag,
            "triggered_tags": self._triggered,
            "tags_with_separator": self._separated,
            "optional": self._inner,
            "plus": self._inner,
            "star": self._inner,
            "repeat": self._repeat,
        }

    def format(self, value: Any, path: str) -> dict[str, Any]:
        """One format, checked. Refuses a type or a field that isn't handled."""
        kind = value.get("type") if isinstance(value, dict) else None
        if not isinstance(kind, str) or kind not in self._kinds:
            known = ", ".join(sorted(self._kinds))
            raise GrammarRefused(f"the format {str(kind)[:40]!r} is none of {known}", step(path, "type"))
        return {"type": kind, **self._kinds[kind](value, path)}

    def structures(self, value: dict[str, Any]) -> dict[str, Any]:
        """The older form."""
        _fields(value, "", "type", "structures", "triggers")
        tags = []
        for i, one in enumerate(_list(value, "structures", "")):
            path = step("", "structures", i)
            if not isinstance(one, dict):
                raise GrammarRefused("must be an object", path)
            _fields(one, path, "begin", "schema", "end")
            content = {"type": "json_schema", "json_schema": one.get("schema")}
            tags.append({"type": "tag", "begin": one.get("begin"), "content": content, "end": one.get("end")})
        made = {"triggers": value.get("triggers"), "tags": tags}
        return {"type": "triggered_tags", **self._triggered(made, "")}

    def _const(self, value: dict[str, Any], path: str) -> dict[str, Any]:
        _fields(value, path, "type", "value")
        return {"value": _text(value, "value", path)}

    def _schema(self, value: dict[str, Any], path: str) -> dict[str, Any]:
        _fields(value, path, "type", "json_schema", "style")
        if value.get("style", "json") != "json":
            raise GrammarRefused("only the style json is supported", step(path, "style"))
        where = step(path, "json_schema")
        schema = value.get("json_schema")
        if isinstance(schema, str):
            schema = jsontext.parse(schema, self._limits)
        try:
            key = parsed_grammar(schema, self._whitespace, open_objects=self._open, limits=self._limits)
        except GrammarRefused as error:
            raise GrammarRefused(error.why, where + error.path) from error
        return {"type": "grammar", "grammar": key.text}

    def _regex(self, value: dict[str, Any], path: str) -> dict[str, Any]:
        _fields(value, path, "type", "pattern")
        try:
            return {"type": "grammar", "grammar": regex_text(value.get("pattern"), self._limits)}
        except GrammarRefused as error:
            raise GrammarRefused(error.why, step(path, "pattern")) from error

    def _grammar(self, value: dict[str, Any], path: str) -> dict[str, Any]:
        _fields(value, path, "type", "grammar", "syntax")
        if value.get("syntax", "ebnf") != "ebnf":
            raise GrammarRefused("only the syntax ebnf is supported", step(path, "syntax"))
        try:
            return {"grammar": ebnf_grammar(value.get("grammar"), self._limits).text}
        except GrammarRefused as error:
            raise GrammarRefused(error.why, step(path, "grammar")) from error

    def _any_text(self, value: dict[str, Any], path: str) -> dict[str, Any]:
        _fields(value, path, "type", "excludes")
        return {"excludes": _texts(value, "excludes", path)} if "excludes" in value else {}

    def _several(self, value: dict[str, Any], path: str) -> dict[str, Any]:
        _fields(value, path, "type", "elements")
        found = _list(value, "elements", path)
        return {"elements": [self.format(one, step(path, "elements", i)) for i, one in enumerate(found)]}

    def _tag(self, value: dict[str, Any], path: str) -> dict[str, Any]:
        _fields(value, path, "type", "begin", "content", "end")
        end = value.get("end")
        return {
            "begin": _text(value, "begin", path),
            "content": self.format(value.get("content"), step(path, "content")),
            "end": _texts(value, "end", path) if isinstance(end, list) else _text(value, "end", path),
        }

    def _tags(self, value: dict[str, Any], path: str) -> list[dict[str, Any]]:
        found = _list(value, "tags", path)
        made = []
        for i, one in enumerate(found):
            where = step(path, "tags", i)
            if not isinstance(one, dict) or one.get("type", "tag") != "tag":
                raise GrammarRefused("must be a tag", where)
            made.append({"type": "tag", **self._tag({"type": "tag", **one}, where)})
        return made

    def _triggered(self, value: dict[str, Any], path: str) -> dict[str, Any]:
        _fields(value, path, "type", "triggers", "tags", *_FLAGS, "excludes")
        triggers, tags = _texts(value, "triggers", path), self._tags(value, path)
        for i, tag in enumerate(tags):
            if sum(tag["begin"].startswith(trigger) for trigger in triggers) != 1:
                raise GrammarRefused("must start with one of the triggers", step(path, "tags", i, "begin"))
        excludes = {"excludes": _texts(value, "excludes", path)} if "excludes" in value else {}
        return {"triggers": triggers, "tags": tags, **_flags(value, path), **excludes}

    def _separated(self, value: dict[str, Any], path: str) -> dict[str, Any]:
        _fields(value, path, "type", "tags", "separator", *_FLAGS)
        separator = _text(value, "separator", path)
        return {"tags": self._tags(value, path), "separator": separator, **_flags(value, path)}

    def _inner(self, value: dict[str, Any], path: str) -> dict[str, Any]:
        _fields(value, path, "type", "content")
        return {"content": self.format(value.get("content"), step(path, "content"))}

    def _repeat(self, value: dict[str, Any], path: str) -> dict[str, Any]:
        _fields(value, path, "type", "min", "max", "content")
        bounds = {}
        for name in ("min", "max"):
            found = value.get(name)
            if (
                not isinstance(found, Number)
                or found.value.denominator != 1
                or not 0 <= found.value <= MAX_REPEAT
            ):
                raise GrammarRefused(f"must be a whole number up to {MAX_REPEAT}", step(path, name))
            bounds[name] = int(found.value)
        if bounds["min"] > bounds["max"]:
            raise GrammarRefused("min is above max", step(path, "min"))
        content = self.format(value.get("content"), step(path, "content"))
        return {**{name: Number(str(one)) for name, one in bounds.items()}, "content": content}


_FLAGS = ("at_least_one", "stop_after_first")


def _flags(value: dict[str, Any], path: str) -> dict[str, bool]:
    for name in _FLAGS:
        if not isinstance(value.get(name, False), bool):
            raise GrammarRefused("must be true or false", step(path, name))
    return {name: value[name] for name in _FLAGS if name in value}


def _fields(value: dict[str, Any], path: str, *known: str) -> None:
    """Refuse a field that isn't handled: a limit that is dropped isn't enforced."""
    for name in value:
        if name not in known:
            raise GrammarRefused("this field is not supported", step(path, name))


def _text(value: dict[str, Any], name: str, path: str) -> str:
    found = value.get(name)
    if not isinstance(found, str) or "\0" in found:
        raise GrammarRefused("must be a string without NUL", step(path, name))
    return found


def _texts(value: dict[str, Any], name: str, path: str) -> list[str]:
    found = _list(value, name, path)
    if not all(isinstance(one, str) and one and "\0" not in one for one in found):
        raise GrammarRefused("must be strings that aren't empty and have no NUL", step(path, name))
    return found


def _list(value: dict[str, Any], name: str, path: str) -> list[Any]:
    found = value.get(name)
    if not isinstance(found, list) or not 1 <= len(found) <= MAX_TAGS:
        raise GrammarRefused(f"must be a list of 1 to {MAX_TAGS}", step(path, name))
    return found
