"""A load generator: streams of /v1/completions over plain sockets, with the time of every token."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import httptools
import orjson
from anyio.abc import SocketStream

ANSWER_WITHIN_S = 600.0


@dataclass(slots=True)
class Told:
    """What one request was answered. Times are of the performance counter, in seconds.

    arrivals  (time, tokens so far) of each event that brought tokens
    error     empty where the answer is whole
    """

    began_s: float = 0.0
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    error: str = ""

    @property
    def first_s(self) -> float:
        """From sending to the first token."""
        return self.arrivals[0][0] - self.began_s

    @property
    def tokens(self) -> int:
        """All that came."""
        return self.arrivals[-1][1] if self.arrivals else 0

    def gaps_s(self) -> list[float]:
        """Between tokens; tokens of one event share its gap."""
        gaps: list[float] = []
        for (before_s, had), (now_s, have) in zip(self.arrivals, self.arrivals[1:], strict=False):
            if have > had:
                gaps += [(now_s - before_s) / (have - had)] * (have - had)
        return gaps


class Reader:
    """Parses one answer as it arrives."""

    def __init__(self, told: Told, new_tokens: int) -> None:
        self._told = told
        self._new_tokens = new_tokens
        self._parser = httptools.HttpResponseParser(self)
        self._rest = b""
        self._status = 0
        self._finished = False
        self.complete = False

    def feed(self, data: bytes) -> None:
        """Bytes from the socket."""
        self._parser.feed_data(data)

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        self._status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        """Called by the parser."""
        now_s = time.perf_counter()
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                self._event(orjson.loads(line[6:]), now_s)
            elif line == b"data: [DONE]":
                self._finished = True

    def on_message_complete(self) -> None:
        """Called by the parser."""
        self.complete = True
        if self._status != 200:
            self._told.error = f"status {self._status}: {self._rest[:200].decode(errors='replace')}"
        elif not self._told.error and not self._finished:
            self._told.error = "the stream ended without [DONE]"
        elif not self._told.error and self._told.tokens != self._new_tokens:
            self._told.error = f"{self._told.tokens} tokens came, {self._new_tokens} were asked for"

    def _event(self, event: dict[str, Any], now_s: float) -> None:
        if "error" in event:
            self._told.error = event["error"]["message"]
        else:
            self._told.arrivals.append((now_s, event["usage"]["completion_tokens"]))


async def stream(host: str, port: int, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[Told]:
    """One client's requests, one after the other on one connection."""
    async with await anyio.connect_tcp(host, port) as connection:
        return [await _request(connection, host, prompt, new_tokens) for prompt in prompts]


async def _request(connection: SocketStream, host: str, prompt: Sequence[int], new_tokens: int) -> Told:
    body = orjson.dumps(
        {
            "prompt": list(prompt),
            "max_tokens": new_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"continuous_usage_stats": True},
        }
    )
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    told = Told(began_s=time.perf_counter())
    reader = Reader(told, new_tokens)
    with anyio.fail_after(ANSWER_WITHIN_S):
        await connection.send(head.encode() + body)
        while not reader.complete:
            reader.feed(await connection.receive())
    return told
