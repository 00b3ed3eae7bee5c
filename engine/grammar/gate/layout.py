"""White space between the values of generated JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Whitespace = Literal["none", "compact", "flexible"]


@dataclass(frozen=True, slots=True)
class Layout:
    """EBNF of the punctuation between values, with the white space that is allowed there."""

    comma: str
    colon: str
    after_open: str
    before_close: str


LAYOUTS: dict[str, Layout] = {
    "none": Layout('","', '":"', "", ""),
    "compact": Layout('"," " "?', '":" " "?', "", ""),
    "flexible": Layout(*('ws "," ws', 'ws ":" ws', "ws", "ws")),
}
"""No white space; at most one space after a comma or a colon; up to 20 characters wherever JSON has any."""

WS_RULE = "ws ::= [ \\n\\t]{0,20}"
