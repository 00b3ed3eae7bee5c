"""The actor `matchers` of a rank that can't follow grammars."""

from __future__ import annotations

from collections.abc import Callable

from engine.messages import MatcherReady, MatcherWanted, Message


class NoMatchers:
    """Every request that has a grammar fails.

    answer  takes MatcherReady
    """

    name = "matchers"

    def __init__(self, answer: Callable[[MatcherReady], None]) -> None:
        self._answer = answer

    def tell(self, msg: Message) -> None:
        """Refuses."""
        if isinstance(msg, MatcherWanted):
            self._answer(MatcherReady(msg.request_id, 500, "this rank can't follow a grammar"))

    async def offer(self, msg: Message) -> None:
        """As `tell`."""
        self.tell(msg)
