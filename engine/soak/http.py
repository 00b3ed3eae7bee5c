"""One HTTP request on a connection of its own: read to its end, or left at a chosen moment."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import anyio
import httptools
import orjson


@dataclass(slots=True)
class Answer:
    """What came back. Times are seconds from the first byte sent.

    left      the client closed before the end, as it meant to
    complete  the whole message came
    """

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    complete: bool = False
    left: bool = False
    first_s: float = 0.0
    whole_s: float = 0.0

    def json(self) -> Any:
        """The body. raises orjson.JSONDecodeError"""
        return orjson.loads(bytes(self.body))


class Reader:
    """Callbacks of the parser; fills one answer."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._began_s = time.perf_counter()
        self.parser = httptools.HttpResponseParser(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser."""
        self._answer.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        self._answer.status = self.parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        """Called by the parser."""
        if not self._answer.body:
            self._answer.first_s = time.perf_counter() - self._began_s
        self._answer.body += data

    def on_message_complete(self) -> None:
        """Called by the parser."""
        self._answer.complete = True
        self._answer.whole_s = time.perf_counter() - self._began_s


def request_bytes(
    method: str, path: str, host: str, body: bytes = b"", headers: tuple[tuple[str, str], ...] = ()
) -> bytes:
    """The bytes of a request; a content-length among the headers wins over the body's own."""
    given = {name.lower(): value for name, value in headers}
    lines = {"host": host, "connection": "close", **given}
    if body or method == "POST":
        lines = {"content-type": "application/json", "content-length": str(len(body)), **lines}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + body


async def ask(host: str, port: int, raw: bytes, within_s: float, leave_s: float | None = None) -> Answer:
    """Sends and reads.

    leave_s  close after so many seconds if the answer isn't whole by then
    raises   TimeoutError, OSError, anyio.EndOfStream or anyio.BrokenResourceError, httptools.HttpParserError
    """
    answer = Answer()
    with anyio.fail_after(within_s):
        async with await anyio.connect_tcp(host, port) as connection:
            reader = Reader(answer)
            await connection.send(raw)
            with anyio.move_on_after(leave_s):
                while not answer.complete:
                    reader.parser.feed_data(await connection.receive())
    answer.left = not answer.complete
    return answer
