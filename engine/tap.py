"""A place to look at what is sent to an actor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.actors.links import Ref
from engine.messages import Message


class Tap:
    """Stands before an actor: what is sent to it is seen, and goes on as `see` returns it."""

    def __init__(self, ref: Ref, see: Callable[[Any], Message]) -> None:
        self._ref, self._see = ref, see

    def tell(self, msg: Message) -> None:
        """As Ref.tell."""
        self._ref.tell(self._see(msg))

    async def offer(self, msg: Message) -> None:
        """As Ref.offer."""
        await self._ref.offer(self._see(msg))
