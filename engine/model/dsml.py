"""What the model writes -> reasoning, content and tool calls, whole or as it streams.

`ReplyParser` reads segments (special tokens apart from text): token ids give them exactly, plain text through
`TextSplitter`. Markup is never returned as content: a call that isn't well formed is dropped and reported.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.model.dsml_calls import Block, ToolCall
from engine.model.prompt_strings import PromptStrings
from engine.model.segments import Segment, split_specials

# What may stand before a block without being content: its blank line and its opening bracket.
_BEFORE_BLOCK = re.compile(r"\n{0,2}(?:<|</)?\Z")


@dataclass(slots=True)
class Reply:
    """A reply, or what one more piece of a streamed one adds. `dropped` says why calls are missing."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)

    def add(self, more: Reply) -> None:
        """Append a later piece."""
        self.reasoning += more.reasoning
        self.content += more.content
        self.calls += more.calls
        self.dropped += more.dropped


def parse_reply(text: str, strings: PromptStrings, *, thinking: bool) -> Reply:
    """The whole of a reply's text. thinking: the prompt ended with an open `<think>`."""
    parser = ReplyParser(strings, thinking=thinking)
    reply = parser.feed(split_specials(text, strings.specials))
    reply.add(parser.finish())
    return reply


class TextSplitter:
    """Text in pieces -> segments; holds back an end that may turn out to be a special token."""

    def __init__(self, strings: PromptStrings) -> None:
        self._specials = strings.specials
        self._starts = frozenset(text[:size] for text in strings.specials for size in range(1, len(text)))
        self._longest = max(map(len, self._starts))
        self._held = ""

    def feed(self, text: str) -> list[Segment]:
        """Segments that no later text can change."""
        segments = split_specials(self._held + text, self._specials)
        self._held = ""
        if segments and not segments[-1][1]:
            last = segments.pop()[0]
            cut = len(last) - self._may_start_special(last)
            self._held = last[cut:]
            segments += [(last[:cut], False)] if cut else []
        return segments

    def finish(self) -> list[Segment]:
        """The end: what was held back is text."""
        held, self._held = self._held, ""
        return [(held, False)] if held else []

    def _may_start_special(self, text: str) -> int:
        """Length of the longest end of `text` that a special token starts with."""
        for size in range(min(self._longest, len(text)), 0, -1):
            if text[-size:] in self._starts:
                return size
        return 0


class ReplyParser:
    """State machine over segments: reasoning, then content, then calls, then nothing."""

    def __init__(self, strings: PromptStrings, *, thinking: bool) -> None:
        tokens = strings.tokens
        self._think_end, self._dsml, self._eos = tokens["think_end"], tokens["dsml"], tokens["eos"]
        self._state = "reasoning" if thinking else "content"
        self._held = ""
        self._block = Block(strings.block_name)

    def feed(self, segments: Iterable[Segment]) -> Reply:
        """What these segments add."""
        out = Reply()
        for text, is_control in segments:
            if self._state == "ended":
                break
            if is_control:
                self._control(text, out)
            elif self._state == "calls":
                self._block.text(text)
                self._collect(out)
            else:
                self._text(text, out)
        return out

    def finish(self) -> Reply:
        """The end of the output, by EOS, a stop or the length: what was held back; open calls are dropped."""
        out = Reply()
        if self._state == "calls":
            self._block.finish()
            self._collect(out)
        self._release(self._held, out)
        self._held, self._state = "", "ended"
        return out

    def _control(self, token: str, out: Reply) -> None:
        if token == self._eos:
            out.add(self.finish())
        elif token == self._dsml:
            if self._state != "calls":
                self._open_block()
            self._block.marker()
            self._collect(out)
        elif self._state == "calls":
            # A control token inside a value: keep its text, as the value is data.
            self._block.text(token)
            self._collect(out)
        elif token == self._think_end and self._state == "reasoning":
            self._release(self._held, out)
            self._held, self._state = "", "content"
        # Any other control token is markup without meaning here, such as a leading `<think>`: swallowed.

    def _text(self, text: str, out: Reply) -> None:
        """Emit all but an end that may belong to a block."""
        text = self._held + text
        match = _BEFORE_BLOCK.search(text)
        cut = match.start() if match else len(text)
        self._held = text[cut:]
        self._release(text[:cut], out)

    def _open_block(self) -> None:
        """A marker came: the held bracket and blank line are the block's. It ends unclosed reasoning, too."""
        before, self._held = self._held, ""
        bracket = "</" if before.endswith("</") else "<" if before.endswith("<") else ""
        self._block.text(bracket)
        self._state = "calls"

    def _collect(self, out: Reply) -> None:
        calls, dropped = self._block.take()
        out.calls += calls
        out.dropped += dropped

    def _release(self, text: str, out: Reply) -> None:
        if self._state == "reasoning":
            out.reasoning += text
        else:
            out.content += text
