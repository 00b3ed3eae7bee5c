"""Prompt text as segments: special tokens apart from plain text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache

from engine.model.prompt_strings import PromptStrings

Segment = tuple[str, bool]
"""(text, is_control): a control segment is exactly one special token's string."""

_PLACEHOLDER = re.compile(r"\{(\w+)\}")


def split_specials(text: str, specials: tuple[str, ...]) -> list[Segment]:
    """Trusted text cut at its special tokens; the longest of `specials` wins."""
    out: list[Segment] = []
    position = 0
    for match in _any_of(specials).finditer(text):
        out += [(text[position : match.start()], False), (match.group(), True)]
        position = match.end()
    out.append((text[position:], False))
    return [segment for segment in out if segment[0]]


@cache
def _any_of(specials: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(specials, key=len, reverse=True))))


class Writer:
    """Collects segments; joins neighbouring text, so that it is tokenised as one."""

    def __init__(self, strings: PromptStrings) -> None:
        self._strings = strings
        self._out: list[Segment] = []
        self._pending: list[str] = []

    def text(self, text: str) -> None:
        """Plain text: special strings in it stay text."""
        self._pending.append(text)

    def control(self, name: str) -> None:
        """The special token of this name."""
        self.special(self._strings.tokens[name])

    def special(self, token: str) -> None:
        """A special token by its string."""
        self._flush()
        self._out.append((token, True))

    def extend(self, segments: Sequence[Segment]) -> None:
        """Segments made elsewhere."""
        for text, is_control in segments:
            (self.special if is_control else self.text)(text)

    def template(self, name: str, values: Mapping[str, str | list[Segment]]) -> None:
        """A fixed string with its placeholders filled; braces and special strings in a value stay text."""
        template = self._strings.templates[name]
        tokens = self._strings.tokens
        known: dict[str, str | list[Segment]] = {
            "dsml_token": [(tokens["dsml"], True)],
            "thinking_start_token": [(tokens["think_start"], True)],
            "thinking_end_token": [(tokens["think_end"], True)],
            "tc_block_name": self._strings.block_name,
            **values,
        }
        position = 0
        for match in _PLACEHOLDER.finditer(template):
            self.extend(split_specials(template[position : match.start()], self._strings.specials))
            value = known.get(match.group(1), match.group())
            self.extend([(value, False)] if isinstance(value, str) else value)
            position = match.end()
        self.extend(split_specials(template[position:], self._strings.specials))

    def segments(self) -> list[Segment]:
        """All that was written."""
        self._flush()
        return self._out

    def _flush(self) -> None:
        text = "".join(self._pending)
        self._pending.clear()
        if text:
            self._out.append((text, False))
