"""One request of a replay as a Mermaid sequence diagram: every message that carries it, in virtual time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from engine.actors.core import Reply, Run, Send
from engine.messages import Accepted, Deltas, Enqueue, RunStep, StepDone, StepOut
from engine.sim.watch import Event, brief


def sequence(events: Iterable[Event], request_id: int) -> str:
    """The diagram's text."""
    lines = list(_lines(events, request_id))
    actors = ["client", "ingress", "detok"]
    actors += sorted({name for source, target, _ in lines for name in (source, target)} - set(actors))
    body = [f"    {source}->>{target}: {text}" for source, target, text in lines]
    return "\n".join(["sequenceDiagram", *(f"    participant {name}" for name in actors), *body])


def first_request(events: Iterable[Event]) -> int:
    """The request that was accepted first; 0 where none was."""
    for event in events:
        for effect in event.effects:
            if isinstance(effect, Reply) and isinstance(effect.value, Accepted):
                return effect.value.ids[0]
    return 0


def _lines(events: Iterable[Event], request_id: int) -> Iterator[tuple[str, str, str]]:
    slots: dict[str, int] = {}
    steps: dict[str, set[int]] = {}
    for event in events:
        at = f"{event.at_s * 1000:.1f} ms"
        if isinstance(event.msg, Enqueue) and any(
            isinstance(effect, Reply) and request_id in getattr(effect.value, "ids", ())
            for effect in event.effects
        ):
            yield "client", "ingress", f"{at} Enqueue of {len(event.msg.entries)}"
        device = f"device{event.actor[4:]}"
        if isinstance(event.msg, StepDone) and event.msg.epoch in steps.get(event.actor, ()):
            yield device, event.actor, f"{at} StepDone {event.msg.epoch}"
        for effect in event.effects:
            if isinstance(effect, Run) and _rides(effect.job, request_id, slots, event.actor):
                steps.setdefault(event.actor, set()).add(effect.job.epoch)
                yield event.actor, device, f"{at} RunStep {effect.job.epoch} ({effect.job.mode})"
            elif isinstance(effect, Send) and _concerns(effect.msg, request_id):
                target = "client" if effect.to == "api" else effect.to
                yield event.actor, target, f"{at} {_said(effect.msg, request_id)}"
            elif isinstance(effect, Reply) and request_id in getattr(effect.value, "ids", ()):
                yield event.actor, "client", f"{at} Accepted on rank {_rank_of(effect.value, request_id)}"


def _rank_of(accepted: Accepted, request_id: int) -> int:
    return accepted.ranks[accepted.ids.index(request_id)]


def _rides(job: RunStep, request_id: int, slots: dict[str, int], rank: str) -> bool:
    for bind in job.binds:
        if bind.request_id == request_id:
            slots[rank] = bind.slot
        elif slots.get(rank) == bind.slot:
            del slots[rank]
    return slots.get(rank, 0) in np.frombuffer(job.slots, np.int32).tolist()


def _concerns(msg: Any, request_id: int) -> bool:
    if isinstance(msg, StepOut):
        return request_id in np.frombuffer(msg.request_ids, np.int64).tolist()
    items = getattr(msg, "items", None)
    if isinstance(items, tuple):
        return any(item.request_id == request_id for item in items)
    return getattr(msg, "request_id", None) == request_id


def _said(msg: Any, request_id: int) -> str:
    if isinstance(msg, StepOut):
        place = np.frombuffer(msg.request_ids, np.int64).tolist().index(request_id)
        return f"StepOut {msg.epoch}: {msg.counts[place]} tokens, finish {msg.finish[place]}"
    if isinstance(msg, Deltas):
        delta = next(item for item in msg.items if item.request_id == request_id)
        return f"Delta: {len(delta.token_ids)} tokens, finish {delta.finish}"
    return brief(msg).replace(f" request_id={request_id}", "")
