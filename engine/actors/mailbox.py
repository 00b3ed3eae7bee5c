"""A bounded queue with a priority lane: the only way into an actor.

An own queue, because a memory stream lacks what an actor needs: a lane for `Stop` and time-outs, a declared
answer to *full*, statistics, and taking all that has arrived with one wake-up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import anyio
import anyio.lowlevel

from engine.errors import MailboxFull
from engine.messages import Stop

Full = Literal["reject", "wait", "merge"]
"""What happens to a message that finds no room: an error, waiting in `offer`, or joining one that waits."""

Merge = Callable[[Any, Any], Any]
"""(older, newer) -> the message that stands for both, or None where these two don't join."""

PRIORITY_SLACK = 64
"""Room of the priority lane beyond the mailbox's size; its senders are few: timers, children, two jobs."""


def never_merges(older: Any, newer: Any) -> Any:
    """The merge of mailboxes that don't: None for every pair."""
    return None


@dataclass(slots=True)
class MailboxStats:
    """Counts since start.

    taken, first  messages that the owner took from the ordinary and from the priority lane
    depth_max     the most ordinary messages that it ever found waiting
    late          told after the owner had ended: nobody will read them
    """

    taken: int = 0
    first: int = 0
    refused: int = 0
    merged: int = 0
    waited: int = 0
    late: int = 0
    depth_max: int = 0


class Mailbox:
    """Messages for one actor, in order of arrival, the priority lane before them.

    name   of the owner, for errors
    size   most ordinary messages that wait
    full   the policy at `size`; `tell` raises MailboxFull under `reject` and under `wait`. Under `reject`,
           `offer` finds `reserve` places more, `size` by default: actors send there because of what edges got
           in, so that a flood ends in refusals at the edge and never in a failed actor
    merge  used by the policy `merge` alone
    """

    __slots__ = (
        "_arrived",
        "_closed",
        "_first",
        "_merge",
        "_messages",
        "_room",
        "full",
        "name",
        "reserve",
        "size",
        "stats",
    )

    def __init__(self, name: str, size: int, full: Full, merge: Merge = never_merges) -> None:
        self.name = name
        self.size = size
        self.reserve = size
        self.full: Full = full
        self.stats = MailboxStats()
        self._merge = merge
        self._messages: deque[Any] = deque()
        self._first: deque[Any] = deque()
        self._arrived: anyio.Event | None = None
        self._room: anyio.Event | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._messages) + len(self._first)

    @property
    def closed(self) -> bool:
        """Whether the owner has ended."""
        return self._closed

    def has_room(self) -> bool:
        """Whether `tell` would take one more ordinary message as it is."""
        return len(self._messages) < self.size

    def tell(self, msg: Any) -> None:
        """Puts `msg` in; never waits. `Stop` takes the priority lane. Raises MailboxFull."""
        if type(msg) is Stop:
            self.tell_first(msg)
        else:
            self._put(msg, self.size)

    def _put(self, msg: Any, size: int) -> None:
        # Counting is left to `take`: this runs for each message, that for each wake-up.
        if len(self._messages) < size and not self._closed:
            self._messages.append(msg)
            self._wake()
        elif self._closed:
            self.stats.late += 1
        elif self.full != "merge" or not self._join(msg):
            self.stats.refused += 1
            depth = len(self._messages)
            raise MailboxFull(f"{self.name} holds {depth} of {size} messages; a {_kind(msg)} was refused")

    def _wake(self) -> None:
        if self._arrived is not None:
            self._arrived.set()
            self._arrived = None

    def tell_first(self, msg: Any) -> None:
        """Puts `msg` in the priority lane; never waits. Raises MailboxFull past the lane's slack."""
        if self._closed:
            self.stats.late += 1
            return
        if len(self._first) >= self.size + PRIORITY_SLACK:
            self.stats.refused += 1
            raise MailboxFull(f"{self.name}'s priority lane holds {len(self._first)} messages")
        self._first.append(msg)
        self._wake()

    async def offer(self, msg: Any) -> None:
        """As `tell`, but waits for room under the policy `wait`; waiters get in in no promised order."""
        if type(msg) is Stop:
            self.tell_first(msg)
            return
        if self.full == "wait":
            while len(self._messages) >= self.size and not self._closed:
                self.stats.waited += 1
                if self._room is None:
                    self._room = anyio.Event()
                await self._room.wait()
        self._put(msg, self.size + self.reserve if self.full == "reject" else self.size)

    async def take(self) -> list[Any]:
        """All messages that have arrived, at least one; the priority lane's stand first.

        Others may run before it returns, even when messages wait: an actor that feeds itself starves nobody.
        """
        if not self._messages and not self._first:
            arrived = self._arrived = anyio.Event()
            await arrived.wait()
        else:
            await anyio.lowlevel.checkpoint()
        return self._drain()

    def take_first(self) -> list[Any]:
        """What waits in the priority lane, perhaps nothing; for use between the messages of one `take`."""
        if not self._first:
            return []
        taken = list(self._first)
        self.stats.first += len(taken)
        self._first.clear()
        return taken

    def put_back(self, untouched: Iterable[Any]) -> None:
        """Returns messages of the last `take` that were not looked at, in their order, before all others."""
        returned = list(untouched)
        self.stats.taken -= len(returned)
        self._messages.extendleft(reversed(returned))

    def close(self) -> None:
        """The owner has ended: what waits is dropped, what comes counts as late, nobody is held up."""
        self._closed = True
        self.stats.late += len(self)
        self._empty()

    def _drain(self) -> list[Any]:
        stats = self.stats
        depth = len(self._messages)
        stats.taken += depth
        stats.first += len(self._first)
        stats.depth_max = max(stats.depth_max, depth)
        taken = [*self._first, *self._messages]
        self._empty()
        return taken

    def _empty(self) -> None:
        self._first.clear()
        self._messages.clear()
        if self._room is not None:
            self._room.set()
            self._room = None

    def _join(self, msg: Any) -> bool:
        messages = self._messages
        for at in range(len(messages) - 1, -1, -1):
            joined = self._merge(messages[at], msg)
            if joined is not None:
                messages[at] = joined
                self.stats.merged += 1
                return True
        return False


def _kind(msg: Any) -> str:
    return type(msg).__name__
