"""Calls as the chat format writes them in an answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from engine.model.encoding import Encoding
from engine.model.prompt_strings import PromptStrings
from engine.model.segments import Segment


def call_segments(strings: PromptStrings, calls: Sequence[tuple[str, dict[str, Any]]]) -> list[Segment]:
    """The answer that makes these calls and says nothing else, without its end token."""
    functions = [{"name": name, "arguments": json.dumps(arguments)} for name, arguments in calls]
    message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "id": f"c{i}", "function": one} for i, one in enumerate(functions)
        ],
    }
    segments = Encoding(strings).answer_segments(message)
    assert segments[-1] == (strings.tokens["eos"], True)
    return segments[:-1]
