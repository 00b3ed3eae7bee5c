"""Lines of integers in shared memory: one a rank, one writer a line, read by anybody without waiting.

The file has no name, and goes when the last process that holds it ends. Little-endian int64 words:

    header (128 bytes)   magic, version, ranks
    line (2 x 128 bytes) two copies of: sequence, the values, check

A writer makes a copy's sequence odd, writes, and makes it even. It takes the older copy, so that one is
always whole: it may be held up in the middle, by another thread or for want of a processor, for longer than
a reader can wait. Python has no memory fences, so that on processors which reorder stores a reader could
believe an even sequence too early; the check (of sequence and values together) tells.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from engine.errors import ConfigError

VERSION = 2
LINE_BYTES = 128
"""Two cache lines, which processors fetch together: no writer holds up its neighbour."""

WORDS = LINE_BYTES // 8
COPIES = 2
SEED = 0x5DEECE66D


class SharedLines:
    """The file in this process's memory.

    NAME, MAGIC  of the kind of file    FIELDS  values of a line    TRIES  of a reader
    raises       ConfigError where it isn't such a file, or one for another number of ranks
    """

    NAME: ClassVar[str]
    MAGIC: ClassVar[int]
    FIELDS: ClassVar[int]
    TRIES: ClassVar[int]

    def __init__(self, descriptor: int, ranks: int) -> None:
        size = _size(ranks)
        if os.fstat(descriptor).st_size != size:
            found = os.fstat(descriptor).st_size
            raise ConfigError(f"the file of {self.NAME} has {found} bytes, but {ranks} ranks need {size}")
        self.ranks = ranks
        self.lines = np.frombuffer(mmap.mmap(descriptor, size), "<i8").reshape(-1, WORDS)
        header, wanted = self.lines[0, :3].tolist(), [self.MAGIC, VERSION, ranks]
        if header != wanted:
            raise ConfigError(f"the file of {self.NAME} begins with {header}, not with {wanted}")

    @classmethod
    def create(cls, ranks: int) -> int:
        """The descriptor of a fresh file for so many ranks."""
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
        size = _size(ranks)
        os.ftruncate(descriptor, size)
        with mmap.mmap(descriptor, size) as memory:
            memory[:24] = np.array([cls.MAGIC, VERSION, ranks], "<i8").tobytes()
        return descriptor

    def put(self, rank: int, *values: int) -> None:
        """Publishes a rank's values; by one thread of one process alone."""
        copies = self._copies(rank)
        count = 1 + int(copies[:, 0].max()) // 2
        line, number = copies[count % COPIES], 2 * count
        line[0] = number - 1
        line[1 : 1 + self.FIELDS] = values
        line[1 + self.FIELDS] = _check(number, values)
        line[0] = number

    def get(self, rank: int) -> tuple[int, tuple[int, ...]] | None:
        """How often the rank has published, and what last; 0 before; None where no copy is whole."""
        copies = self._copies(rank)
        for _ in range(self.TRIES):
            # Who is held up between the copies finds the first as it was long ago, and the second in change.
            published = int(copies[:, 0].max()) // 2
            whole = [found for line in copies if (found := self._whole(line)) is not None]
            if whole and max(whole)[0] >= published:
                return max(whole)
        return None

    def _copies(self, rank: int) -> NDArray[np.int64]:
        return self.lines[1 + COPIES * rank :][:COPIES]

    def _whole(self, line: NDArray[np.int64]) -> tuple[int, tuple[int, ...]] | None:
        number, *found, check = line[: 2 + self.FIELDS].tolist()
        values = tuple(found)
        if number == 0:
            return 0, ()
        if number % 2 == 0 and number == line[0] and check == _check(number, values):
            return number // 2, values
        return None


def _size(ranks: int) -> int:
    return (1 + COPIES * ranks) * LINE_BYTES


def _check(number: int, values: tuple[int, ...]) -> int:
    """Tells a torn line from a whole one."""
    total = number * SEED
    for place, value in enumerate(values, 3):
        total += value * place
    return total & (1 << 62) - 1
