"""The loads of all ranks in one piece of shared memory: a slot a rank, one writer a slot, no waiting.

Its file has no name, and goes when the last process that holds it ends. Little-endian int64 words:

    header (128 bytes)   magic, version, ranks
    slot (128 bytes)     sequence, tokens, received, check

A writer makes the sequence odd, writes, and makes it even. Python has no memory fences, so that on processors
which reorder stores a reader could believe an even sequence too early; the check (of sequence and values
together) tells. Readers that find a slot in change keep what they had.
"""

from __future__ import annotations

import mmap
import os
import tempfile

import numpy as np

from engine.errors import ConfigError, Unexpected
from engine.messages import Message, RankLoad

MAGIC = 0x64616F6C6B6E6172
VERSION = 1
LINE_BYTES = 128
"""Two cache lines, which processors fetch together: no writer holds up its neighbour."""

WORDS = LINE_BYTES // 8
TRIES = 3
SEED = 0x5DEECE66D


def create(ranks: int) -> int:
    """The descriptor of a fresh file for so many ranks."""
    with tempfile.TemporaryFile() as file:
        descriptor = os.dup(file.fileno())
    size = (ranks + 1) * LINE_BYTES
    os.ftruncate(descriptor, size)
    with mmap.mmap(descriptor, size) as memory:
        memory[:24] = np.array([MAGIC, VERSION, ranks], "<i8").tobytes()
    return descriptor


class LoadBoard:
    """The file in this process's memory.

    raises  ConfigError where it isn't such a file, or one for another number of ranks
    """

    def __init__(self, descriptor: int, ranks: int) -> None:
        size = (ranks + 1) * LINE_BYTES
        if os.fstat(descriptor).st_size != size:
            found = os.fstat(descriptor).st_size
            raise ConfigError(f"the file of loads has {found} bytes, but {ranks} ranks need {size}")
        self.ranks = ranks
        self._lines = np.frombuffer(mmap.mmap(descriptor, size), "<i8").reshape(ranks + 1, WORDS)
        header = self._lines[0, :3].tolist()
        if header != [MAGIC, VERSION, ranks]:
            raise ConfigError(f"the file of loads begins with {header}, not with {[MAGIC, VERSION, ranks]}")

    def write(self, rank: int, tokens: int, received: int) -> None:
        """Publishes a rank's load; called by that rank's process alone."""
        slot = self._lines[rank + 1]
        number = int(slot[0]) + 2
        slot[0] = number - 1
        slot[1:4] = tokens, received, _check(number, tokens, received)
        slot[0] = number

    def read(self, rank: int) -> RankLoad | None:
        """What the rank published last; None where it hasn't, or is just about it."""
        slot = self._lines[rank + 1]
        for _ in range(TRIES):
            before, tokens, received, check = slot[:4].tolist()
            whole = before == slot[0] and check == _check(before, tokens, received)
            if before and before % 2 == 0 and whole:
                return RankLoad(rank, before // 2, tokens, received)
        return None

    def read_all(self) -> tuple[RankLoad, ...]:
        """What each rank published last, as far as it can be read now."""
        loads = (self.read(rank) for rank in range(self.ranks))
        return tuple(load for load in loads if load is not None)


def _check(number: int, tokens: int, received: int) -> int:
    return (number * SEED + tokens * 31 + received * 17) & (1 << 62) - 1


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
