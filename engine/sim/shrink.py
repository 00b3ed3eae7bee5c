"""A failing plan made smaller: fewer faults and clients, plainer clients, as long as the same invariant
breaks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec

from engine.sim.run import replay
from engine.sim.scenario import Client, Scenario

WITHIN_S = 60.0


def shrink(plan: Scenario, order: int, invariant: str, within_s: float = WITHIN_S) -> Scenario:
    """The smallest plan found within the time that still breaks `invariant` under this order."""
    until_s = time.monotonic() + within_s
    smaller = True
    while smaller:
        smaller = False
        for candidate in _candidates(plan):
            if time.monotonic() > until_s:
                return plan
            violation = replay(candidate, order).violation
            if violation is not None and violation.id == invariant:
                plan, smaller = candidate, True
                break
    return plan


def _candidates(plan: Scenario) -> Iterator[Scenario]:
    """Smaller plans, the boldest first."""
    yield from (_with(plan, client=kept) for kept in _without_parts(plan.client))
    yield from (_with(plan, fault=kept) for kept in _without_parts(plan.fault))
    for at, client in enumerate(plan.client):
        for plainer in _plainer(client):
            yield _with(plan, client=(*plan.client[:at], plainer, *plan.client[at + 1 :]))


def _without_parts(items: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """Without a half, a quarter, ... a single one, each in turn."""
    size = len(items)
    while size:
        size = size // 2 if size > 1 else 0
        for start in range(0, len(items), max(size, 1)):
            if size:
                yield items[:start] + items[start + size :]


def _plainer(client: Client) -> Iterator[Client]:
    plain = Client()
    for name in ("n", "stop", "rid", "deadline_s", "priority", "route", "kind", "temper", "pause_s"):
        if getattr(client, name) != getattr(plain, name):
            yield msgspec.structs.replace(client, **{name: getattr(plain, name)})
    for name in ("prompt", "tokens", "leaves_after"):
        value = getattr(client, name)
        if value > 1:
            yield msgspec.structs.replace(client, **{name: value // 2})


def _with(plan: Scenario, **changes: Any) -> Scenario:
    return msgspec.structs.replace(plan, **changes)
