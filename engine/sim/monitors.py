"""Invariants of a run, from outside the machines: each holds of every event, or says what is wrong."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from engine.actors.core import Core, Reply, Send, Stop
from engine.actors.detok import Detok
from engine.actors.ingress import Ingress
from engine.actors.rank import Rank
from engine.actors.shutdown import Shutdown
from engine.messages import (
    GOES_ON,
    Accepted,
    CloseServer,
    Deltas,
    Ended,
    Enqueue,
    KillRanks,
    RequestFailed,
    StepOut,
    SubmitBatch,
)
from engine.messages import Stop as StopActor
from engine.messages import Watch as WatchRequest
from engine.sim.watch import Event, Watch

AUDIT_EVERY = 16
"""The cores' own invariants walk over tables: they are asked after every so many events of a core."""


class WholeGroups:
    """I3: what one Enqueue wants reaches one live rank in one message, or is refused whole."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._sent: dict[str, deque[SubmitBatch]] = {}

    def __call__(self, core: Core, event: Event) -> None:
        if isinstance(core, Ingress) and isinstance(event.msg, Enqueue):
            self._routed(core, event.msg, event)
        elif isinstance(core, Rank) and isinstance(event.msg, SubmitBatch):
            self._enqueued(event)

    def _routed(self, core: Ingress, msg: Enqueue, event: Event) -> None:
        sends = [effect for effect in event.effects if isinstance(effect, Send)]
        replies = [effect.value for effect in event.effects if isinstance(effect, Reply)]
        batches = [(send.to, send.msg) for send in sends if isinstance(send.msg, SubmitBatch)]
        if len(replies) != 1:
            self._watch.wrong("I3", f"{len(replies)} answers to one Enqueue")
        elif not isinstance(replies[0], Accepted):
            if sends:
                self._watch.wrong("I3", f"a refused group leaves {len(sends)} messages")
        else:
            self._accepted(core, msg, replies[0], sends, batches)

    def _accepted(
        self,
        core: Ingress,
        msg: Enqueue,
        reply: Accepted,
        sends: list[Send],
        batches: list[tuple[str, SubmitBatch]],
    ) -> None:
        """Each rank gets its part in one message; what must stay together, a route or a prompt, does."""
        parts: dict[str, tuple[int, ...]] = {}
        for request_id, rank in zip(reply.ids, reply.ranks, strict=True):
            parts[f"rank{rank}"] = (*parts.get(f"rank{rank}", ()), request_id)
        left = [(to, tuple(item.request_id for item in batch.items)) for to, batch in batches]
        # The detokenizer must know a request before its rank can tell of it.
        ahead = sends[: len(sends) - len(batches)]
        watched = tuple(send.msg.request_id for send in ahead if isinstance(send.msg, WatchRequest))
        if sorted(left) != sorted(parts.items()) or watched != reply.ids:
            self._watch.wrong("I3", f"requests {parts} left as {left}")
        if not core.up.issuperset(reply.ranks) or len(reply.ids) != len(msg.entries):
            self._watch.wrong("I3", f"{len(msg.entries)} entries became {reply.ids} on ranks {reply.ranks}")
        together = [
            reply.ranks[place - 1] == reply.ranks[place]
            for place, entry in enumerate(msg.entries)
            if place and (entry.child or msg.route >= 0)
        ]
        if not all(together) or (msg.route >= 0 and set(reply.ranks) != {msg.route}):
            self._watch.wrong("I3", f"a group for rank {msg.route} was torn over ranks {reply.ranks}")
        for to, batch in batches:
            self._sent.setdefault(to, deque()).append(batch)

    def _enqueued(self, event: Event) -> None:
        sent = self._sent.get(event.actor)
        if not sent or sent.popleft() != event.msg:
            self._watch.wrong("I3", f"{event.actor} takes a batch that wasn't sent, or out of order")
        failed = [
            send.msg
            for send in event.effects
            if isinstance(send, Send) and isinstance(send.msg, RequestFailed)
        ]
        full = [msg for msg in failed if msg.status == 429]
        if full and len(full) != len(event.msg.items):
            self._watch.wrong(
                "I3", f"{len(full)} of {len(event.msg.items)} requests of one batch found no room"
            )


class OneEnd:
    """I6, I11: one terminal event a request, and nothing after it: at the rank, at the client, at ingress."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self.accepted: set[int] = set()
        self.ended: dict[str, set[int]] = {"rank": set(), "client": set(), "ingress": set()}

    def __call__(self, core: Core, event: Event) -> None:
        if isinstance(core, Rank):
            for effect in event.effects:
                if isinstance(effect, Send) and isinstance(effect.msg, StepOut):
                    self._step_out(effect.msg)
                elif isinstance(effect, Send) and isinstance(effect.msg, RequestFailed):
                    self._gained("rank", effect.msg.request_id, True)
        elif isinstance(core, Detok):
            self._told(event)
        elif isinstance(core, Ingress):
            self.accepted.update(
                id for e in event.effects if isinstance(e, Reply) for id in getattr(e.value, "ids", ())
            )
            if isinstance(event.msg, Ended):
                self._gained("ingress", event.msg.request_id, True)

    def _told(self, event: Event) -> None:
        for effect in event.effects:
            if isinstance(effect, Send) and isinstance(effect.msg, Deltas):
                for delta in effect.msg.items:
                    self._gained("client", delta.request_id, delta.finish != GOES_ON)

    def _step_out(self, msg: StepOut) -> None:
        ids = np.frombuffer(msg.request_ids, np.int64).tolist()
        if len(set(ids)) != len(ids) or sum(msg.counts) * 4 != len(msg.token_ids):
            self._watch.wrong(
                "I11", f"step {msg.epoch} of rank {msg.rank} tells of {ids}, counts {list(msg.counts)}"
            )
        for request_id, finish in zip(ids, msg.finish, strict=True):
            self._gained("rank", request_id, finish != GOES_ON)

    def _gained(self, where: str, request_id: int, last: bool) -> None:
        ended = self.ended[where]
        if request_id in ended:
            invariant = "I11" if last else "I6"
            self._watch.wrong(invariant, f"{where}: request {request_id} gets more after its terminal event")
        if last:
            ended.add(request_id)


class EndInOrder:
    """I8: requests, ranks, server; and a rank that stops has nothing left."""

    def __init__(self, watch: Watch, ranks: int) -> None:
        self._watch = watch
        self._ranks = ranks
        self._told = False
        self._killed = False

    def __call__(self, core: Core, event: Event) -> None:
        if isinstance(core, Shutdown):
            for effect in event.effects:
                if isinstance(effect, Send):
                    self._ordered(core, effect)
        elif isinstance(core, Rank):
            for effect in event.effects:
                if isinstance(effect, Stop) and core.state == "stopped":
                    self._stopped(core)

    def _ordered(self, core: Shutdown, effect: Send) -> None:
        if effect.to == "ingress" and isinstance(effect.msg, StopActor):
            self._told = True
        elif isinstance(effect.msg, StopActor) and not self._told:
            self._watch.wrong("I8", f"{effect.to} is stopped before ingress")
        elif isinstance(effect.msg, KillRanks):
            self._killed = True
        elif isinstance(effect.msg, CloseServer) and not self._killed and len(core.codes) < self._ranks:
            self._watch.wrong("I8", f"the server closes, but only ranks {sorted(core.codes)} have ended")

    def _stopped(self, core: Rank) -> None:
        held = core.requests.held
        # An idle offer to peers that are gone is nothing left.
        if core.flight or (core.plan is not None and core.plan.want.tokens):
            self._watch.wrong(
                "I8", f"rank {core.setup.rank} stops with {len(core.flight)} steps on its device"
            )
        if held.full.free != held.full.usable or held.window.free != held.window.usable or held.slot.any():
            self._watch.wrong("I10", f"rank {core.setup.rank} stops with pages or slots in hand")


class OwnInvariants:
    """The invariants that the specs name for single cores (I5, I8, I10 and others), every few events."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._events: dict[str, int] = {}

    def __call__(self, core: Core, event: Event) -> None:
        count = self._events[event.actor] = self._events.get(event.actor, 0) + 1
        if count % AUDIT_EVERY == 0 or event.before != event.after == "idle":
            self.audit(core, event.actor)

    def audit(self, core: Core, name: str) -> None:
        """All of one core, now."""
        for invariant in core.spec.invariants:
            if invariant.scope == "core" and not _holds(core, invariant.check):
                self._watch.wrong(invariant.id, f"{name}: {invariant.say}")
        if isinstance(core, Rank) and not core.requests.ends_agree():
            self._watch.wrong("I11", f"{name}: a request's state and finish code differ")


def _holds(core: Any, check: str) -> bool:
    return bool(getattr(core, check)())
