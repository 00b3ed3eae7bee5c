"""Faults of ingress, detokenizer, shutdown, links and shells; as in plants_rank.py."""

from __future__ import annotations

import codecs
from typing import Any

import msgspec
import pytest

from engine.actors import detok as detok_module
from engine.actors import watched as watched_module
from engine.actors.core import Send
from engine.actors.detok import Detok
from engine.actors.health import Health
from engine.actors.ingress import Ingress
from engine.actors.links import Link
from engine.actors.mailbox import Mailbox
from engine.actors.routing import Router
from engine.actors.shell import Shell
from engine.actors.shutdown import Shutdown
from engine.actors.stops import StopScan
from engine.actors.watched import Watched
from engine.messages import GOES_ON, Ended, Stop, SubmitBatch

Patch = pytest.MonkeyPatch


def splits_a_group(patch: Patch) -> None:
    """A group of several reaches its rank in two messages.
    steady"""
    emit = Ingress.emit

    def faulty(self: Ingress, effect: Any) -> None:
        if isinstance(effect, Send) and isinstance(effect.msg, SubmitBatch) and len(effect.msg.items) > 1:
            emit(self, Send(effect.to, SubmitBatch(effect.msg.items[:1])))
            effect = Send(effect.to, SubmitBatch(effect.msg.items[1:]))
        emit(self, effect)

    patch.setattr(Ingress, "emit", faulty)


def routes_to_any_rank(patch: Patch) -> None:
    """A request goes to the emptiest rank, whether it lives or not.
    start"""

    def faulty(self: Router, units: Any, live: Any, requests: Any, tokens: Any) -> list[int]:
        return [min(requests, key=lambda rank: requests[rank]) for _ in units]

    patch.setattr(Ingress, "is_the_last_to_come", lambda self, msg: True)
    patch.setattr(Router, "assign", faulty)


def forgets_the_requests_of_a_dead_rank(patch: Patch) -> None:
    """The clients of a rank that died wait for ever.
    rank-death"""
    patch.setattr(Ingress, "lose_rank", lambda self, msg: self.up.discard(msg.rank))


def keeps_the_load_of_ended_requests(patch: Patch) -> None:
    """A rank's load only grows: in the end everybody is refused.
    steady"""
    patch.setattr(Ingress, "forget", lambda self, msg: self.live.pop(msg.request_id))


def says_drained_too_early(patch: Patch) -> None:
    """Ingress says that it is drained while requests run.
    shutdown"""
    patch.setattr(Ingress, "has_no_request", lambda self, msg: True)


def watches_too_late(patch: Patch) -> None:
    """The detokenizer hears of a request after its rank.
    steady"""
    accept = Ingress.accept

    def faulty(self: Ingress, msg: Any) -> None:
        accept(self, msg)
        self._effects.sort(key=lambda effect: isinstance(effect, Send) and effect.to == "detok")

    patch.setattr(Ingress, "accept", faulty)


def goes_on_after_the_terminal_event(patch: Patch) -> None:
    """The detokenizer doesn't forget a request whose stop string it saw.
    steady"""

    def faulty(self: Detok, watched: Any, chunk: Any) -> Any:
        self.emit(Send("ingress", Ended(watched.request_id, chunk.finish)))
        return watched.fold(chunk)

    patch.setattr(Detok, "_last", faulty)


def forgets_to_tell_ingress(patch: Patch) -> None:
    """Ingress never hears that a request has ended.
    steady"""
    emit = Detok.emit

    def faulty(self: Detok, effect: Any) -> None:
        if not isinstance(effect.msg, Ended):
            emit(self, effect)

    patch.setattr(Detok, "emit", faulty)


def loses_credit(patch: Patch) -> None:
    """What a client takes isn't counted: whoever reads well is cut off as slow.
    slow-clients steady"""
    patch.setattr(Detok, "take_credit", lambda self, msg: None)


def never_cuts_off(patch: Patch) -> None:
    """A client that lags is given chunk after chunk.
    slow-clients"""

    def faulty(self: Detok, watched: Any, chunk: Any) -> Any:
        watched.outstanding += 1
        return chunk

    patch.setattr(Detok, "_next", faulty)


def loses_text_where_chunks_merge(patch: Patch) -> None:
    """Of two chunks that become one the second's text is lost.
    slow-clients"""
    joined = watched_module.joined

    def faulty(first: Any, second: Any) -> Any:
        return msgspec.structs.replace(joined(first, second), text=first.text)

    patch.setattr(watched_module, "joined", faulty)


def cuts_characters(patch: Patch) -> None:
    """The first bytes of a character that is complete later are shown as broken.
    steady"""

    def faulty(data: bytes, errors: str, final: bool) -> tuple[str, int]:
        return codecs.utf_8_decode(data, errors, True)

    patch.setattr(watched_module, "utf_8_decode", faulty)


def shows_the_stop_string(patch: Patch) -> None:
    """The text that may become a stop string isn't held back.
    steady"""

    def faulty(self: StopScan, piece: str) -> tuple[str, str | None]:
        self.held = (self.held + piece)[-8:]
        return piece, next((stop for stop in self.stops if stop in self.held), None)

    patch.setattr(StopScan, "feed", faulty)


def loses_the_last_character(patch: Patch) -> None:
    """The last chunk of a request loses a character.
    steady"""
    advance = Watched.advance

    def faulty(self: Watched, table: Any, ids: Any, finish: int) -> Any:
        gained = advance(self, table, ids, finish)
        return gained._replace(text=gained.text[:-1]) if finish != GOES_ON else gained

    patch.setattr(Watched, "advance", faulty)


def names_the_wrong_request(patch: Patch) -> None:
    """A chunk goes to the client's sink under another request's number.
    steady"""
    delta = detok_module.Delta

    def faulty(**fields: Any) -> Any:
        return delta(**{**fields, "request_id": max(1, fields["request_id"] - 1)})

    patch.setattr(detok_module, "Delta", faulty)


def is_ready_too_early(patch: Patch) -> None:
    """The server is ready as soon as one rank is up.
    start"""
    patch.setattr(Health, "is_the_last_to_start", lambda self, msg: True)


def forgets_snapshots(patch: Patch) -> None:
    """What ranks say of themselves is not kept: they look dead.
    start rank-death"""
    patch.setattr(Health, "keep", lambda self, msg: None)


def stops_ranks_before_ingress(patch: Patch) -> None:
    """At the end ranks are stopped first, and their clients hear nothing of it.
    shutdown"""

    def faulty(self: Shutdown, msg: object) -> None:
        self.steps.append("stop")
        for rank in range(self.ranks):
            self.emit(Send(f"rank{rank}", Stop("now")))
        self.emit(Send("ingress", Stop("now")))

    patch.setattr(Shutdown, "stop_all", faulty)


def closes_after_the_first_rank(patch: Patch) -> None:
    """The server closes as soon as one rank has ended.
    shutdown steady"""
    patch.setattr(Shutdown, "is_last", lambda self, msg: True)


def forgets_to_stop_a_rank(patch: Patch) -> None:
    """At the end the last rank isn't told.
    steady"""

    def faulty(self: Shutdown, msg: object) -> None:
        self.steps.append("stop")
        self.emit(Send("ingress", Stop("now")))
        for rank in range(self.ranks - 1):
            self.emit(Send(f"rank{rank}", Stop("now")))

    patch.setattr(Shutdown, "stop_all", faulty)


def arms_no_time_out(patch: Patch) -> None:
    """States have no time-outs: a silent peer is waited for for ever.
    links device-faults"""
    patch.setattr(Shell, "_arm", lambda self: setattr(self, "_entry", self.core.entry))


def loses_messages_of_a_burst(patch: Patch) -> None:
    """Of several messages that wait for a link only the last is sent.
    links steady"""
    write = Link._write

    async def faulty(self: Link) -> None:
        take = self.outbox.take

        async def last() -> list[Any]:
            return (await take())[-1:]

        stand_in = type("Outbox", (), {"take": staticmethod(last), "__len__": lambda _: 0})()
        real, self.outbox = self.outbox, stand_in
        try:
            await write(self)
        finally:
            self.outbox = real

    patch.setattr(Link, "_write", faulty)


def overtakes_in_a_mailbox(patch: Patch) -> None:
    """A mailbox gives its messages out newest first.
    crowd links leaving-clients"""
    drain = Mailbox._drain
    patch.setattr(Mailbox, "_drain", lambda self: drain(self)[::-1])
