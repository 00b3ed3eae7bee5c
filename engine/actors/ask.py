"""Questions with a deadline, for the edges and for administration. A core never asks: it sends."""

from __future__ import annotations

from typing import Any, Protocol

import anyio
import msgspec

from engine.errors import ActorFailed, DeadlinePassed
from engine.messages import Message


class Askable(Protocol):
    """A mailbox of this process."""

    name: str

    def tell(self, msg: Message) -> None:
        """Never waits; raises MailboxFull."""


class _Pending:
    __slots__ = ("answered", "name", "value")

    def __init__(self, name: str) -> None:
        self.name = name
        self.answered = anyio.Event()
        self.value: Any = None


class Asks:
    """The open questions of one process.

    late  replies that came after their asker had gone
    """

    def __init__(self) -> None:
        self._pending: dict[int, _Pending] = {}
        self._failed: dict[str, ActorFailed] = {}
        self._last = 0
        self.late = 0

    async def ask(self, ref: Askable, msg: Message, within_s: float) -> Any:
        """What the actor replies to `msg`, whose field `slot` is filled in here.

        raises  the reply, where it is an exception; DeadlinePassed; MailboxFull; ActorFailed where the
                actor ends with an error before it replies
        """
        if ref.name in self._failed:
            raise self._failed[ref.name]
        self._last += 1
        slot = self._last
        pending = self._pending[slot] = _Pending(ref.name)
        try:
            ref.tell(msgspec.structs.replace(msg, slot=slot))
            with anyio.fail_after(within_s):
                await pending.answered.wait()
        except TimeoutError as error:
            raise DeadlinePassed(
                f"{ref.name} gave no answer to {type(msg).__name__} within {within_s} s"
            ) from error
        finally:
            del self._pending[slot]
        if isinstance(pending.value, Exception):
            raise pending.value
        return pending.value

    def reply(self, slot: Any, value: Any) -> None:
        """Answers the question `slot`; one that nobody waits for any more is counted."""
        pending = self._pending.get(slot)
        if pending is None:
            self.late += 1
            return
        pending.value = value
        pending.answered.set()

    def fail(self, name: str, error: ActorFailed, for_good: bool) -> None:
        """Every open question to the actor `name` ends with `error`; with `for_good`, later ones do, too."""
        if for_good:
            self._failed[name] = error
        for pending in self._pending.values():
            if pending.name == name:
                pending.value = error
                pending.answered.set()
