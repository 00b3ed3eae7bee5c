"""Page accounting (I10): sums, owners and references, against random use and planted faults."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.config import PAGE_TOKENS
from engine.errors import PageAccounting, PagesExhausted
from engine.memory.pages import (
    CACHED,
    FREE,
    HELD,
    IN_TRANSFER,
    NOBODY,
    RESERVED,
    PagePool,
    first_page_in_reach,
    pages_for,
)

TOTAL = 12
OWNERS = st.integers(0, 3)


class Accounts(RuleBasedStateMachine):
    """A plain dictionary of page -> (owner, kind, references) is the oracle of the pool."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool("full", TOTAL)
        self.expected: dict[int, tuple[int, int, int]] = {}

    @rule(owner=OWNERS, pages=st.integers(0, TOTAL))
    def take(self, owner: int, pages: int) -> None:
        if not self.pool.can_take(pages):
            with pytest.raises(PagesExhausted):
                self.pool.take(owner, pages)
            return
        taken = self.pool.take(owner, pages)
        assert 0 not in taken
        assert not set(taken) & set(self.expected)
        self.expected.update((page, (owner, HELD, 1)) for page in taken)

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.expected)))
        self.pool.share([page])
        owner, kind, references = self.expected[page]
        self.expected[page] = (owner, kind, references + 1)

    @precondition(lambda self: self.expected)
    @rule(data=st.data(), kind=st.sampled_from([HELD, CACHED, IN_TRANSFER]), to=OWNERS)
    def give(self, data: st.DataObject, kind: int, to: int) -> None:
        page = data.draw(st.sampled_from(sorted(self.expected)))
        owner, _, references = self.expected[page]
        self.pool.give(owner, [page], kind, to)
        self.expected[page] = (to, kind, references)

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.expected)))
        owner, kind, references = self.expected.pop(page)
        self.pool.release(owner, [page])
        if references > 1:
            self.expected[page] = (owner, kind, references - 1)

    @invariant()
    def the_accounts_agree(self) -> None:
        self.pool.audit()
        kinds = [kind for _, kind, _ in self.expected.values()]
        assert self.pool.counts[FREE] == TOTAL - 1 - len(kinds)
        assert self.pool.counts[RESERVED] == 1
        assert all(self.pool.counts[kind] == kinds.count(kind) for kind in (HELD, CACHED, IN_TRANSFER))
        for page in range(TOTAL):
            assert self.pool.owner(page) == self.expected.get(page, (NOBODY,))[0]


Accounts.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAccounts = Accounts.TestCase


def test_a_page_is_never_freed_twice() -> None:
    pool = PagePool("full", 4)
    pages = pool.take(7, 2)
    pool.release(7, pages)
    with pytest.raises(PageAccounting, match="isn't occupied"):
        pool.release(7, pages)


def test_a_page_is_never_freed_by_a_stranger() -> None:
    pool = PagePool("full", 4)
    pages = pool.take(7, 2)
    with pytest.raises(PageAccounting, match="belongs to 7, not to 8"):
        pool.release(8, pages)


def test_the_reserved_page_is_never_given_or_taken() -> None:
    pool = PagePool("window", 3)
    assert 0 not in pool.take(1, 2)
    with pytest.raises(PageAccounting):
        pool.release(NOBODY, [0])


def test_a_refused_take_takes_nothing() -> None:
    pool = PagePool("window", 3)
    with pytest.raises(PagesExhausted, match="needs 3 window pages, 2 of 3"):
        pool.take(1, 3)
    assert pool.free == 2
    pool.audit()


@pytest.mark.parametrize("plant", ["lost", "doubled", "stranger", "count"])
def test_the_audit_notices_every_planted_fault(plant: str) -> None:
    pool = PagePool("full", 6)
    page = pool.take(1, 2)[0]
    if plant == "lost":
        pool._free.pop()
    elif plant == "doubled":
        pool._free[0] = page
    elif plant == "stranger":
        pool._owners[page] = NOBODY
    else:
        pool.counts[HELD] += 1
    with pytest.raises(PageAccounting):
        pool.audit()


def test_a_window_page_is_in_reach_exactly_as_long_as_a_row_can_read_it() -> None:
    window = 128
    for position in range(0, 4 * PAGE_TOKENS, 7):
        readable = {token // PAGE_TOKENS for token in range(max(0, position - window + 1), position + 1)}
        assert first_page_in_reach(position, window) == min(readable)


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (256, 1), (257, 2), (1024, 4)])
def test_pages_cover_the_tokens(tokens: int, pages: int) -> None:
    assert pages_for(tokens) == pages
