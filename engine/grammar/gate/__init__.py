"""The front gate: what a client asks becomes a grammar that is truly enforced, or a refusal by name."""

from engine.grammar.gate.refusals import GrammarRefused
from engine.grammar.gate.request import GatePolicy, parse_request
from engine.grammar.gate.schema import object_grammar, schema_grammar
from engine.grammar.gate.tools import Markup, Tool, tool_call_grammar

__all__ = [
    "GatePolicy",
    "GrammarRefused",
    "Markup",
    "Tool",
    "object_grammar",
    "parse_request",
    "schema_grammar",
    "tool_call_grammar",
]
