"""Ingress: ids, routes and limits. A group of requests is accepted whole or refused whole.

All ranks step together, so that requests are taken while all are live, and all fail with the first.

Life of a request: accepted (Watch to the detokenizer, then Submit to a rank), live, forgotten on `Ended`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from engine.actors.core import Core, Reply, Send
from engine.actors.routing import Router, Unit, units_of
from engine.actors.schedule import URGENT
from engine.actors.submits import submit_of, watch_of
from engine.errors import BadRequest, EngineError, NotServing, QueueFull
from engine.messages import (
    FAILED,
    Abort,
    Accepted,
    Drain,
    Drained,
    Ended,
    Enqueue,
    RankDown,
    RankUp,
    RequestFailed,
    Stop,
    Submit,
    SubmitBatch,
)


@dataclass(frozen=True, slots=True)
class Live:
    """An accepted request that has no terminal event yet.

    group   id of the first request of those that stay together
    call    id of the first request of its HTTP request
    tokens  of its prompt
    urgent  the server's own probe
    """

    rank: int
    rid: str
    group: int
    call: int = 0
    tokens: int = 0
    urgent: bool = False


class Ingress(Core):
    """Core of specs/ingress.toml.

    ranks  ranks that the server was started with
    limit  most requests, running and queued, that one rank may have
    policy how requests that demand no rank are spread
    """

    SPEC: ClassVar[str] = "ingress"
    DATA: ClassVar[tuple[str, ...]] = ("next_id", "up", "live", "loads", "router")

    def __init__(self, ranks: int, limit: int, policy: str = "total_requests") -> None:
        super().__init__()
        self.ranks = ranks
        self.limit = limit
        self.next_id = 1
        self.up: set[int] = set()
        self.live: dict[int, Live] = {}
        self.loads: dict[int, int] = dict.fromkeys(range(ranks), 0)
        self.router = Router(policy, ranks)

    # ---- guards -------------------------------------------------------------------------------

    def repeats_a_live_rid(self, msg: Enqueue) -> bool:
        """A request id that the client chose is in use."""
        wanted = {entry.rid for entry in msg.entries if entry.rid}
        return bool(wanted) and any(live.rid in wanted for live in self.live.values())

    def wants_an_unknown_rank(self, msg: Enqueue) -> bool:
        """A demanded rank isn't one of this server's."""
        return self.unknown_route(msg) != -1

    def is_over_the_limit(self, msg: Enqueue) -> bool:
        """A rank that would get a part of the group can't take all of that part."""
        return msg.entries[0].priority < URGENT and self.fullest(msg)[1] > self.limit

    def is_live(self, msg: Abort | Ended) -> bool:
        """The request has no terminal event yet."""
        return msg.request_id in self.live

    def is_last(self, msg: Ended) -> bool:
        """The one request that is left."""
        return len(self.live) == 1 and msg.request_id in self.live

    def is_the_last_to_come(self, msg: RankUp) -> bool:
        """All others are live."""
        return len(self.up | {msg.rank}) == self.ranks

    def has_no_request(self, msg: Drain | Stop) -> bool:
        """Nothing is left to wait for."""
        return not self.live

    # ---- actions ------------------------------------------------------------------------------

    def accept(self, msg: Enqueue) -> None:
        """The entries get ids; each rank gets its part of them in one message."""
        units, ranks = self.assigned(msg)
        refresh, urgent = "", msg.entries[0].priority >= URGENT
        if not urgent:
            refresh = self.router.budgets.refresh(msg.loads, msg.now_s)
            self.router.note(units, ranks)
        first = self.next_id
        self.next_id += len(msg.entries)
        batches: dict[int, list[Submit]] = {}
        of_each: list[int] = []
        for unit, rank in zip(units, ranks, strict=True):
            for place in range(unit.first, unit.first + unit.count):
                entry, request_id = msg.entries[place], first + place
                tokens = len(entry.prompt) // 4
                self.live[request_id] = Live(rank, entry.rid, first + unit.first, first, tokens, urgent)
                self.emit(Send("detok", watch_of(request_id, rank, entry)))
                batches.setdefault(rank, []).append(submit_of(request_id, unit.route, entry))
                of_each.append(rank)
            self.loads[rank] += 0 if urgent else unit.count
        for rank, items in batches.items():
            self.emit(Send(rank_name(rank), SubmitBatch(tuple(items))))
        ids = tuple(range(first, self.next_id))
        self.emit(Reply(msg.slot, Accepted(ids, tuple(of_each), refresh)))

    def cancel(self, msg: Abort) -> None:
        """Rank and detokenizer drop the request; the detokenizer's answer ends its life here."""
        self.emit(Send(rank_name(self.live[msg.request_id].rank), msg))
        self.emit(Send("detok", msg))

    def forget(self, msg: Ended) -> None:
        """The request is over."""
        live = self.live.pop(msg.request_id)
        if not live.urgent:
            self.loads[live.rank] -= 1
            self.router.budgets.remove(live.rank, live.tokens)

    def add_rank(self, msg: RankUp) -> None:
        """The rank takes requests from now on."""
        self.up.add(msg.rank)

    def lose_rank(self, msg: RankDown) -> None:
        """No step can be agreed any more: every request fails now, whichever rank has it."""
        self.up.discard(msg.rank)
        cause = f"rank {msg.rank} has ended: {msg.reason or 'no reason given'}"
        for request_id, live in self.live.items():
            if live.rank in self.up:
                self.emit(Send(rank_name(live.rank), Abort(request_id)))
            self.emit(Send("detok", RequestFailed(request_id, FAILED, 500, cause)))

    def drop_rank(self, msg: RankDown) -> None:
        """The rank ended before, or after, all were live: no request is left to fail."""
        self.up.discard(msg.rank)

    def end_all(self, msg: Stop) -> None:
        """Every request ends now, with an error."""
        for request_id, live in self.live.items():
            self.emit(Send(rank_name(live.rank), Abort(request_id)))
            self.emit(Send("detok", RequestFailed(request_id, FAILED, 503, "the server is stopping")))

    def stop_detok(self, msg: Stop | Ended) -> None:
        """Every terminal event is out: nothing is left to say to clients."""
        self.emit(Send("detok", Stop("every request has ended")))

    def say_drained(self, msg: Drain | Ended) -> None:
        """Nothing is left to wait for."""
        self.emit(Send("shutdown", Drained()))

    # ---- refusals -----------------------------------------------------------------------------

    def refuse_rid(self, msg: Enqueue) -> None:
        """400: the id is in use."""
        self._refuse(msg, BadRequest("rid: a request with this id is still running", param="rid"))

    def refuse_route(self, msg: Enqueue) -> None:
        """400: no such rank."""
        text = f"routed_dp_rank: {self.unknown_route(msg)} is not in [0, {self.ranks})"
        self._refuse(msg, BadRequest(text, param="routed_dp_rank"))

    def refuse_no_rank(self, msg: Enqueue) -> None:
        """503: a rank is missing, and without it none can take a step."""
        missing = sorted(set(range(self.ranks)) - self.up)
        self._refuse(msg, NotServing(f"rank {missing[0]} is not live"))

    def refuse_full(self, msg: Enqueue) -> None:
        """429: later there may be room."""
        rank, wanted = self.fullest(msg)
        taken = self.loads[rank]
        text = f"{wanted - taken} requests find {taken} of {self.limit} places taken"
        self._refuse(msg, QueueFull(text))

    def refuse_draining(self, msg: Enqueue) -> None:
        """503: the server is going down."""
        self._refuse(msg, NotServing("the server is shutting down"))

    def _refuse(self, msg: Enqueue, error: EngineError) -> None:
        self.emit(Reply(msg.slot, error))

    # ---- questions ----------------------------------------------------------------------------

    def unknown_route(self, msg: Enqueue) -> int:
        """The first demanded rank that isn't one of this server's; -1 where there is none."""
        routes = (msg.route, *(entry.route for entry in msg.entries))
        return next((route for route in routes if route != -1 and not 0 <= route < self.ranks), -1)

    def assigned(self, msg: Enqueue) -> tuple[list[Unit], list[int]]:
        """What stays together, and the rank of each."""
        units = units_of(msg)
        tokens = self.router.budgets.after(msg.loads, msg.now_s)
        return units, self.router.assign(units, sorted(self.up), self.loads, tokens)

    def fullest(self, msg: Enqueue) -> tuple[int, int]:
        """(rank, requests) of the rank that would have most of those that take a part of the group."""
        totals = dict(self.loads)
        units, ranks = self.assigned(msg)
        for unit, rank in zip(units, ranks, strict=True):
            totals[rank] += unit.count
        rank = max(ranks, key=lambda rank: totals[rank])
        return rank, totals[rank]

    # ---- invariants ---------------------------------------------------------------------------

    def groups_are_whole(self) -> bool:
        """I3: requests that stay together are all on one rank."""
        ranks: dict[int, int] = {}
        return all(ranks.setdefault(live.group, live.rank) == live.rank for live in self.live.values())

    def loads_are_within_limits(self) -> bool:
        """Loads are what is live of clients, and at most the limit."""
        counted = dict.fromkeys(range(self.ranks), 0)
        for live in self.live.values():
            counted[live.rank] += not live.urgent
        return counted == self.loads and max(counted.values()) <= self.limit


def rank_name(rank: int) -> str:
    """The actor's name of a rank."""
    return f"rank{rank}"
