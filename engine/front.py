"""The actors between HTTP and the ranks, in the api process and in a process that has it all."""

from __future__ import annotations

from collections.abc import Callable

from api.handle import Edge, Engine
from api.served import Served
from engine.actors.detok import Detok
from engine.actors.ingress import Ingress
from engine.actors.process import Process
from engine.config import Settings
from engine.messages import RankLoad, Snapshot

FEW = 64
"""Messages to ingress that no request causes: ranks that come and go, orders of the shutdown coordinator."""


def start_front(
    process: Process,
    settings: Settings,
    served: Served,
    on_snapshot: Callable[[Snapshot], None],
    loads: Callable[[], tuple[RankLoad, ...]] = tuple,
) -> Engine:
    """Starts ingress and detokenizer, and returns what HTTP handlers hold of the engine.

    loads  what the ranks have published of themselves
    """
    ingress, detok = process.mailbox("ingress"), process.mailbox("detok")
    edge = process.refs["api"] = Edge(ingress, on_snapshot)
    limit = settings.max_running_requests + settings.max_queued_requests
    # All accepted requests may end at once, each with an `Ended`, while ingress is full of what edges want.
    ingress.reserve = max(ingress.reserve, settings.dp_size * limit + FEW)
    process.start("ingress", lambda: Ingress(settings.dp_size, limit, settings.load_balance_method))
    process.start("detok", lambda: Detok(served.tokenizer, settings.stream_buffer))
    return Engine(process.asks, ingress, detok, edge, loads)
