"""What requests hold: a slot with its generation, full pages and window pages, by row of the table.

The last slot and the last page of each pool are set aside: the place of the server's own probe.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.actors.schedule import Column, Rows
from engine.memory.pages import ASIDE, PagePool


class Holdings:
    """Slots and pages of all rows. Columns are int64[capacity]:

    free_slots, free_aside  slots that clients' requests can have, and the one set aside

    slot          0: none
    mapped        logical pages that the row has
    window_first  first logical page whose window page it still holds
    owner         request id under which its pages are accounted
    """

    def __init__(self, capacity: int, slots: int, full: PagePool, window: PagePool) -> None:
        self.full, self.window = full, window
        self.full_pages: list[list[int]] = [[] for _ in range(capacity)]
        self.window_pages: list[list[int]] = [[] for _ in range(capacity)]
        self.aside = slots + ASIDE
        self.free_slots = list(range(slots, 0, -1))
        self.free_aside = [self.aside]
        self.generations = np.zeros(self.aside + 1, np.int64)
        self._numbers = np.zeros((4, capacity), np.int64)
        self.slot: Column = self._numbers[0]
        self.mapped: Column = self._numbers[1]
        self.window_first: Column = self._numbers[2]
        self.owner: Column = self._numbers[3]

    def free_pages(self) -> int:
        """Logical pages that clients' requests can have now: each takes one page of both pools."""
        return min(self.full.free, self.window.free)

    def take_slot(self, row: int, owner: int, aside: bool) -> None:
        """A slot under a new generation for a row that has nothing; the caller has asked for a free one.

        aside  the one set aside
        """
        slot = (self.free_aside if aside else self.free_slots).pop()
        self.generations[slot] += 1
        self.slot[row] = slot
        self.owner[row] = owner
        self.mapped[row] = self.window_first[row] = 0

    def take_pages(self, row: int, pages: int) -> list[tuple[int, int, int, int]]:
        """The row's next logical pages, as (slot, logical page, full page, window page).

        raises  PagesExhausted where `free_pages` is less
        """
        owner, first, slot = int(self.owner[row]), int(self.mapped[row]), int(self.slot[row])
        if slot == self.aside:
            full, window = self.full.take_aside(owner, pages), self.window.take_aside(owner, pages)
        else:
            full, window = self.full.take(owner, pages), self.window.take(owner, pages)
        self.full_pages[row] += full
        self.window_pages[row] += window
        self.mapped[row] += pages
        return [(slot, first + i, full[i], window[i]) for i in range(pages)]

    def leave_behind(self, row: int, first: int) -> None:
        """Gives back the window pages before logical page `first`: no later step reads them."""
        count = first - int(self.window_first[row])
        self.window.release(int(self.owner[row]), self.window_pages[row][:count])
        del self.window_pages[row][:count]
        self.window_first[row] = first

    def release(self, rows: Rows) -> None:
        """Everything that these rows hold goes back (I10)."""
        for row in rows.tolist():
            owner = int(self.owner[row])
            self.full.release(owner, self.full_pages[row])
            self.window.release(owner, self.window_pages[row])
            self.full_pages[row], self.window_pages[row] = [], []
            slot = int(self.slot[row])
            (self.free_aside if slot == self.aside else self.free_slots).append(slot)
        self._numbers[:, rows] = 0

    def snapshot(self) -> tuple[Any, ...]:
        """All of it as a hashable."""
        return (
            tuple(map(tuple, self.full_pages)),
            tuple(map(tuple, self.window_pages)),
            tuple(self.free_slots),
            tuple(self.free_aside),
            self.generations.tobytes(),
            self._numbers.tobytes(),
            self.full.snapshot(),
            self.window.snapshot(),
        )

    def restore(self, taken: tuple[Any, ...]) -> None:
        """Back to a snapshot."""
        full_pages, window_pages, free_slots, free_aside, generations, numbers, full, window = taken
        self.full_pages = [list(pages) for pages in full_pages]
        self.window_pages = [list(pages) for pages in window_pages]
        self.free_slots, self.free_aside = list(free_slots), list(free_aside)
        self.generations[:] = np.frombuffer(generations, np.int64)
        self._numbers[:] = np.frombuffer(numbers, np.int64).reshape(self._numbers.shape)
        self.full.restore(full)
        self.window.restore(window)
