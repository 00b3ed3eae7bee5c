"""Tool calls in the model's own markup: which tools may be called, and strict ones with their parameters.

The markup's marker is one special token; it is matched by its id, so no text can stand for it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.grammar.gate import charset, jsontext
from engine.grammar.gate.alternatives import ANYTHING, Goal, Str
from engine.grammar.gate.document import Document
from engine.grammar.gate.ebnf_text import Rules, choice, literal, one_of, repeat, sequence
from engine.grammar.gate.expansion import Expansion
from engine.grammar.gate.jsontext import LIMITS, Limits
from engine.grammar.gate.layout import LAYOUTS, WS_RULE, Whitespace
from engine.grammar.gate.lowering import Lowering
from engine.grammar.gate.object_plans import ObjPlan
from engine.grammar.gate.refusals import GrammarRefused
from engine.grammar.gate.scalars import string
from engine.grammar.gate.schema import MAX_GRAMMAR_CHARS
from engine.grammar.gate.work import bounded_work
from engine.grammar.key import GrammarKey
from engine.model.prompt_strings import PromptStrings

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}\Z")
_HOLE = re.compile(r"\{(dsml_token|name|arguments|tc_block_name|tool_calls)\}")
# Names and values of a call that nobody constrains; a value ends where the marker comes.
_FREE_KEY = charset.minus(charset.ALL, charset.union(((0, 0x1F),), charset.of('"<>')))


@dataclass(frozen=True, slots=True)
class Tool:
    """One function that may be called.

    parameters  JSON schema as text or decoded; enforced where `strict`
    path        of its schema in the request, for refusals
    """

    name: str
    parameters: Any
    strict: bool
    path: str = ""


@dataclass(frozen=True, slots=True)
class Markup:
    """The call markup of a model: its strings, and the id of its marker token."""

    strings: PromptStrings
    marker_id: int


def tool_call_grammar(
    tools: Sequence[Tool],
    markup: Markup,
    *,
    required: bool,
    parallel: bool = True,
    whitespace: Whitespace = "compact",
    limits: Limits = LIMITS,
) -> GrammarKey:
    """The key of a reply with calls of these tools.

    required  the reply is a block of calls; else free text, which may end with one
    parallel  several calls may be in the block
    Raises GrammarRefused with the tool's place where its name or a strict schema can't be enforced.
    """
    if not tools:
        raise GrammarRefused("a call is wanted, but there is no tool")
    writer = _Writer(markup, Rules(limits.rules, MAX_GRAMMAR_CHARS), whitespace, limits)
    with bounded_work():
        calls = [writer.call(tool) for tool in tools]
    call = writer.rules.shared(choice(calls))
    more = repeat(sequence((literal("\n"), call)), 0, None if parallel else 0)
    block = writer.filled("tool_calls", {"tool_calls": sequence((call, more))})
    lead = repeat(literal("\n\n"), 0, 1)
    if required:
        body = sequence((lead, block))
    else:
        body = sequence((repeat(one_of(charset.ALL, "raw"), 0, None), f"({block})?"))
    text = writer.rules.text(writer.rules.shared(body))
    text += f"\n{WS_RULE}" if whitespace == "flexible" else ""
    options = (("required", required), ("parallel", parallel), ("whitespace", whitespace))
    return GrammarKey("tool_calls", text, options)


class _Writer:
    def __init__(self, markup: Markup, rules: Rules, whitespace: Whitespace, limits: Limits) -> None:
        self.rules = rules
        self._markup = markup
        self._marker = f"Token({markup.marker_id})"
        self._layout = LAYOUTS[whitespace]
        self._limits = limits

    def filled(self, template: str, values: Mapping[str, str]) -> str:
        """A template of the chat format as EBNF; the marker and values in their places."""
        known = {
            "dsml_token": self._marker,
            "tc_block_name": literal(self._markup.strings.block_name),
            **values,
        }
        parts = _HOLE.split(self._markup.strings.templates[template])
        return sequence(
            known[part] if i % 2 else literal(part) if part else "" for i, part in enumerate(parts)
        )

    def call(self, tool: Tool) -> str:
        """One call, as a rule."""
        if not _NAME.match(tool.name):
            raise GrammarRefused(f"{tool.name[:40]!r} can't be a function's name", tool.path)
        arguments = self._strict(tool) if tool.strict else self._free()
        body = self.filled("tool_call", {"name": literal(tool.name), "arguments": arguments})
        return self.rules.shared(body)

    def _strict(self, tool: Tool) -> str:
        try:
            parameters = tool.parameters if tool.parameters is not None else {"type": "object"}
            value = (
                jsontext.parse(parameters, self._limits)
                if isinstance(parameters, str | bytes)
                else jsontext.from_value(parameters, self._limits)
            )
            expansion = Expansion(Document(value, self._limits))
            lowering = Lowering(expansion, self.rules, self._layout, open_objects=False)
            goal: Goal = ((expansion.document.root, True),)
            plans = [plan for plan in lowering.plans(goal) if isinstance(plan, ObjPlan)]
            if not plans:
                raise GrammarRefused("parameters must be an object")
            return f"({choice([self._parameters(plan, lowering) for plan in plans])})"
        except GrammarRefused as error:
            raise GrammarRefused(error.why, tool.path + error.path) from error

    def _parameters(self, plan: ObjPlan, lowering: Lowering) -> str:
        """Parameters in the schema's order, each on a line of its own."""
        others = [(key, goal) for key, goal in plan.others if lowering.possible(goal)]
        if others == [(Str(), ANYTHING)] and not plan.entries and not plan.low and plan.high is None:
            return self._free()
        if others or plan.must:
            raise GrammarRefused(
                "a strict tool can't have parameters that aren't listed", "/additionalProperties"
            )

        def member(name: str, goal: Goal, count: int) -> str:
            if not name or re.search(r'["<>\x00-\x1f]', name):
                raise GrammarRefused(f"{name[:40]!r} can't be a parameter's name", "/properties")
            key = literal(name)
            return sequence(
                (literal("\n") if count else "", self._parameter(key, self._value(goal, lowering)))
            )

        return lowering.members(plan, member, lambda count: '""')

    def _parameter(self, key: str, value: str) -> str:
        marker = self._marker
        opens = sequence(('"<"', marker, literal('parameter name="'), key, literal('" string="')))
        return sequence((opens, value, '"</"', marker, '"parameter>"'))

    def _value(self, goal: Goal, lowering: Lowering) -> str:
        """Texts raw, all else as JSON; the flag before them says which."""
        plans = lowering.plans(goal)
        texts = [string(plan, self.rules, "raw", "") for plan in plans if isinstance(plan, Str)]
        others = [lowering.expression(plan) for plan in plans if not isinstance(plan, Str)]
        ways = []
        if texts:
            ways.append(sequence((literal('true">'), self.rules.shared(choice(texts)))))
        if others:
            ways.append(sequence((literal('false">'), self.rules.shared(choice(others)))))
        return self.rules.shared(choice(ways))

    def _free(self) -> str:
        """Any parameters: each a text, or JSON of any other type."""
        expansion = Expansion(Document(True, self._limits))
        lowering = Lowering(expansion, self.rules, self._layout, open_objects=True)
        key = repeat(one_of(_FREE_KEY, "raw"), 1, 64)
        one = self.rules.shared(self._parameter(key, self._value(ANYTHING, lowering)))
        return f"({sequence((one, repeat(sequence((literal(chr(10)), one)), 0, None)))})?"
