"""One accepted group from submit to its last byte: streamed or whole, cancelled when the client leaves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from api.errors import RequestEnded
from api.exchange import ClientGone, Exchange
from api.gate import Gate, Wish
from api.grammars import constrained
from api.handle import Engine, Group
from api.served import Served
from api.sse import EventStream
from engine.errors import EngineError
from engine.fine_clock import fine_s
from engine.messages import ABORTED, FAILED, GOES_ON, Delta, Entry
from engine.metrics import Metrics, Timeline

LOG = logging.getLogger("api")


class Answer(Protocol):
    """How a route words what its completions gain. `place` is the completion's place among the entries."""

    def opening(self) -> Sequence[bytes]:
        """Events before any token."""

    def gain(self, place: int, delta: Delta) -> Sequence[bytes]:
        """Events of one chunk, for a stream."""

    def closing(self) -> Sequence[bytes]:
        """Events after the last chunk."""

    def note(self, place: int, delta: Delta) -> None:
        """One chunk, for an answer in one piece."""

    def whole(self) -> Any:
        """The answer in one piece."""


@dataclass(frozen=True, slots=True)
class Service:
    """What every handler works with.

    draw_seed  a fresh seed for a request that names none
    fresh_id   a fresh request id; the argument is its prefix
    wall_s     the wall clock, in seconds
    gate       reads what requests ask of their output
    """

    engine: Engine
    served: Served
    metrics: Metrics
    draw_seed: Callable[[], int]
    fresh_id: Callable[[str], str]
    wall_s: Callable[[], float]
    gate: Gate


async def run(
    service: Service,
    exchange: Exchange,
    entries: Sequence[Entry],
    route: int,
    make_answer: Callable[[Sequence[int]], Answer],
    stream: bool,
    wishes: Sequence[Wish | None] = (),
) -> None:
    """Submits the entries and answers with what they gain.

    route        the rank that all entries must go to, -1: each where its own `route` says, or anywhere
    make_answer  gets the rank of each entry
    wishes       the grammar of each entry; empty: none has one
    raises       the refusals of `constrained` and of `Engine.submit`; RequestEnded where a completion ends
                 with an error
    """
    lines = [
        Timeline(stream, len(entry.prompt) // 4 if entry.child == 0 else 0, exchange.began_s)
        for entry in entries
    ]
    async with AsyncExitStack() as compiled:
        if any(wishes):
            entries = await _compiled(service, exchange, entries, wishes, compiled)
        group = await service.engine.submit(entries, route)
    service.metrics.routed(group.ranks, [route if route != -1 else entry.route for entry in entries], route)
    service.metrics.refreshed(group.refresh)
    for request_id, rank in zip(group.index, group.ranks, strict=True):
        LOG.debug("accepted", extra={"request_id": exchange.rid, "request": request_id, "rank": rank})
    watch = Watch(service.metrics, group, lines)
    answer = make_answer(group.ranks)
    try:
        work = _streamed if stream else _whole
        await exchange.while_connected(lambda: work(exchange, watch, answer))
    finally:
        watch.close()
        service.engine.close(group)


async def _compiled(
    service: Service,
    exchange: Exchange,
    entries: Sequence[Entry],
    wishes: Sequence[Wish | None],
    stack: AsyncExitStack,
) -> Sequence[Entry]:
    """The entries with their grammars, which stay in memory until the stack closes."""
    found: Sequence[Entry] = ()

    async def wait() -> None:
        nonlocal found
        found = await stack.enter_async_context(constrained(service.engine.grammars, entries, wishes))

    began_s = fine_s()
    constrained_count = sum(wish is not None for wish in wishes)
    try:
        await exchange.while_connected(wait)
    except ClientGone:
        service.metrics.grammar_left(constrained_count)
        raise
    finally:
        service.metrics.grammar_waited(fine_s() - began_s)
    service.metrics.constrained(constrained_count)
    return found


class Watch:
    """A group whose progress is counted in the metrics."""

    def __init__(self, metrics: Metrics, group: Group, lines: list[Timeline]) -> None:
        self._metrics = metrics
        self._group = group
        self._lines = lines
        for line, rank in zip(lines, group.ranks, strict=True):
            line.rank = rank
            metrics.accepted(line)

    async def take(self) -> list[tuple[int, Delta]]:
        """(place, chunk) of all that arrived; empty at the end. Raises RequestEnded for an error's chunk."""
        taken = await self._group.take()
        now_s = fine_s()
        failed: Delta | None = None
        for delta in taken:
            line = self._lines[self._group.index[delta.request_id]]
            self._metrics.gained(line, len(delta.token_ids), now_s)
            if delta.finish != GOES_ON:
                is_error = delta.finish in (ABORTED, FAILED)
                self._metrics.ended(line, is_error, now_s, delta.finish)
                failed = delta if is_error else failed
        if failed is not None:
            raise RequestEnded(failed)
        return [(self._group.index[delta.request_id], delta) for delta in taken]

    def close(self) -> None:
        """Completions that are left now are cut off."""
        for request_id in self._group.live:
            self._metrics.ended(self._lines[self._group.index[request_id]], True, fine_s())


async def _whole(exchange: Exchange, watch: Watch, answer: Answer) -> None:
    while taken := await watch.take():
        for place, delta in taken:
            answer.note(place, delta)
    await exchange.answer_json(answer.whole())


async def _streamed(exchange: Exchange, watch: Watch, answer: Answer) -> None:
    # The status waits for the first chunk, so that a request that fails before it has its own.
    taken = await watch.take()
    events = EventStream(exchange)
    await events.open()
    for event in answer.opening():
        events.put(event)
    try:
        while taken:
            for place, delta in taken:
                for event in answer.gain(place, delta):
                    events.put(event)
            await events.flush()
            taken = await watch.take()
    except Exception as error:
        await events.close(error)
        if not isinstance(error, EngineError):
            raise
        return
    for event in answer.closing():
        events.put(event)
    await events.close()
