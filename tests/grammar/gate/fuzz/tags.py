"""Random structural tags, changes of them, and an independent reading of those that hold no free text."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from tests.grammar.gate.fuzz.patterns import Ecma, Undecided
from tests.grammar.gate.fuzz.reading import Ends, either, following, read, repeated, string
from tests.grammar.gate.oracle import validator

LEAVES: list[dict[str, Any]] = [
    {"type": "const_string", "value": "a"},
    {"type": "const_string", "value": "</x>é"},
    {"type": "regex", "pattern": "[a-c]{1,2}"},
    {"type": "regex", "pattern": "x|01*"},
    {"type": "grammar", "grammar": 'root ::= "a" r ","\nr ::= [b-c]?'},
    {"type": "json_schema", "json_schema": {"type": "boolean"}},
    {"type": "json_schema", "json_schema": {"enum": ["a", 1, None]}},
    {"type": "json_schema", "json_schema": {"type": "integer", "minimum": 0, "maximum": 12}},
]
JUNK: list[Any] = [
    None, True, 0, 1, -1, 2.5, 99999, "", "a", "tag", "any_text", "\0", [], {}, ["a"], [""],
    {"type": "or"}, *LEAVES[:3],
]  # fmt: skip
FIELDS = [
    "type",
    "value",
    "content",
    "elements",
    "begin",
    "end",
    "min",
    "max",
    "tags",
    "triggers",
    "excludes",
    "x",
]


class TagMaker:
    """Tags from a source of chance."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def tag(self) -> dict[str, Any]:
        """A whole structural tag."""
        return {"type": "structural_tag", "format": self._format(3)}

    def _format(self, depth: int) -> dict[str, Any]:
        kinds = [
            "sequence",
            "or",
            "tag",
            "optional",
            "plus",
            "star",
            "repeat",
            "triggered_tags",
            "tags_with_separator",
        ]
        kind = self._chance.choice(kinds) if depth and self._chance.random() < 0.7 else ""
        if kind in ("sequence", "or"):
            return {
                "type": kind,
                "elements": [self._format(depth - 1) for _ in range(self._chance.randint(1, 3))],
            }
        if kind == "tag":
            return self._one(depth)
        if kind in ("optional", "plus", "star"):
            return {"type": kind, "content": self._format(depth - 1)}
        if kind == "repeat":
            low = self._chance.randint(0, 2)
            return {
                "type": kind,
                "min": low,
                "max": low + self._chance.randint(0, 2),
                "content": self._format(0),
            }
        if kind:
            more = (
                {"triggers": ["<"]}
                if kind == "triggered_tags"
                else {"separator": self._chance.choice([",", ""])}
            )
            return {
                "type": kind,
                **more,
                "tags": [self._one(depth) for _ in range(self._chance.randint(1, 2))],
            }
        return dict(self._chance.choice(LEAVES))

    def _one(self, depth: int) -> dict[str, Any]:
        content = {"type": "any_text"} if self._chance.random() < 0.2 else self._format(depth - 1)
        return {"type": "tag", "begin": self._chance.choice(["<x>", "<"]), "content": content, "end": "</x>"}


def changed(value: Any, chance: random.Random) -> Any:
    """A copy with one place replaced, dropped, or given a field more."""
    value = json.loads(json.dumps(value))
    places: list[tuple[Any, Any]] = []
    todo = [value]
    while todo:
        one = todo.pop()
        keys = list(one) if isinstance(one, dict) else range(len(one)) if isinstance(one, list) else []
        places += [(one, key) for key in keys]
        todo += [one[key] for key in keys]
    holder, key = chance.choice(places)
    draw = chance.random()
    if draw < 0.2:
        del holder[key]
    elif draw < 0.4 and isinstance(holder, dict):
        holder[chance.choice(FIELDS)] = chance.choice(JUNK)
    else:
        holder[key] = chance.choice(JUNK)
    return value


def tag_reader(value: dict[str, Any]) -> Callable[[str], bool]:
    """Whether a whole text is in the tag's language. raises Undecided for parts of free text."""
    ends = _ends(value["format"])
    return lambda given: len(given) in ends(given, 0)


def _ends(value: dict[str, Any]) -> Ends:
    kind = value["type"]
    if kind == "const_string":
        return string(value["value"])
    if kind == "regex":
        return _pieces(Ecma(value["pattern"]).matches)
    if kind == "grammar":
        return _pieces(read(value["grammar"]))
    if kind == "json_schema":
        return _pieces(_is_small_json(value["json_schema"]))
    if kind == "tag" and value["content"]["type"] != "any_text":
        stops = value["end"] if isinstance(value["end"], list) else [value["end"]]
        return following(
            [string(value["begin"]), _ends(value["content"]), either([string(one) for one in stops])]
        )
    if kind in ("sequence", "or"):
        parts = [_ends(one) for one in value["elements"]]
        return following(parts) if kind == "sequence" else either(parts)
    bounds = {"optional": (0, 1), "plus": (1, None), "star": (0, None)}
    if kind == "repeat":
        return repeated(_ends(value["content"]), value["min"], value["max"])
    if kind in bounds:
        return repeated(_ends(value["content"]), *bounds[kind])
    raise Undecided(kind)


def _pieces(holds: Callable[[str], bool]) -> Ends:
    """Every piece that a predicate holds for."""

    def ends(given: str, at: int) -> frozenset[int]:
        return frozenset(end for end in range(at, len(given) + 1) if holds(given[at:end]))

    return ends


def _is_small_json(schema: Any) -> Callable[[str], bool]:
    values: list[Any] = [True, False, None, "a", *range(-1, 20)]
    if schema not in [leaf["json_schema"] for leaf in LEAVES if "json_schema" in leaf]:
        raise Undecided(str(schema))
    judge = validator(schema)
    texts = {json.dumps(value) for value in values if judge.is_valid(value)}
    return (texts | ({"-0"} if "0" in texts else set())).__contains__
