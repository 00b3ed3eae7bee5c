"""The event-stream writer: one `data:` line an event, `[DONE]` last, an error never in silence."""

from __future__ import annotations

from typing import Any

import orjson

from api.errors import error_object
from api.exchange import EVENTS, Exchange

DONE = b"data: [DONE]\n\n"


class EventStream:
    """Writes events to one client. Events of one `flush` travel in one write."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._events: list[bytes] = []

    async def open(self) -> None:
        """Status 200 and headers; nothing that is a client's fault may be found after this."""
        await self._exchange.start(
            200, EVENTS, [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        )

    def put(self, data: bytes) -> None:
        """An event, written by the next `flush`. `data` is one line of JSON."""
        self._events.append(b"data: %b\n\n" % data)

    def put_json(self, value: Any) -> None:
        """An event from a value."""
        self.put(orjson.dumps(value))

    async def flush(self) -> None:
        """Writes the events; returns when the client's connection has room for more."""
        if self._events:
            data = b"".join(self._events)
            self._events.clear()
            await self._exchange.write(data)

    async def close(self, error: Exception | None = None) -> None:
        """The end: an error event where there is one, then `[DONE]`."""
        if error is not None:
            self.put_json({"error": error_object(error)})
        self._events.append(DONE)
        data = b"".join(self._events)
        self._events.clear()
        await self._exchange.write(data, more=False)
