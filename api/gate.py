"""From what a request asks of its output to the grammars that its completions need, or a refusal by name.

Reading a schema takes milliseconds, a large one tenths of a second: that is done on threads, two at a time,
and what was read is remembered.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.to_thread
import msgspec

from api.tool_choice import Forced, tools_of
from engine.errors import ConfigError
from engine.grammar.gate import GatePolicy, GrammarRefused, Markup, parse_request, tool_call_grammar
from engine.grammar.gate.request import FIELDS
from engine.grammar.key import GrammarKey
from engine.model.encoding import Encoding
from engine.model.tokenizer import Tokenizer

START, AFTER_THINK = "start", "after_think"
"""Where a grammar begins: with the output, or behind the token that ends the reasoning."""

READERS = 2
MEMORY_BYTES = 16 << 20
"""Of requests' fields and the grammars made of them."""


@dataclass(frozen=True, slots=True)
class Wish:
    """A grammar that a completion needs.

    root   START or AFTER_THINK
    param  the request's field, for refusals that come later
    """

    key: GrammarKey
    root: str
    param: str


@dataclass
class Gate:
    """Reads wishes under a server's policy.

    markup  of tool calls; None where the tokenizer has no token for their marker
    """

    policy: GatePolicy
    markup: Markup | None
    memory_bytes: int = MEMORY_BYTES
    held_bytes: int = 0
    _known: OrderedDict[bytes, GrammarKey] = field(default_factory=OrderedDict)
    _readers: anyio.CapacityLimiter | None = None

    async def wish(
        self, fields: Mapping[str, Any], prefix: str = "", root: str = START, raw: bytes = b""
    ) -> Wish | None:
        """What the fields of a body ask for; None where they ask for none.

        prefix  of field names in refusals
        raw     the body itself: schemas keep the spelling of their numbers, and no key is there twice
        raises  GrammarRefused, which is a BadRequest, with the field and the place in it
        """
        asked = {name: fields[name] for name in FIELDS if fields.get(name) is not None}
        if asked.get("response_format") == {"type": "text"}:
            del asked["response_format"]
        if not asked:
            return None
        asked = exact(asked, raw)
        key = await self._read(msgspec.json.encode(asked), lambda: parse_request(asked, self.policy, prefix))
        return None if key is None else Wish(key, root, prefix + next(iter(asked)))

    async def calls(
        self, tools: list[dict[str, Any]], forced: Forced, parallel: bool, root: str, raw: bytes = b""
    ) -> Wish | None:
        """What tools and the choice among them ask for; None where the model is free to call as it likes.

        raises  GrammarRefused with the tool's place
        """
        given = tools_of(tools, forced.name, _texts_of_tools(raw))
        if not forced.required and not any(tool.strict for tool in given):
            return None
        markup = self.markup
        if markup is None:
            raise GrammarRefused("the model has no token that marks a call", param="tools")

        def read() -> GrammarKey:
            try:
                return tool_call_grammar(
                    given,
                    markup,
                    required=forced.required,
                    parallel=parallel,
                    whitespace=self.policy.whitespace,
                    limits=self.policy.limits,
                )
            except GrammarRefused as error:
                raise error.within("tools") from error

        told = [[tool.name, tool.parameters, tool.strict] for tool in given]
        key = await self._read(msgspec.json.encode([told, forced.required, parallel]), read)
        return None if key is None else Wish(key, root, "tools")

    async def _read(self, name: bytes, read: Callable[[], GrammarKey | None]) -> GrammarKey | None:
        """What `read` makes of the fields whose text `name` is."""
        if self._readers is None:
            self._readers = anyio.CapacityLimiter(READERS)
        if (key := self._known.get(name)) is None:
            async with self._readers:
                # Who waited for a place may have waited for the one that reads the same.
                if (key := self._known.get(name)) is None:
                    key = await anyio.to_thread.run_sync(read, limiter=anyio.CapacityLimiter(1))
        if key is not None:
            self._remember(name, key)
        return key

    def _remember(self, name: bytes, key: GrammarKey) -> None:
        """As the newest; the oldest go where there is no room."""
        known = self._known
        if name not in known:
            self.held_bytes += _size(name, key)
        known[name] = key
        known.move_to_end(name)
        while self.held_bytes > self.memory_bytes:
            self.held_bytes -= _size(*known.popitem(last=False))


def gate_of(policy: GatePolicy, encoding: Encoding, tokenizer: Tokenizer) -> Gate:
    """The gate of a model."""
    strings = encoding.strings
    try:
        return Gate(policy, Markup(strings, tokenizer.token_id(strings.tokens["dsml"])))
    except ConfigError:
        return Gate(policy, None)


def _size(name: bytes, key: GrammarKey) -> int:
    return len(name) + len(key.text)


# ---- schemas as they were spelt -------------------------------------------------------------------


class _Schema(msgspec.Struct):
    schema: msgspec.Raw = msgspec.Raw()


class _Format(msgspec.Struct):
    json_schema: _Schema | None = None


class _Outputs(msgspec.Struct):
    json: msgspec.Raw = msgspec.Raw()


class _Function(msgspec.Struct):
    parameters: msgspec.Raw = msgspec.Raw()


class _Tool(msgspec.Struct):
    function: _Function | None = None


class _Body(msgspec.Struct):
    """Where schemas stand in a body."""

    response_format: _Format | None = None
    json_schema: msgspec.Raw = msgspec.Raw()
    guided_json: msgspec.Raw = msgspec.Raw()
    structural_tag: msgspec.Raw = msgspec.Raw()
    structured_outputs: _Outputs | None = None


class _Tools(msgspec.Struct):
    tools: list[_Tool] | None = None


def exact(asked: Mapping[str, Any], raw: bytes) -> dict[str, Any]:
    """The fields with every schema that is an object as the text that the client sent."""
    found = dict(asked)
    try:
        body = msgspec.json.decode(raw, type=_Body) if raw else _Body()
    except msgspec.MsgspecError:
        # Of another shape than such a field has: whoever reads it says so, with its name.
        return found
    for name in ("json_schema", "guided_json", "structural_tag"):
        text = bytes(getattr(body, name))
        if isinstance(found.get(name), dict) and text:
            found[name] = text.decode()
    schema = body.response_format and body.response_format.json_schema
    wanted = found.get("response_format")
    if schema and isinstance(wanted, dict) and isinstance(wanted["json_schema"].get("schema"), dict):
        spelt = wanted["json_schema"] | {"schema": bytes(schema.schema).decode()}
        found["response_format"] = wanted | {"json_schema": spelt}
    outputs = found.get("structured_outputs")
    if body.structured_outputs and isinstance(outputs, dict) and isinstance(outputs.get("json"), dict):
        found["structured_outputs"] = outputs | {"json": bytes(body.structured_outputs.json).decode()}
    return found


def _texts_of_tools(raw: bytes) -> list[str]:
    """The schema of each tool's parameters, empty where it has none; no list for tools of another shape."""
    try:
        tools = msgspec.json.decode(raw, type=_Tools).tools if raw else None
    except msgspec.MsgspecError:
        return []
    return [bytes(tool.function.parameters).decode() if tool.function else "" for tool in tools or ()]
