"""Seeded choices, and which words, templates and schemas are kept for evaluation."""

import random
import zlib
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

# In a held-out example every second choice from a pool is a held-out item, so that known and new words mix.
HELDOUT_CHOICE = 0.5


class Pool(tuple[str, ...]):
    """Strings to choose from. One in `every` is never used in training: by hash, so alike in every pool."""

    train: tuple[str, ...]
    heldout: tuple[str, ...]

    def __new__(cls, items: Sequence[str], every: int = 12) -> "Pool":
        pool = super().__new__(cls, tuple(dict.fromkeys(items)))
        ranked = sorted(pool, key=lambda item: (zlib.crc32(item.encode()) % every, zlib.crc32(item.encode())))
        hit = sum(zlib.crc32(item.encode()) % every == 0 for item in pool)
        kept = max(1, min(hit, len(ranked) // 3))
        pool.heldout, pool.train = tuple(ranked[:kept]), tuple(ranked[kept:])
        return pool


def words(text: str, every: int = 12) -> Pool:
    """A pool of the words of `text`; an underscore stands for a space."""
    return Pool([word.replace("_", " ") for word in text.split()], every)


def lines(text: str, every: int = 8) -> Pool:
    """A pool of the lines of `text`; a vertical bar stands for a line break."""
    found = [line.strip().replace("|", "\n") for line in text.strip().splitlines()]
    return Pool(found, every)


class Draw:
    """The choices of one example: everything follows from (kind, split, seed)."""

    def __init__(self, kind: str, seed: int, *, heldout: bool) -> None:
        self.random = random.Random(f"{kind}/{'heldout' if heldout else 'train'}/{seed}")
        self.heldout = heldout

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return self.random.random() < probability

    def integer(self, low: int, high: int) -> int:
        """A whole number from low to high, both included."""
        return self.random.randint(low, high)

    def pick(self, items: Sequence[T]) -> T:
        """One of the items."""
        return items[int(self.random.random() * len(items))]

    def weighted(self, choices: dict[T, float]) -> T:
        """One key, by weight."""
        return self.random.choices(list(choices), list(choices.values()))[0]

    def some(self, items: Sequence[T], count: int) -> list[T]:
        """`count` different items in random order, or all where there are fewer."""
        return self.random.sample(list(items), min(count, len(items)))

    def shuffled(self, items: Sequence[T]) -> list[T]:
        """The items in random order."""
        return self.random.sample(list(items), len(items))

    def of(self, pool: Pool) -> str:
        """One string of the part of the pool that this split may use."""
        if self.heldout and self.random.random() < HELDOUT_CHOICE:
            return self.pick(pool.heldout)
        return self.pick(pool.train)

    def several_of(self, pool: Pool, count: int) -> list[str]:
        """Different strings of the pool; at most half of its size is a safe count."""
        found: dict[str, None] = {}
        while len(found) < min(count, len(pool.train)):
            found[self.of(pool)] = None
        return list(found)

    def allows(self, key: str, one_in: int = 25) -> bool:
        """Whether something named `key` (a schema's shape, an equation) belongs to this split."""
        return (zlib.crc32(key.encode()) % one_in == 0) == self.heldout

    def log_uniform(self, low: int, high: int) -> int:
        """A whole number whose logarithm is uniform: short ones are as likely as long ones."""
        return int(low * (high / low) ** self.random.random())
