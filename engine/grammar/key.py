"""The canonical name of one grammar: what the gate makes of a request, and what is compiled and cached."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

from engine.errors import BadMessage

Kind = Literal["json_schema", "json_object", "regex", "ebnf", "choice", "tool_calls", "structural_tag"]
"""What the client asked for."""

KINDS: tuple[str, ...] = get_args(Kind)

Syntax = Literal["ebnf", "structural_tag"]
"""How `text` is written: xgrammar's EBNF with the rule `root`, or a structural tag as JSON."""

FORMAT = 1
"""Version of the key's serial form and of the meaning of `text`; part of every digest."""

Option = tuple[str, str | int | bool]


@dataclass(frozen=True)
class GrammarKey:
    """A grammar that the gate has checked. Equal keys are equal grammars; the order of options is the gate's.

    kind     what the client asked for; for metrics and messages, and part of the digest
    text     what is compiled, and nothing else is: EBNF for every kind but structural_tag. A JSON schema is
             lowered to EBNF by the gate, so nothing depends on how a compiler reads schemas
    options  what shaped `text`, such as the whitespace policy; informative for a compiler
    """

    kind: Kind
    text: str
    options: tuple[Option, ...] = ()

    @property
    def syntax(self) -> Syntax:
        """Which of the compiler's entry points takes `text`."""
        return "structural_tag" if self.kind == "structural_tag" else "ebnf"

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the serial form, in hexadecimal."""
        return hashlib.sha256(self.wire().encode("utf-8")).hexdigest()

    def wire(self) -> str:
        """The key as one line of ASCII text; goes through a message and back without loss."""
        return json.dumps(
            [FORMAT, self.kind, [list(option) for option in self.options], self.text],
            ensure_ascii=True,
            separators=(",", ":"),
        )

    @classmethod
    def from_wire(cls, wire: str) -> GrammarKey:
        """The key that `wire` wrote. Raises BadMessage for any other text."""
        try:
            version, kind, options, text = json.loads(wire)
            pairs = tuple((name, value) for name, value in options)
        except (ValueError, TypeError) as error:
            raise BadMessage(f"a grammar key of {len(wire)} characters can't be read: {error}") from error
        if version != FORMAT or kind not in KINDS or not isinstance(text, str):
            raise BadMessage(
                f"a grammar key of format {version!r} and kind {kind!r} is not one of format {FORMAT}"
            )
        for name, value in pairs:
            if not isinstance(name, str) or not isinstance(value, str | int | bool):
                raise BadMessage(f"a grammar key has the option {name!r} = {value!r}")
        return cls(kind, text, pairs)
