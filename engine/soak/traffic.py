"""Clients that follow the plan, as many at once as told, with a gate that closes for rests."""

from __future__ import annotations

from dataclasses import replace

import anyio
import orjson

from engine.soak.checks import faults_of
from engine.soak.http import Answer, ask, request_bytes
from engine.soak.item import Item, Reply
from engine.soak.ledger import Ledger
from engine.soak.pace import Pace
from engine.soak.plan import Plan
from engine.soak.server import Server
from engine.soak.watch import BROKEN

ANSWER_WITHIN_S = 120.0
AFTER_NONE_S = 1.0
"""A client's pause after no answer: the server may just have ended."""

QUEUE_FULL = 429


class Traffic:
    """All requests of a soak.

    under_way  requests that have no end yet
    crowded    bursts that fill the queues now; whoever asks meanwhile may be refused, too
    """

    def __init__(self, server: Server, plan: Plan, ledger: Ledger, pace: Pace, repeatable: bool) -> None:
        self.under_way = 0
        self.crowded = 0
        self.known: dict[str, list[str]] = {}
        self._server, self._plan, self._ledger, self._pace = server, plan, ledger, pace
        self._repeatable = repeatable
        self._gate = anyio.Event()
        self._over = False

    def open(self) -> None:
        """Clients go on."""
        self._gate.set()

    def close(self) -> None:
        """Clients wait before their next request."""
        self._gate = anyio.Event()

    def end(self) -> None:
        """Clients end after their request."""
        self._over = True
        self._gate.set()

    async def client(self) -> None:
        """One client, until `end`."""
        while not self._over:
            await self._gate.wait()
            if not self._over:
                answer, _ = await self.send(self._plan.next())
                broken = not answer.complete and not answer.left
                await anyio.sleep(AFTER_NONE_S if broken else self._pace.pause_s)

    async def send(self, item: Item) -> tuple[Answer, Reply | None]:
        """One request; what is wrong with its answer goes to the ledger."""
        body = item.body if isinstance(item.body, bytes) else orjson.dumps(item.body)
        if self.crowded and 200 in item.statuses:
            item = replace(item, statuses=item.statuses | {QUEUE_FULL})
        raw = request_bytes(item.method, item.path, self._server.host, body, item.headers)
        self.under_way += 1
        try:
            answer = await ask(self._server.host, self._server.port, raw, ANSWER_WITHIN_S, item.leave_s)
        except BROKEN as error:
            self._ledger.kinds[item.kind] += 1
            self._ledger.violate(f"{item.kind}: no answer", f"{error!r} for {described(item)}")
            return Answer(), None
        finally:
            self.under_way -= 1
        reply, faults = (None, []) if answer.left else faults_of(item, answer)
        self._ledger.note(item, answer, reply)
        if reply is not None and item.same and (self._repeatable or item.kind == "canary"):
            texts = [one.text for one in reply.choices]
            known = self.known.setdefault(item.same, texts)
            if texts != known:
                faults = [*faults, f"the text is {texts!r}, it was {known!r}"]
        for fault in faults:
            self._ledger.violate(item.kind, f"{fault}; {described(item)}")
        return answer, reply


def described(item: Item) -> str:
    """A request in one line."""
    body = item.body if isinstance(item.body, bytes) else orjson.dumps(item.body)
    headers = ", ".join(f"{name}: {value}" for name, value in item.headers)
    return f"{item.method} {item.path} [{headers}] {body[:600].decode(errors='replace')}"
