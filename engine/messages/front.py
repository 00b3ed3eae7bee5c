"""Between the HTTP side, ingress and who tells it of ranks."""

from __future__ import annotations

from typing import Any

from engine.messages.base import Message
from engine.messages.rank import Sampling


class Entry(Message, frozen=True):
    """One completion that an HTTP request wants; fields as in Submit and Watch.

    route  the rank that the client demands for it alone; -1 none
    """

    sink: int
    prompt: bytes
    sampling: Sampling
    route: int = -1
    rid: str = ""
    child: int = 0
    stop: tuple[str, ...] = ()
    keep_stop: bool = False
    skip_special_tokens: bool = True
    cache_salt: str = ""
    priority: int = 0
    deadline_s: float = 0.0
    timing: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    grammar_key: str = ""
    grammar: bytes = b""
    grammar_root: str = "start"


class RankLoad(Message, frozen=True):
    """What a rank published last of its load.

    number    of the publication, ascending
    tokens    computed ones in its cache, and those that wait to be
    received  prompt tokens that it was ever sent
    """

    rank: int
    number: int
    tokens: int
    received: int


class Enqueue(Message, frozen=True):
    """HTTP side -> ingress: entries that are accepted whole or refused whole.

    Those with a `route` reach that one rank, in one message (I3). Others are spread, and the completions of a
    prompt (child 0 and those behind it) stay together.

    route  the rank that the client demands for all; -1 none
    slot   opaque reply slot: answered with Accepted, or with an EngineError
    now_s  the loop's clock
    loads  of the ranks, as far as they publish them
    """

    entries: tuple[Entry, ...]
    route: int = -1
    slot: Any = None
    now_s: float = 0.0
    loads: tuple[RankLoad, ...] = ()


class Accepted(Message, frozen=True):
    """Ingress -> HTTP side, the answer to Enqueue: ids in the order of the entries, and their ranks.

    refresh  what became of `loads`: refreshed, throttled, stale; empty without
    """

    ids: tuple[int, ...]
    ranks: tuple[int, ...]
    refresh: str = ""


class Ended(Message, frozen=True):
    """Detokenizer -> ingress: the request got its terminal event; once a request."""

    request_id: int
    reason: int


class RankUp(Message, frozen=True):
    """Link -> ingress: the rank takes requests."""

    rank: int


class RankDown(Message, frozen=True):
    """Link or supervisor -> ingress: the rank is dead, and with it every request that it had."""

    rank: int
    reason: str = ""


class Drain(Message, frozen=True):
    """Shutdown coordinator -> ingress: refuse new requests, let the running ones end."""


class Drained(Message, frozen=True):
    """Ingress -> shutdown coordinator: draining, and no request is left."""
