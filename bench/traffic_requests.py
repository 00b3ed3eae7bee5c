"""Requests of `bench traffic`: bodies of /generate, and each request on a connection of its own."""

from __future__ import annotations

from typing import Any

import anyio
import httptools
import orjson

from bench.serve import HOST


def sampling(new_tokens: int, count: int = 1) -> dict[str, Any]:
    """Greedy, of a given length."""
    return {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True, "n": count}


def body_of(cases: list[tuple[list[int], int]], single: bool = True) -> list[dict[str, Any]]:
    """Bodies of /generate: one a case, or one with them all."""
    if single:
        return [{"input_ids": prompt, "sampling_params": sampling(new)} for prompt, new in cases]
    prompts, params = [prompt for prompt, _ in cases], [sampling(new) for _, new in cases]
    return [{"input_ids": prompts, "sampling_params": params}]


class Answer:
    """One HTTP answer."""

    def __init__(self) -> None:
        self.body, self.complete = b"", False
        self.parser = httptools.HttpResponseParser(self)

    def on_body(self, data: bytes) -> None:
        """Called by the parser."""
        self.body += data

    def on_message_complete(self) -> None:
        """Called by the parser."""
        self.complete = True


def request_of(body: dict[str, Any], headers: dict[str, str]) -> bytes:
    """The bytes of a request."""
    raw = orjson.dumps(body)
    lines = [f"{name}: {value}" for name, value in headers.items()]
    head = [
        "POST /generate HTTP/1.1", f"host: {HOST}", "content-type: application/json",
        f"content-length: {len(raw)}", *lines,
    ]  # fmt: skip
    return "\r\n".join(head).encode() + b"\r\n\r\n" + raw


async def post(port: int, body: dict[str, Any], headers: dict[str, str]) -> tuple[int, Any]:
    """(status, body) of a request on a connection of its own."""
    answer = Answer()
    async with await anyio.connect_tcp(HOST, port) as connection:
        await connection.send(request_of(body, headers))
        while not answer.complete:
            answer.parser.feed_data(await connection.receive())
    return answer.parser.get_status_code(), orjson.loads(answer.body)


async def give_up(port: int, body: dict[str, Any]) -> None:
    """Streams, and leaves at the first event."""
    async with await anyio.connect_tcp(HOST, port) as connection:
        await connection.send(request_of({**body, "stream": True}, {}))
        received = b""
        while b"data: " not in received:
            received += await connection.receive()
