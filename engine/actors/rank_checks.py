"""Invariants of one rank, as walks over its tables: for searches and tests, too slow for every step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.actors.requests import Requests
from engine.errors import PageAccounting
from engine.memory.pages import PagePool, first_page_in_reach, pages_for
from engine.messages import RunStep


def flight_reads_only_what_is_held(requests: Requests, steps: Sequence[RunStep], window: int) -> bool:
    """I5: each row of a step in flight has its slot, under the step's generation, and its pages.

    A decode row with drafts in flight is computed somewhere between what is known of it and its most.
    window  attention window in tokens
    """
    held = requests.held
    row_of_slot = {int(slot): row for row, slot in enumerate(held.slot) if slot}
    for step in steps:
        columns = [
            np.frombuffer(column, np.int32).tolist()
            for column in (step.slots, step.generations, step.starts, step.counts)
        ]
        verify = step.verify or bytes(len(step.samples))
        for slot, generation, start, count, most in zip(*columns, verify, strict=True):
            row = row_of_slot.get(slot)
            if row is None or held.generations[slot] != generation:
                return False
            first, end = start, start + count
            if most:
                first = int(requests.known[row]) - 1
                end = min(start + most, int(requests.ends_at[row]) - 1)
            if not _reaches(requests, row, first_page_in_reach(first, window), pages_for(end)):
                return False
    return True


def _reaches(requests: Requests, row: int, first: int, stop: int) -> bool:
    """Whether the row has every full page below `stop`, and the window pages from `first` to there."""
    held = requests.held
    kept_from = int(held.window_first[row])
    kept_to = kept_from + len(held.window_pages[row])
    return len(held.full_pages[row]) >= stop and kept_from <= first and kept_to >= stop


def probe_waits(requests: Requests) -> bool:
    """Whether the server's own probe waits although its place is free."""
    return bool(requests.own("waiting").size and requests.held.free_aside)


def _of_clients(pool: PagePool, pages: dict[int, list[int]]) -> int:
    """How many of these pages aren't set aside."""
    return sum(page <= pool.usable for owned in pages.values() for page in owned)


def accounts_agree(requests: Requests) -> bool:
    """I10: the pools' accounts hold, and say of each request what its row says."""
    held = requests.held
    by_owner: tuple[dict[int, list[int]], dict[int, list[int]]] = ({}, {})
    live = set(np.concatenate([requests.rows("active"), requests.rows("ending")]).tolist())
    for row in range(len(held.full_pages)):
        holds = bool(held.full_pages[row] or held.window_pages[row] or held.slot[row])
        if holds and row not in live:
            return False
        if row in live:
            by_owner[0][int(held.owner[row])] = sorted(held.full_pages[row])
            by_owner[1][int(held.owner[row])] = sorted(held.window_pages[row])
    slots = sorted([*held.free_slots, *held.free_aside, *(int(slot) for slot in held.slot if slot)])
    if slots != list(range(1, len(held.generations))):
        return False
    for pool, pages in zip((held.full, held.window), by_owner, strict=True):
        try:
            pool.audit()
        except PageAccounting:
            return False
        owned = {owner: pool.owned_by(owner) for owner in pages}
        if owned != pages or pool.free != pool.usable - _of_clients(pool, pages):
            return False
    return True
