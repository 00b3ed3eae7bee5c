"""A raw ASGI client for what an HTTP library hides: single writes, leaving early, reading slowly."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import anyio
import orjson

from api.app import App


class RawClient:
    """One POST whose answer arrives in the writes that the server makes.

    reads   set by the test: the server's writes wait for it, as they do for a full connection
    writes  bodies so far; status None until the first byte
    """

    def __init__(self, app: App, path: str, body: Any) -> None:
        self._app = app
        self._body = orjson.dumps(body)
        self._path = path
        self._sent = False
        self._left = anyio.Event()
        self.reads = anyio.Event()
        self.reads.set()
        self.got = anyio.Event()
        self.status: int | None = None
        self.writes: list[bytes] = []

    async def run(self) -> None:
        """Until the server's handler returns."""
        scope = {"type": "http", "method": "POST", "path": self._path, "headers": [], "query_string": b""}
        await self._app(scope, self._receive, self._send)

    def leave(self) -> None:
        """Closes the connection."""
        self._left.set()

    async def _receive(self) -> MutableMapping[str, Any]:
        if not self._sent:
            self._sent = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, event: MutableMapping[str, Any]) -> None:
        await self.reads.wait()
        if event["type"] == "http.response.start":
            self.status = event["status"]
        elif event.get("body"):
            self.writes.append(event["body"])
            self.got.set()

    @property
    def text(self) -> str:
        """Everything that was written."""
        return b"".join(self.writes).decode()
