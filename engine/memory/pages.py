"""Page accounting (I10): who owns each page of a pool, without a tensor in sight.

A pool counts pages of one sort: full pages live as long as their request, window pages until they are out of
reach. Page 0 is the sink of padding rows, and the last pages may be set aside: both are reserved. Free + held
+ cached + in transfer + reserved = total, always.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

from engine.config import PAGE_TOKENS
from engine.errors import PageAccounting, PagesExhausted

FREE, HELD, CACHED, IN_TRANSFER, RESERVED = range(5)
"""What a page is; the index into `PagePool.counts`."""

KINDS = ("free", "held", "cached", "in transfer", "reserved")

ASIDE = 1
"""What is set aside for the server's own probe: a slot and a page of each pool, beside those of clients."""

NOBODY = -1
"""Owner of free and reserved pages."""


def pages_for(tokens: int) -> int:
    """Logical pages that hold positions 0..tokens-1."""
    return -(-tokens // PAGE_TOKENS)


def first_page_in_reach(position: int, window: int) -> int:
    """First logical page that a row at `position` or later can read through a window of `window` tokens.

    A row sees itself and the window - 1 tokens before it, so every page below the answer may be freed.
    """
    return max(0, position - window + 1) // PAGE_TOKENS


class PagePool:
    """The accounts of one pool: kind, owner and reference count of each page.

    name    for messages: "full" or "window"
    aside   how many pages, the last ones, only `take_aside` gives; they are reserved while nobody has them
    counts  pages of each kind, indexed by FREE..RESERVED
    usable  pages that a request could hold if it were alone
    """

    def __init__(self, name: str, total: int, aside: int = 0) -> None:
        self.usable = total - 1 - aside
        if self.usable < 1:
            raise PageAccounting(
                f"pool {name} has {total} pages, but needs page 0, {aside} that are set aside, and one more"
            )
        self.name = name
        self.total = total
        self.counts = [self.usable, 0, 0, 0, 1 + aside]
        self._kinds = bytearray([RESERVED]) + bytearray(self.usable) + bytearray([RESERVED]) * aside
        self._owners = array("q", [NOBODY]) * total
        self._references = array("i", [0]) * total
        # A stack, lowest page on top: a page is reused while its rows are still in the processor's cache.
        self._free = list(range(self.usable, 0, -1))

    @property
    def free(self) -> int:
        """Pages that `take` can give now."""
        return self.counts[FREE]

    def can_take(self, pages: int) -> bool:
        """Whether `take` of so many pages succeeds now."""
        return pages <= self.counts[FREE]

    def take(self, owner: int, pages: int) -> list[int]:
        """So many free pages, held by `owner` with one reference each.

        raises  PagesExhausted where fewer are free; nothing is taken then
        """
        if pages > self.counts[FREE]:
            raise PagesExhausted(
                f"owner {owner} needs {pages} {self.name} pages, {self.counts[FREE]} of {self.total} are free"
            )
        taken = [self._free.pop() for _ in range(pages)]
        self._hold(owner, taken, FREE)
        return taken

    def take_aside(self, owner: int, pages: int) -> list[int]:
        """As `take`, of the pages that are set aside; released, they are so again."""
        kept = [page for page in range(self.usable + 1, self.total) if self._kinds[page] == RESERVED]
        if pages > len(kept):
            raise PagesExhausted(f"owner {owner} needs {pages} of {len(kept)} {self.name} pages set aside")
        self._hold(owner, kept[:pages], RESERVED)
        return kept[:pages]

    def _hold(self, owner: int, pages: list[int], source: int) -> None:
        for page in pages:
            self._kinds[page] = HELD
            self._owners[page] = owner
            self._references[page] = 1
        self._moved(source, HELD, len(pages))

    def share(self, pages: Iterable[int]) -> None:
        """One more reference to each of these occupied pages; whoever asked releases it again."""
        for page in pages:
            self._occupied(page)
            self._references[page] += 1

    def give(self, owner: int, pages: Iterable[int], kind: int, to: int) -> None:
        """Pages of `owner` become the occupied `kind` (HELD, CACHED, IN_TRANSFER) under the owner `to`.

        References stay: a transfer that was acknowledged gives the pages back or releases them.
        raises  PageAccounting where a page isn't `owner`'s or `kind` isn't an occupied one
        """
        if kind not in (HELD, CACHED, IN_TRANSFER):
            raise PageAccounting(f"{self.name} pages can't be given as {KINDS[kind]}")
        for page in pages:
            self._belongs(page, owner)
            self._moved(self._kinds[page], kind, 1)
            self._kinds[page] = kind
            self._owners[page] = to

    def release(self, owner: int, pages: Iterable[int]) -> None:
        """Drops one reference to each page of `owner`; a page without references is free, or set aside again.

        raises  PageAccounting where a page is free, reserved or another owner's
        """
        for page in pages:
            self._belongs(page, owner)
            self._references[page] -= 1
            if self._references[page]:
                continue
            kind = FREE if page <= self.usable else RESERVED
            self._moved(self._kinds[page], kind, 1)
            self._kinds[page] = kind
            self._owners[page] = NOBODY
            if kind == FREE:
                self._free.append(page)

    def owner(self, page: int) -> int:
        """The one owner of this page, NOBODY where it is free or reserved."""
        return self._owners[page]

    def owned_by(self, owner: int) -> list[int]:
        """Every page of this owner, by a walk over the pool: for audits."""
        return [page for page in range(self.total) if self._owners[page] == owner]

    def audit(self) -> None:
        """Walks every page and compares the accounts.

        raises  PageAccounting with the first page or sum that doesn't agree
        """
        counted = [self._kinds.count(kind) for kind in range(len(KINDS))]
        if counted != self.counts or sum(counted) != self.total:
            raise PageAccounting(
                f"pool {self.name} of {self.total} pages: counts {self.counts}, walk {counted}"
            )
        if len(set(self._free)) != len(self._free) or len(self._free) != counted[FREE]:
            raise PageAccounting(
                f"pool {self.name}: {len(self._free)} entries for {counted[FREE]} free pages"
            )
        for page in range(self.total):
            kind, owner, references = self._kinds[page], self._owners[page], self._references[page]
            occupied = kind in (HELD, CACHED, IN_TRANSFER)
            if kind == RESERVED and 0 < page <= self.usable:
                raise PageAccounting(f"{self.name} page {page} is reserved, but isn't set aside")
            if occupied != (owner != NOBODY) or occupied != (references > 0):
                raise PageAccounting(
                    f"{self.name} page {page} is {KINDS[kind]} with owner {owner} and {references} references"
                )
        if any(self._kinds[page] != FREE for page in self._free):
            raise PageAccounting(f"pool {self.name}: a page on the free stack isn't free")

    def snapshot(self) -> tuple[Any, ...]:
        """All accounts as a hashable, for the search."""
        return (
            tuple(self.counts),
            bytes(self._kinds),
            self._owners.tobytes(),
            self._references.tobytes(),
            tuple(self._free),
        )

    def restore(self, taken: tuple[Any, ...]) -> None:
        """Back to a snapshot."""
        counts, kinds, owners, references, free = taken
        self.counts = list(counts)
        self._kinds = bytearray(kinds)
        self._owners = array("q", owners)
        self._references = array("i", references)
        self._free = list(free)

    def _moved(self, source: int, target: int, pages: int) -> None:
        self.counts[source] -= pages
        self.counts[target] += pages

    def _occupied(self, page: int) -> None:
        if not 0 <= page < self.total or self._kinds[page] in (FREE, RESERVED):
            raise PageAccounting(f"{self.name} page {page} isn't occupied")

    def _belongs(self, page: int, owner: int) -> None:
        self._occupied(page)
        if self._owners[page] != owner:
            raise PageAccounting(f"{self.name} page {page} belongs to {self._owners[page]}, not to {owner}")
