"""The world of ingress and detokenizer in searches: ranks, clients, launcher and shutdown coordinator."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.actors.core import Reply
from engine.actors.detok import Detok
from engine.fsm.environment import Environment, From
from engine.messages import (
    GOES_ON,
    LENGTH,
    Abort,
    Accepted,
    Credit,
    Deltas,
    Drained,
    Ended,
    Enqueue,
    Entry,
    RankDown,
    RankUp,
    RequestFailed,
    Sampling,
    StepOut,
    Stop,
    SubmitBatch,
)


class Letters:
    """A token table: token n is the n-th letter."""

    special_ids: frozenset[int] = frozenset()

    def token_bytes(self, token_id: int) -> bytes:
        """One letter."""
        return bytes([ord("a") + token_id])


def detok(buffer: int) -> Detok:
    """A detokenizer over letters."""
    return Detok(Letters(), buffer)


def enqueue(
    slot: str,
    sinks: list[int],
    tokens: int = 1,
    route: int = -1,
    rid: str = "",
    stop: str = "",
    routes: list[int] | None = None,
) -> Enqueue:
    """An HTTP request of so many prompts with their routes. `slot` names its answer; `tokens` 0: endless."""
    stops = (stop,) if stop else ()
    entries = tuple(
        Entry(sink, b"\0\0\0\0", Sampling(tokens), route=wanted, rid=rid, stop=stops)
        for sink, wanted in zip(sinks, routes or [-1] * len(sinks), strict=True)
    )
    return Enqueue(entries, route, slot)


class Edge(Environment):
    """Ranks that answer each request with its tokens, clients that read, lag or leave, ranks that die.

    leaves, deaths  how often a client may leave and a rank may die

    inbox    messages of each rank           running  request -> (tokens wanted, tokens made) of each rank
    life     0 not yet up, 1 up, 2 dead      answers  reply slot -> class of the answer
    untaken  request -> chunks not read      left     requests whose client left
    ended    requests whose clients saw a terminal event         drained  times that ingress said so
    """

    DATA = ("inbox", "running", "life", "answers", "untaken", "ended", "left", "leaves", "deaths", "drained")

    def __init__(self, ranks: int, leaves: int = 0, deaths: int = 0) -> None:
        self.inbox: list[list[Any]] = [[] for _ in range(ranks)]
        self.running: list[dict[int, tuple[int, int]]] = [{} for _ in range(ranks)]
        self.life = [0] * ranks
        self.answers: dict[str, str] = {}
        self.untaken: dict[int, int] = {}
        self.ended: set[int] = set()
        self.left: set[int] = set()
        self.leaves = leaves
        self.deaths = deaths
        self.drained = 0

    # ---- what the cores say -------------------------------------------------------------------

    def observe(self, sender: str, effect: Any) -> list[Any]:
        if isinstance(effect, Reply):
            self._answered(effect)
        elif isinstance(effect.msg, Deltas):
            for delta in effect.msg.items:
                self._shown(delta.request_id, delta.finish != GOES_ON)
        elif isinstance(effect.msg, Drained):
            self.drained += 1
        elif self.life[int(effect.to[4:])] != 2:
            self.inbox[int(effect.to[4:])].append(effect.msg)
        return []

    def _answered(self, reply: Reply) -> None:
        assert reply.slot not in self.answers, f"{reply.slot} is answered twice"
        self.answers[reply.slot] = type(reply.value).__name__
        if isinstance(reply.value, Accepted):
            self.untaken.update(dict.fromkeys(reply.value.ids, 0))

    def _shown(self, request_id: int, last: bool) -> None:
        assert request_id not in self.ended, f"request {request_id} hears more after its terminal event"
        if last:
            self.ended.add(request_id)
            self.untaken.pop(request_id)
        else:
            self.untaken[request_id] += 1

    # ---- what may happen ----------------------------------------------------------------------

    def choices(self) -> list[Any]:
        found: list[Any] = [("up", rank) for rank, life in enumerate(self.life) if life == 0]
        for rank in range(len(self.life)):
            found += [("take", rank)] if self.inbox[rank] else []
            running = self.running[rank]
            found += [("step", rank)] if any(map(_goes_on, running.values())) else []
            # Whoever waits for a request without end leaves at last.
            found += [("leave", one) for one, done in running.items() if not done[0] and one not in self.left]
        return found + [("read", request_id) for request_id, count in self.untaken.items() if count]

    def faults(self) -> list[Any]:
        found: list[Any] = []
        if self.leaves:
            found += [("leave", one) for one in (*self.untaken, *sorted(self.ended)) if one not in self.left]
        if self.deaths:
            found += [("die", rank) for rank, life in enumerate(self.life) if life != 2]
        return found

    def choose(self, choice: Any) -> list[Any]:
        kind, which = choice
        if kind == "up":
            self.life[which] = 1
            return [From("launcher", "ingress", RankUp(which))]
        if kind == "die":
            self.deaths -= 1
            self.life[which] = 2
            self.inbox[which].clear()
            self.running[which].clear()
            return [From("launcher", "ingress", RankDown(which, "killed"))]
        if kind == "leave":
            self.leaves = max(0, self.leaves - 1)
            self.left.add(which)
            return [From("api", "ingress", Abort(which))]
        if kind == "read":
            taken, self.untaken[which] = self.untaken[which], 0
            return [From("api", "detok", Credit(which, taken))]
        return self._take(which) if kind == "take" else self._step(which)

    def _take(self, rank: int) -> list[Any]:
        msg = self.inbox[rank].pop(0)
        if isinstance(msg, SubmitBatch):
            new = {item.request_id: (item.sampling.max_new_tokens, 0) for item in msg.items}
            self.running[rank].update(new)
            return []
        if self.running[rank].pop(msg.request_id, None) is None:
            return []
        return [From(f"rank{rank}", "detok", RequestFailed(msg.request_id, msg.reason, 499, "aborted"))]

    def _step(self, rank: int) -> list[Any]:
        """One token for each request that may have one."""
        running = self.running[rank]
        rows = {one: (done[0], done[1] + 1) for one, done in running.items() if _goes_on(done)}
        finish = bytes(LENGTH if made == wanted else GOES_ON for wanted, made in rows.values())
        running.update(rows)
        for request_id, (wanted, made) in rows.items():
            if made == wanted:
                del running[request_id]
        ids, tokens = np.array(list(rows), np.int64), np.zeros(len(rows), np.int32)
        step = StepOut(0, rank, ids.tobytes(), bytes([1] * len(rows)), tokens.tobytes(), finish)
        return [From(f"rank{rank}", "detok", step)]


def _goes_on(progress: tuple[int, int]) -> bool:
    """A request that only an abort ends gives one token and then none, so that runs are finite."""
    wanted, made = progress
    return wanted > 0 or made == 0


# ---- what must hold -------------------------------------------------------------------------------


def one_terminal_event(world: Any) -> bool:
    """I11 at the end: each accepted request has its terminal event, and nobody keeps anything of it."""
    kept = (*world.cores["ingress"].live, *world.cores["detok"].watched, *world.environment.untaken)
    return not kept


def credit_is_conserved(world: Any) -> bool:
    """What the detokenizer holds for untaken is what the client has not read, and credit on its way."""
    under_way: dict[int, int] = {}
    for _, _, msg in world.in_flight:
        if isinstance(msg, Credit):
            under_way[msg.request_id] = under_way.get(msg.request_id, 0) + msg.chunks
    return all(
        one.outstanding == world.environment.untaken.get(request_id, 0) + under_way.get(request_id, 0)
        for request_id, one in world.cores["detok"].watched.items()
    )


def who_left_is_forgotten(world: Any) -> bool:
    """Once nothing about a client that left is under way, the detokenizer watches its request no more."""
    flying = [msg for _, _, msg in world.in_flight if not isinstance(msg, Credit)]
    about = {getattr(msg, "request_id", None) for msg in flying}
    stopping = any(isinstance(msg, Stop) for msg in flying)
    watched = world.cores["detok"].watched
    return stopping or all(one in about for one in world.environment.left if one in watched)


def a_lost_rank_is_heard_at_once(world: Any) -> bool:
    """I11: when a rank is missing, the end of every request is under way."""
    ingress = world.cores["ingress"]
    ending = {msg.request_id for _, _, msg in world.in_flight if isinstance(msg, (RequestFailed, Ended))}
    return ingress.state != "no_rank" or ingress.live.keys() <= ending


def rids_are_unique(world: Any) -> bool:
    """No two live requests of different HTTP requests have one id that a client chose."""
    groups: dict[str, set[int]] = {}
    for live in world.cores["ingress"].live.values():
        if live.rid:
            groups.setdefault(live.rid, set()).add(live.call)
    return all(len(group) == 1 for group in groups.values())


def drained_is_said_once(world: Any) -> bool:
    """At the end: ingress that drains without requests has said so, once."""
    said = world.environment.drained
    return bool(said == 1 if world.cores["ingress"].state == "draining" else said <= 1)


def detok_stops_last(world: Any) -> bool:
    """At the end: where ingress has stopped, the detokenizer has, too."""
    ingress, detok = world.cores["ingress"], world.cores["detok"]
    return bool((ingress.state == "stopped") == (detok.state == "stopped"))


def unknown_rank_is_the_clients_fault(world: Any) -> bool:
    """A demanded rank that doesn't exist is answered 400."""
    return world.environment.answers.get("unknown") in (None, "BadRequest")
