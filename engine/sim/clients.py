"""Clients of a run: they submit, read, dawdle or leave, and remember what they were given."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any

import anyio
import numpy as np
import orjson

from api.app import App
from api.handle import Engine
from engine.errors import EngineError
from engine.messages import GOES_ON, Entry, Sampling
from engine.sim.chain import prompt_of
from engine.sim.scenario import Client

REFUSED, SERVED, LEFT = "refused", "served", "left"


@dataclass(slots=True)
class Completion:
    """What one completion gave. finish: code or OpenAI's word; None without a terminal event."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish: int | str | None = None
    status: int = 200
    message: str = ""


@dataclass(slots=True)
class Answer:
    """What a client got. `fate`: refused, served, left; `status` and `message` of a refusal."""

    client: Client
    completions: list[Completion]
    fate: str = ""
    status: int = 0
    message: str = ""
    began_s: float = 0.0
    ended_s: float = 0.0
    ids: tuple[int, ...] = ()


def entries_of(client: Client) -> list[Entry]:
    """What the client wants, as the HTTP side would ask for it."""
    how = Sampling(client.tokens, temperature=0.0, seed=client.seed)
    prompt = np.array(prompt_of(client.seed, client.prompt), np.int32).tobytes()
    stop = (client.stop,) if client.stop else ()
    return [
        Entry(
            sink=0,
            prompt=prompt,
            sampling=how,
            rid=client.rid,
            child=child,
            stop=stop,
            priority=client.priority,
            deadline_s=client.deadline_s,
        )
        for child in range(client.n)
    ]


def fresh_answer(client: Client) -> Answer:
    """Nothing yet."""
    return Answer(client, [Completion() for _ in range(client.n)], began_s=anyio.current_time())


async def by_handle(engine: Engine, client: Client, answer: Answer) -> None:
    """A client of the engine's handle, as an HTTP handler is one."""
    try:
        group = await engine.submit(entries_of(client), client.route)
    except EngineError as error:
        answer.fate, answer.status, answer.message = REFUSED, error.http_status, repr(error)
        return
    answer.ids = tuple(group.index)
    chunks = 0
    try:
        while taken := await group.take():
            for delta in taken:
                one = answer.completions[group.index[delta.request_id]]
                one.text += delta.text
                one.tokens += delta.token_ids
                if delta.finish != GOES_ON:
                    one.finish, one.status, one.message = delta.finish, delta.status, delta.message
            chunks += len(taken)
            if client.temper == "leaves" and chunks > client.leaves_after:
                answer.fate = LEFT
                return
            if client.pause_s:
                await anyio.sleep(client.pause_s)
        answer.fate = SERVED
    except EngineError as error:
        answer.fate, answer.status, answer.message = "failed", error.http_status, repr(error)
    finally:
        engine.close(group)


class HttpClient:
    """One POST to /v1/completions over plain ASGI. It may leave after any byte of body or answer."""

    def __init__(self, client: Client, answer: Answer) -> None:
        self._client = client
        self._answer = answer
        self._body = orjson.dumps(self._request())
        self._budget = client.leaves_after if client.temper == "leaves" else None
        self._left = anyio.Event()
        self._data = bytearray()
        self._sent = False

    def _request(self) -> dict[str, Any]:
        client = self._client
        body: dict[str, Any] = {
            "prompt": prompt_of(client.seed, client.prompt),
            "max_tokens": client.tokens,
            "seed": client.seed,
            "temperature": 0,
            "n": client.n,
            "stream": client.kind == "stream",
            "priority": client.priority,
        }
        if client.stop:
            body["stop"] = client.stop
        if client.rid:
            body["rid"] = client.rid
        if client.route >= 0:
            body["routed_dp_rank"] = client.route
        return body

    async def run(self, app: App) -> None:
        """Until the handler returns."""
        headers = [(b"content-length", str(len(self._body)).encode())]
        path = "/v1/completions"
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}
        await app(scope, self._receive, self._send)
        self._read()

    async def _receive(self) -> MutableMapping[str, Any]:
        await anyio.lowlevel.checkpoint()
        if not self._sent:
            self._sent = True
            if not self._spend(len(self._body)):
                return {"type": "http.disconnect"}
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    def _spend(self, size: int) -> bool:
        """Whether the client is still there after so many bytes more."""
        if self._budget is not None:
            self._budget -= size
            if self._budget < 0:
                self._left.set()
        return not self._left.is_set()

    async def _send(self, event: MutableMapping[str, Any]) -> None:
        if self._client.pause_s:
            await anyio.sleep(self._client.pause_s)
        if event["type"] == "http.response.start":
            self._answer.status = event["status"]
        elif self._spend(len(event.get("body", b""))):
            self._data += event.get("body", b"")

    def _read(self) -> None:
        """The answer's bytes as completions."""
        answer = self._answer
        answer.fate = LEFT if self._left.is_set() else SERVED if answer.status == 200 else REFUSED
        data = bytes(self._data)
        if answer.status != 200:
            answer.message = data.decode(errors="replace")
            return
        if self._client.kind == "whole":
            bodies = [orjson.loads(data)] if answer.fate == SERVED else []
        else:
            events = [event.removeprefix(b"data: ") for event in data.split(b"\n\n")[:-1]]
            if answer.fate == SERVED and (not events or events[-1] != b"[DONE]"):
                answer.fate, answer.message = "broken", "the stream ends without [DONE]"
            bodies = [orjson.loads(event) for event in events if event != b"[DONE]"]
        for body in bodies:
            self._take(body)

    def _take(self, body: dict[str, Any]) -> None:
        if "error" in body:
            answer = self._answer
            answer.fate, answer.message = "failed", body["error"]["message"]
            for one in answer.completions:
                if one.finish is None:
                    one.finish, one.status, one.message = "error", 0, body["error"]["message"]
        for choice in body.get("choices", ()):
            one = self._answer.completions[choice["index"]]
            if one.finish is not None:
                one.message = "text after the finish reason"
            one.text += choice["text"]
            one.finish = choice["finish_reason"] or one.finish
