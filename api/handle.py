"""What HTTP handlers hold of the engine: submit a group of requests, take what they gain, give up.

Everything here runs on the api process's loop; the actors decide, this side only waits and hands over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import anyio
import msgspec

from engine.errors import EngineError, MailboxFull, Unexpected
from engine.grammar.service import GrammarService
from engine.messages import (
    GOES_ON,
    Abort,
    Accepted,
    Credit,
    Delta,
    Deltas,
    Enqueue,
    Entry,
    Message,
    RankLoad,
    Snapshot,
)

SUBMIT_WITHIN_S = 30.0
"""Ingress answers in microseconds unless its process is stuck; a stuck one is an error, not a hang."""


class Port(Protocol):
    """An actor of this process."""

    name: str

    def tell(self, msg: Message) -> None:
        """Never waits; raises MailboxFull."""

    async def offer(self, msg: Message) -> None:
        """Waits for room where the actor makes its senders wait."""


class Questions(Protocol):
    """Asks with a deadline; raises the reply where it is an exception."""

    async def ask(self, ref: Any, msg: Message, within_s: float) -> Any:
        """The actor's reply."""


class Sink:
    """Chunks that wait for one HTTP request; bounded by the detokenizer's credit."""

    __slots__ = ("arrived", "chunks", "failure", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.chunks: deque[Delta] = deque()
        self.arrived: anyio.Event | None = None
        self.failure: EngineError | None = None


class Edge:
    """The actor `api`: hands chunks to the HTTP requests that wait for them, and passes snapshots on.

    on_snapshot  called with each rank's snapshot
    orphans      chunks whose HTTP request was gone; each makes ingress cancel its request once more
    """

    name = "api"

    def __init__(self, ingress: Port, on_snapshot: Callable[[Snapshot], None]) -> None:
        self._ingress = ingress
        self._on_snapshot = on_snapshot
        self._open: dict[int, Sink] = {}
        self._last = 0
        self._failure: EngineError | None = None
        self.orphans = 0

    def fail(self, error: EngineError) -> None:
        """The actors have ended: who waits for chunks gets this error after those that have come."""
        self._failure = error
        for sink in self._open.values():
            sink.failure = error
            if sink.arrived is not None:
                sink.arrived.set()

    def open(self) -> Sink:
        """A new sink with its own number. Raises what `fail` was told."""
        if self._failure is not None:
            raise self._failure
        self._last += 1
        sink = self._open[self._last] = Sink(self._last)
        return sink

    def close(self, sink: Sink) -> None:
        """Chunks for it are orphans from now on."""
        self._open.pop(sink.number, None)

    def tell(self, msg: Message) -> None:
        """Takes `Deltas` and `Snapshot`; never waits."""
        if isinstance(msg, Deltas):
            for delta in msg.items:
                self._hand_over(delta)
        elif isinstance(msg, Snapshot):
            self._on_snapshot(msg)
        else:
            raise Unexpected(f"api: {type(msg).__name__} isn't among its messages")

    async def offer(self, msg: Message) -> None:
        """As `tell`: what waits here is bounded by the detokenizer's credit."""
        self.tell(msg)

    def _hand_over(self, delta: Delta) -> None:
        sink = self._open.get(delta.sink)
        if sink is not None:
            sink.chunks.append(delta)
            if sink.arrived is not None:
                sink.arrived.set()
        elif delta.finish == GOES_ON:
            self.orphans += 1
            cancel(self._ingress, delta.request_id)


class Group:
    """The accepted completions of one HTTP request.

    index    place of each request id in the order of the entries
    ranks    where they run, in that order
    refresh  what became of the ranks' loads (see `Accepted`)
    live     ids that have no terminal event yet
    """

    def __init__(self, accepted: Accepted, sink: Sink, detok: Port) -> None:
        self.index = {request_id: place for place, request_id in enumerate(accepted.ids)}
        self.ranks = accepted.ranks
        self.refresh = accepted.refresh
        self.live = set(accepted.ids)
        self._sink = sink
        self._detok = detok
        self._taken: dict[int, int] = {}

    async def take(self) -> list[Delta]:
        """All chunks that have arrived, at least one; empty once every completion has ended.

        The chunks of the call before count as taken by the client now, not earlier.

        raises  the error of `Engine.fail`
        """
        await self._give_credit()
        sink = self._sink
        if not self.live:
            return []
        if not sink.chunks and sink.failure is None:
            sink.arrived = anyio.Event()
            await sink.arrived.wait()
            sink.arrived = None
        if not sink.chunks and sink.failure is not None:
            raise sink.failure
        taken = list(sink.chunks)
        sink.chunks.clear()
        for delta in taken:
            if delta.finish == GOES_ON:
                self._taken[delta.request_id] = self._taken.get(delta.request_id, 0) + 1
            else:
                self.live.discard(delta.request_id)
        return taken

    async def _give_credit(self) -> None:
        """Waits where the detokenizer is busy: a crowd of others is no fault of this client."""
        taken, self._taken = self._taken, {}
        for request_id, chunks in taken.items():
            if request_id in self.live:
                await self._detok.offer(Credit(request_id, chunks))


class Engine:
    """The handle of a running engine.

    asks           questions with a deadline
    ingress, detok the actors' mailboxes
    edge           where the detokenizer's chunks arrive
    loads          what the ranks have published of themselves
    grammars       compiles what constrained requests need; None: such requests are refused
    """

    def __init__(
        self,
        asks: Questions,
        ingress: Port,
        detok: Port,
        edge: Edge,
        loads: Callable[[], tuple[RankLoad, ...]] = tuple,
        grammars: GrammarService | None = None,
    ) -> None:
        self.grammars = grammars
        self._asks = asks
        self._ingress = ingress
        self._detok = detok
        self._edge = edge
        self._loads = loads

    async def submit(self, entries: Iterable[Entry], route: int = -1) -> Group:
        """The group, accepted whole; `sink` of the entries is filled in here.

        raises  BadRequest, QueueFull, NotServing as ingress says; MailboxFull, DeadlinePassed, ActorFailed
        """
        sink = self._edge.open()
        try:
            whole = tuple(msgspec.structs.replace(entry, sink=sink.number) for entry in entries)
            wanted = Enqueue(whole, route, now_s=anyio.current_time(), loads=self._loads())
            accepted = await self._asks.ask(self._ingress, wanted, SUBMIT_WITHIN_S)
        except BaseException:
            # Accepted after all? Then its chunks are orphans, and each of them cancels the request.
            self._edge.close(sink)
            raise
        return Group(accepted, sink, self._detok)

    def fail(self, error: EngineError) -> None:
        """The actors have ended: everything accepted ends with this error, and nothing more is accepted."""
        self._edge.fail(error)

    def close(self, group: Group) -> None:
        """Nothing of the group is wanted any more; what still runs is cancelled. Never waits."""
        self._edge.close(group._sink)
        for request_id in sorted(group.live):
            cancel(self._ingress, request_id)
        group.live.clear()


def cancel(ingress: Port, request_id: int) -> None:
    """Tells ingress that the client is gone; a full mailbox hears it with the request's next chunk."""
    try:
        ingress.tell(Abort(request_id))
    except MailboxFull:
        return
