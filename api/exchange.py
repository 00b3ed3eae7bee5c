"""One HTTP request and its answer, over plain ASGI."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import anyio
import orjson

from api.errors import error_body, headers_of, status_of
from engine.errors import BodyTooLarge
from engine.fine_clock import fine_s

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

JSON = b"application/json"
EVENTS = b"text/event-stream; charset=utf-8"


class ClientGone(Exception):
    """The client closed the connection before its answer was complete."""


class Exchange:
    """One request on its way through a handler.

    rid      of the answer's x-request-id header
    status   0 until the answer's first byte
    began_s  the loop's clock at receipt
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, max_body_bytes: int) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.rid = ""
        self.status = 0
        self.began_s = fine_s()
        self._headers = {name.lower(): value for name, value in scope["headers"]}
        self._receive = receive
        self._send = send
        self._max_body_bytes = max_body_bytes
        self._complete = False

    def header(self, name: str) -> str | None:
        """A header's value; None where it is absent."""
        value = self._headers.get(name.encode())
        return None if value is None else value.decode("latin-1")

    async def body(self) -> bytes:
        """The whole body. Raises BodyTooLarge, before reading where the client says the length."""
        length = self.header("content-length")
        if length is not None and length.isdigit():
            self._check_length(int(length))
        parts: list[bytes] = []
        size = 0
        while True:
            event = await self._receive()
            if event["type"] == "http.disconnect":
                raise ClientGone
            parts.append(event.get("body", b""))
            size += len(parts[-1])
            self._check_length(size)
            if not event.get("more_body", False):
                return b"".join(parts)

    def _check_length(self, size: int) -> None:
        if size > self._max_body_bytes:
            raise BodyTooLarge(f"the body has {size} bytes or more, {self._max_body_bytes} are allowed")

    async def while_connected(self, work: Callable[[], Awaitable[None]]) -> None:
        """Runs `work`; cancels it and raises ClientGone when the client closes the connection.

        Call it after the body was read: until then nobody may wait for the client's next event.
        """
        failed: Exception | None = None
        gone = False

        async def watch() -> None:
            nonlocal gone
            while (await self._receive())["type"] != "http.disconnect":
                pass
            # A server says the same after a complete answer.
            if not self._complete:
                gone = True
                tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            try:
                await work()
            except Exception as error:  # kept whole: a task group would wrap it
                failed = error
            tasks.cancel_scope.cancel()
        if failed is not None:
            raise failed
        if gone:
            raise ClientGone

    async def answer(
        self,
        status: int,
        body: bytes,
        kind: bytes = JSON,
        headers: list[tuple[bytes, bytes]] | None = None,
    ) -> None:
        """The whole answer."""
        more = [(b"content-length", str(len(body)).encode()), *(headers or [])]
        await self.start(status, kind, more)
        await self.write(body, more=False)

    async def answer_json(self, value: Any, status: int = 200) -> None:
        """The whole answer as JSON."""
        await self.answer(status, orjson.dumps(value))

    async def fail(self, error: Exception) -> None:
        """The whole answer as an error."""
        await self.answer(status_of(error), error_body(error), headers=headers_of(error))

    async def start(self, status: int, kind: bytes, headers: list[tuple[bytes, bytes]] | None = None) -> None:
        """Status and headers."""
        self.status = status
        all_headers = [(b"content-type", kind), *(headers or [])]
        if self.rid:
            all_headers.append((b"x-request-id", self.rid.encode("latin-1")))
        await self._send({"type": "http.response.start", "status": status, "headers": all_headers})

    async def write(self, data: bytes, more: bool = True) -> None:
        """A part of a body whose status was sent by `start`."""
        self._complete = not more
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
