"""Clients of the app in process: the official one, and a raw one for what an HTTP library hides."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
import orjson
from openai import AsyncOpenAI

from api.app import App
from tests.api.stage import Stage

NOBODY = "none"
"""The server of these tests wants no key, the client demands one."""


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


@asynccontextmanager
async def openai_client(made: Stage) -> AsyncIterator[AsyncOpenAI]:
    """The official client, talking to the app in process."""
    async with made.client() as http:
        yield AsyncOpenAI(api_key=NOBODY, base_url="http://engine/v1", http_client=http, max_retries=0)


def events_of(text: str) -> list[Any]:
    """The JSON of every event; the stream must end with [DONE]."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]
