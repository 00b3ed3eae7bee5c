"""Stop strings over a text that grows: what may go out now, and which stop string was completed first."""

from __future__ import annotations

from collections.abc import Sequence


def first_match(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """(start, stop) of the stop string that ends first in `text`, of equal ends the longest; else None."""
    best: tuple[int, int, str] | None = None
    for stop in stops:
        start = text.find(stop)
        if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
            best = (start + len(stop), start, stop)
    return None if best is None else (best[1], best[2])


def undecided(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that is a proper beginning of a stop string and may become one."""
    longest = 0
    for stop in stops:
        for length in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:length]):
                longest = length
                break
    return longest


class StopScan:
    """One request's text on its way out.

    stops  stop strings, none empty
    keep   a completed stop string stays in the text
    """

    __slots__ = ("held", "keep", "stops")

    def __init__(self, stops: tuple[str, ...], keep: bool) -> None:
        self.stops = stops
        self.keep = keep
        self.held = ""

    def feed(self, piece: str) -> tuple[str, str | None]:
        """(text that can't become part of a stop string, the stop string that `piece` completed or None)."""
        if not self.stops:
            return piece, None
        if not piece:
            return "", None
        text = self.held + piece
        match = first_match(text, self.stops)
        if match is not None:
            start, stop = match
            self.held = ""
            return text[: start + len(stop)] if self.keep else text[:start], stop
        cut = len(text) - undecided(text, self.stops)
        self.held = text[cut:]
        return text[:cut], None

    def flush(self) -> str:
        """The text that was held back; nothing will follow it."""
        text, self.held = self.held, ""
        return text
