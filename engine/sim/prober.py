"""Whoever asks the health routes: a load balancer, a person."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import anyio

from api.app import App

ROUTES = ("/ready", "/health_scheduler")


@dataclass(frozen=True, slots=True)
class Probed:
    """One answer: route, status, virtual seconds of the question, and how long it took."""

    route: str
    status: int
    at_s: float
    took_s: float


async def probe_often(app: App, every_s: float, found: list[Probed]) -> None:
    """Asks each route again and again, for ever."""
    while True:
        await anyio.sleep(every_s)
        for route in ROUTES:
            began_s = anyio.current_time()
            status = await _get(app, route)
            found.append(Probed(route, status, began_s, anyio.current_time() - began_s))


async def _get(app: App, route: str) -> int:
    status = 0

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(event: MutableMapping[str, Any]) -> None:
        nonlocal status
        status = event.get("status", status)

    scope = {"type": "http", "method": "GET", "path": route, "headers": [], "query_string": b""}
    await app(scope, receive, send)
    return status
