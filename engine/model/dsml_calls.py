"""One block of tool calls, read piece by piece.

The block is cut at its marker tokens. Each part between two markers is a tag, then what follows the tag, then
the bracket of the next one: `<` or `</`. A call is emitted once its closing tag is complete, or dropped with
a reason.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from engine.model.encoding import to_json

_INVOKE = re.compile(r'invoke\s+name="(.*?)"\s*(/?)>(.*)\Z', re.DOTALL)
_PARAMETER = re.compile(r'parameter\s+name="(.*?)"\s+string="(true|false)"\s*>(.*)\Z', re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One complete call; `arguments` is a JSON object as text, keys in the order they were written."""

    name: str
    arguments: str


class Block:
    """Collects calls from text and markers; `take` gives what is complete."""

    def __init__(self, block_name: str) -> None:
        self._block_name = block_name
        self._part: list[str] = []
        self._tag = ""  # "<" or "</" before the last marker, "" before the first one and at a stray one
        self._call: _OpenCall | None = None
        self._calls: list[ToolCall] = []
        self._dropped: list[str] = []

    def text(self, text: str) -> None:
        """Text between markers."""
        self._part.append(text)
        if self._tag == "</" and self._call is not None and "".join(self._part).startswith("invoke>"):
            self._close()

    def marker(self) -> None:
        """The marker token: the part before it is complete."""
        part = "".join(self._part)
        self._part.clear()
        bracket = "</" if part.endswith("</") else "<" if part.endswith("<") else ""
        self._read(part.removesuffix(bracket))
        if not bracket:
            self._fault("has a marker outside a tag")
        self._tag = bracket

    def finish(self) -> None:
        """The end of the output: an open call is dropped."""
        self._read("".join(self._part))
        self._part.clear()
        self._fault("is not complete")
        self._close()
        self._tag = ""

    def take(self) -> tuple[list[ToolCall], list[str]]:
        """Calls completed, and reasons for calls dropped, since the last time."""
        taken = self._calls, self._dropped
        self._calls, self._dropped = [], []
        return taken

    def _read(self, part: str) -> None:
        """One tag with what follows it."""
        if self._tag == "</":
            self._read_closing(part)
        elif self._tag == "<":
            self._read_opening(part)

    def _read_opening(self, part: str) -> None:
        invoke, parameter = _INVOKE.match(part), _PARAMETER.match(part)
        if invoke:
            self._fault("is not closed")
            self._close()
            self._call = _OpenCall(invoke.group(1), invoke.group(3))
            if invoke.group(2):
                self._close()
        elif parameter and self._call is not None:
            self._call.parameter(*parameter.groups())
        elif part.rstrip() != f"{self._block_name}>" or self._call is not None:
            self._stray(part)

    def _read_closing(self, part: str) -> None:
        tag, _, rest = part.partition(">")
        if tag == "parameter" and self._call is not None:
            self._call.parameter_end()
        elif tag not in ("invoke", self._block_name):
            self._stray(part)
        if rest.strip():
            self._stray(rest)

    def _stray(self, text: str) -> None:
        if self._call is not None:
            self._call.spoil(f"holds {text[:40]!r}")
        else:
            self._dropped.append(f"{text[:40]!r} is not part of a call")

    def _fault(self, fault: str) -> None:
        if self._call is not None:
            self._call.spoil(fault)

    def _close(self) -> None:
        if self._call is None:
            return
        call = self._call.result()
        if isinstance(call, ToolCall):
            self._calls.append(call)
        else:
            self._dropped.append(call)
        self._call = None


class _OpenCall:
    """A call whose parameters are still coming."""

    def __init__(self, name: str, body: str) -> None:
        self._name = name
        self._body = body.strip()
        self._parameters: dict[str, str] = {}
        self._in_parameter = False
        self._fault = "" if name else "has no name"

    def parameter(self, key: str, is_string: str, value: str) -> None:
        """One parameter: raw text, or JSON; JSON that doesn't parse is kept as text."""
        if self._in_parameter or key in self._parameters:
            self.spoil(f"has a parameter {key!r} twice or inside another")
        self._in_parameter = True
        self._parameters[key] = to_json(value) if is_string == "true" else _json_or_text(value)

    def parameter_end(self) -> None:
        """The closing tag of a parameter."""
        if not self._in_parameter:
            self.spoil("closes a parameter that isn't open")
        self._in_parameter = False

    def spoil(self, fault: str) -> None:
        """The call will be dropped, for its first fault."""
        self._fault = self._fault or fault

    def result(self) -> ToolCall | str:
        """The call, or why it isn't one."""
        arguments = "{" + ", ".join(f"{to_json(k)}: {v}" for k, v in self._parameters.items()) + "}"
        if self._in_parameter:
            self.spoil("has a parameter that isn't closed")
        if self._body and not self._parameters and isinstance(_parse(self._body), dict):
            arguments = self._body
        elif self._body:
            self.spoil(f"holds {self._body[:40]!r}")
        return f"call of {self._name!r} {self._fault}" if self._fault else ToolCall(self._name, arguments)


_NOT_JSON = object()


def _json_or_text(value: str) -> str:
    return to_json(value) if _parse(value) is _NOT_JSON else value.strip()


def _parse(text: str) -> Any:
    """The value of a JSON text without NaN and Infinity; `_NOT_JSON` where it is none."""
    try:
        return json.loads(text, parse_constant=_reject)
    except (ValueError, RecursionError):
        return _NOT_JSON


def _reject(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
