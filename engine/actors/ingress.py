"""Ingress: ids, routes and limits. A group of requests goes to one live rank whole, or nowhere.

Life of a request: accepted (Watch to the detokenizer, then Submit to a rank), live, forgotten on `Ended`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from engine.actors.core import Core, Reply, Send
from engine.errors import BadRequest, EngineError, NotServing, QueueFull
from engine.messages import (
    FAILED,
    Abort,
    Accepted,
    Drain,
    Drained,
    Ended,
    Enqueue,
    Entry,
    RankDown,
    RankUp,
    RequestFailed,
    Stop,
    Submit,
    SubmitBatch,
    Watch,
)


@dataclass(frozen=True, slots=True)
class Live:
    """An accepted request that has no terminal event yet. `group` is the id of its group's first request."""

    rank: int
    rid: str
    group: int


class Ingress(Core):
    """Core of specs/ingress.toml.

    ranks  ranks that the server was started with
    limit  most requests, running and queued, that one rank may have
    """

    SPEC: ClassVar[str] = "ingress"
    DATA: ClassVar[tuple[str, ...]] = ("next_id", "up", "live", "loads")

    def __init__(self, ranks: int, limit: int) -> None:
        super().__init__()
        self.ranks = ranks
        self.limit = limit
        self.next_id = 1
        self.up: set[int] = set()
        self.live: dict[int, Live] = {}
        self.loads: dict[int, int] = dict.fromkeys(range(ranks), 0)

    # ---- guards -------------------------------------------------------------------------------

    def repeats_a_live_rid(self, msg: Enqueue) -> bool:
        """A request id that the client chose is in use."""
        wanted = {entry.rid for entry in msg.entries if entry.rid}
        return bool(wanted) and any(live.rid in wanted for live in self.live.values())

    def wants_an_unknown_rank(self, msg: Enqueue) -> bool:
        """The demanded rank isn't one of this server's."""
        return msg.route != -1 and not 0 <= msg.route < self.ranks

    def wants_a_dead_rank(self, msg: Enqueue) -> bool:
        """The demanded rank exists, but isn't live."""
        return msg.route != -1 and msg.route not in self.up

    def is_over_the_limit(self, msg: Enqueue) -> bool:
        """The rank that would get the group can't take all of it."""
        return self.loads[self.rank_for(msg)] + len(msg.entries) > self.limit

    def is_live(self, msg: Abort | Ended) -> bool:
        """The request has no terminal event yet."""
        return msg.request_id in self.live

    def is_last(self, msg: Ended) -> bool:
        """The one request that is left."""
        return len(self.live) == 1 and msg.request_id in self.live

    def is_the_last_rank(self, msg: RankDown) -> bool:
        """No other rank is live."""
        return self.up <= {msg.rank}

    def has_no_request(self, msg: Drain | Stop) -> bool:
        """Nothing is left to wait for."""
        return not self.live

    # ---- actions ------------------------------------------------------------------------------

    def accept(self, msg: Enqueue) -> None:
        """The group gets ids and goes to its rank in one message."""
        rank = self.rank_for(msg)
        first = self.next_id
        self.next_id += len(msg.entries)
        for request_id, entry in enumerate(msg.entries, first):
            self.live[request_id] = Live(rank, entry.rid, first)
            self.emit(Send("detok", watch_of(request_id, rank, entry)))
        self.loads[rank] += len(msg.entries)
        items = tuple(
            submit_of(request_id, msg.route, entry) for request_id, entry in enumerate(msg.entries, first)
        )
        self.emit(Send(rank_name(rank), SubmitBatch(items)))
        self.emit(Reply(msg.slot, Accepted(tuple(range(first, self.next_id)), rank)))

    def cancel(self, msg: Abort) -> None:
        """Rank and detokenizer drop the request; the detokenizer's answer ends its life here."""
        self.emit(Send(rank_name(self.live[msg.request_id].rank), msg))
        self.emit(Send("detok", msg))

    def forget(self, msg: Ended) -> None:
        """The request is over."""
        self.loads[self.live.pop(msg.request_id).rank] -= 1

    def add_rank(self, msg: RankUp) -> None:
        """The rank takes requests from now on."""
        self.up.add(msg.rank)

    def lose_rank(self, msg: RankDown) -> None:
        """Every request of the rank fails; the others don't notice."""
        self.up.discard(msg.rank)
        for request_id, live in self.live.items():
            if live.rank == msg.rank:
                cause = f"rank {msg.rank} has ended: {msg.reason or 'no reason given'}"
                self.emit(Send("detok", RequestFailed(request_id, FAILED, 500, cause)))

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
        text = f"routed_dp_rank: {msg.route} is not in [0, {self.ranks})"
        self._refuse(msg, BadRequest(text, param="routed_dp_rank"))

    def refuse_no_rank(self, msg: Enqueue) -> None:
        """503: nobody is there to take it."""
        text = "no rank is live" if msg.route == -1 else f"rank {msg.route} is not live"
        self._refuse(msg, NotServing(text))

    def refuse_full(self, msg: Enqueue) -> None:
        """429: later there may be room."""
        load = self.loads[self.rank_for(msg)]
        text = f"{len(msg.entries)} requests find {load} of {self.limit} places taken"
        self._refuse(msg, QueueFull(text))

    def refuse_draining(self, msg: Enqueue) -> None:
        """503: the server is going down."""
        self._refuse(msg, NotServing("the server is shutting down"))

    def _refuse(self, msg: Enqueue, error: EngineError) -> None:
        self.emit(Reply(msg.slot, error))

    # ---- questions ----------------------------------------------------------------------------

    def rank_for(self, msg: Enqueue) -> int:
        """The demanded rank, else the live one with the fewest requests."""
        if msg.route != -1:
            return msg.route
        return min(sorted(self.up), key=lambda rank: self.loads[rank])

    # ---- invariants ---------------------------------------------------------------------------

    def groups_are_whole(self) -> bool:
        """I3: the requests of one group are all on one rank."""
        ranks: dict[int, int] = {}
        return all(ranks.setdefault(live.group, live.rank) == live.rank for live in self.live.values())

    def loads_are_within_limits(self) -> bool:
        """Loads are what is live, and at most the limit."""
        counted = dict.fromkeys(range(self.ranks), 0)
        for live in self.live.values():
            counted[live.rank] += 1
        return counted == self.loads and max(self.loads.values()) <= self.limit


def rank_name(rank: int) -> str:
    """The actor's name of a rank."""
    return f"rank{rank}"


def watch_of(request_id: int, rank: int, entry: Entry) -> Watch:
    """What the detokenizer has to know of an entry."""
    return Watch(
        request_id=request_id,
        sink=entry.sink,
        rank=rank,
        stop=entry.stop,
        keep_stop=entry.keep_stop,
        skip_special_tokens=entry.skip_special_tokens,
    )


def submit_of(request_id: int, route: int, entry: Entry) -> Submit:
    """What a rank has to know of an entry."""
    return Submit(
        request_id=request_id,
        prompt=entry.prompt,
        sampling=entry.sampling,
        route=route,
        child=entry.child,
        cache_salt=entry.cache_salt,
        priority=entry.priority,
        deadline_s=entry.deadline_s,
        timing=entry.timing,
    )
