"""The loads of all ranks in shared memory (see shared_lines.py): tokens, and prompt tokens received.

Readers that find no whole copy of a line keep what they had.
"""

from __future__ import annotations

from engine.errors import Unexpected
from engine.messages import Message, RankLoad
from engine.shared_lines import SharedLines


class LoadBoard(SharedLines):
    """The file in this process's memory. raises ConfigError"""

    NAME, MAGIC, FIELDS, TRIES = "loads", 0x64616F6C6B6E6172, 2, 3

    def write(self, rank: int, tokens: int, received: int) -> None:
        """Publishes a rank's load; called by that rank's process alone."""
        self.put(rank, tokens, received)

    def read(self, rank: int) -> RankLoad | None:
        """What the rank published last; None where it hasn't, or is just about it."""
        number, values = self.get(rank) or (0, ())
        return RankLoad(rank, number, *values) if number else None

    def read_all(self) -> tuple[RankLoad, ...]:
        """What each rank published last, as far as it can be read now."""
        loads = (self.read(rank) for rank in range(self.ranks))
        return tuple(load for load in loads if load is not None)


def board_of(descriptor: int, ranks: int) -> BoardRef:
    """The actor `board` of a rank's process; descriptor -1: nobody reads. raises ConfigError"""
    return BoardRef(None if descriptor < 0 else LoadBoard(descriptor, ranks))


class BoardRef:
    """The actor `board`: what the rank tells it is published at once."""

    def __init__(self, board: LoadBoard | None) -> None:
        self._board = board

    def tell(self, msg: Message) -> None:
        """Takes RankLoad; never waits."""
        if not isinstance(msg, RankLoad):
            raise Unexpected(f"board: {type(msg).__name__} isn't among its messages")
        if self._board is not None:
            self._board.write(msg.rank, msg.tokens, msg.received)

    async def offer(self, msg: Message) -> None:
        """As `tell`."""
        self.tell(msg)
