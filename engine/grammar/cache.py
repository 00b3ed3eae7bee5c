"""The grammars in memory: bounded by bytes and by entries, least recently used first; none that is read goes.

A plain structure without a clock or a lock: one thread, or one core, owns it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ENTRY_BYTES = 2048
"""What an entry costs beyond its value and its key: objects, map places, the waiters' bookkeeping."""


@dataclass(slots=True)
class Kept:
    """One grammar. `readers` matchers or requests hold it now."""

    value: Any
    size: int
    readers: int = 0


class GrammarCache:
    """Values by key, the most recently used one last.

    limit_bytes, limit_entries  hard: what would not fit beside the entries that are read is not kept
    """

    def __init__(self, limit_bytes: int, limit_entries: int) -> None:
        self.limit_bytes = limit_bytes
        self.limit_entries = limit_entries
        self._kept: dict[str, Kept] = {}
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: str) -> bool:
        return key in self._kept

    @property
    def keys(self) -> tuple[str, ...]:
        """Least recently used first."""
        return tuple(self._kept)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the entries that are read now."""
        return sum(kept.size for kept in self._kept.values() if kept.readers)

    def readers(self, key: str) -> int:
        """How many read this entry; 0 where it isn't kept."""
        kept = self._kept.get(key)
        return kept.readers if kept else 0

    def read(self, key: str) -> Any:
        """The value of an entry that is here; it becomes the most recent one and has a reader more."""
        kept = self._kept[key] = self._kept.pop(key)
        kept.readers += 1
        return kept.value

    def release(self, key: str) -> None:
        """A reader less."""
        kept = self._kept[key]
        if kept.readers <= 0:
            raise ValueError(f"{key} has no reader to release")
        kept.readers -= 1

    def put(self, key: str, value: Any, size: int, readers: int) -> tuple[bool, tuple[tuple[str, str], ...]]:
        """Keeps a value that isn't here, if it fits beside what is read.

        size     bytes of value and key
        returns  whether it is kept, and the (key, reason) of those that went: "bytes" or "entries"
        """
        size += ENTRY_BYTES
        held = [kept for kept in self._kept.values() if kept.readers]
        if size + sum(kept.size for kept in held) > self.limit_bytes or len(held) >= self.limit_entries:
            return False, ()
        gone = []
        while self.bytes + size > self.limit_bytes or len(self._kept) >= self.limit_entries:
            reason = "bytes" if self.bytes + size > self.limit_bytes else "entries"
            gone.append((self._drop_oldest(), reason))
        self._kept[key] = Kept(value, size, readers)
        self.bytes += size
        return True, tuple(gone)

    def _drop_oldest(self) -> str:
        key = next(key for key, kept in self._kept.items() if not kept.readers)
        self.bytes -= self._kept.pop(key).size
        return key

    def is_sound(self) -> bool:
        """Within both limits, and the bytes are those of the entries."""
        return (
            self.bytes == sum(kept.size for kept in self._kept.values())
            and self.bytes <= self.limit_bytes
            and len(self._kept) <= self.limit_entries
            and all(kept.readers >= 0 for kept in self._kept.values())
        )

    def snapshot(self) -> tuple[Any, ...]:
        """For the search; values must be hashable there."""
        return tuple((key, kept.value, kept.size, kept.readers) for key, kept in self._kept.items())

    def restore(self, taken: tuple[Any, ...]) -> None:
        """Back to a snapshot."""
        self._kept = {key: Kept(value, size, readers) for key, value, size, readers in taken}
        self.bytes = sum(kept.size for kept in self._kept.values())
