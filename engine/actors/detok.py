"""Detokenizer: columns of tokens become one chunk of text a request, with the one terminal event at its end.

A client that lags fills only its own bound: then its chunks merge here, then its request is aborted.
"""

from __future__ import annotations

from typing import ClassVar

from engine.actors.columns import Row, rows_of
from engine.actors.core import Core, Send
from engine.actors.ingress import rank_name
from engine.actors.watched import TokenTable, Watched
from engine.messages import (
    ABORTED,
    GOES_ON,
    STOP_EOS,
    STOP_STRING,
    STOP_TOKEN,
    Abort,
    Credit,
    Delta,
    Deltas,
    Ended,
    RequestFailed,
    StepOut,
    Watch,
)

SLOW_CLIENT = "slow_client: the client reads its stream too slowly"
"""Message of the terminal event of a request whose client lags beyond the bound."""


class Detok(Core):
    """Core of specs/detok.toml.

    table   what the tokenizer knows of single tokens
    buffer  chunks that one client may leave untaken; as many again may merge
    """

    SPEC: ClassVar[str] = "detok"
    DATA: ClassVar[tuple[str, ...]] = ("watched",)

    def __init__(self, table: TokenTable, buffer: int) -> None:
        super().__init__()
        self.table = table
        self.buffer = buffer
        self.watched: dict[int, Watched] = {}

    # ---- guards -------------------------------------------------------------------------------

    def is_watched(self, msg: RequestFailed | Credit | Abort) -> bool:
        """The request has no terminal event yet."""
        return msg.request_id in self.watched

    # ---- actions ------------------------------------------------------------------------------

    def watch(self, msg: Watch) -> None:
        """Text of the request will go to its sink."""
        self.watched[msg.request_id] = Watched(msg)

    def emit_step(self, msg: StepOut) -> None:
        """At most one chunk for each watched request of the step."""
        chunks: list[Delta] = []
        for row in rows_of(msg):
            watched = self.watched.get(row.request_id)
            # Absent: stopped by its text, aborted or failed after this step was queued.
            if watched is not None:
                chunk = self._gain(watched, row)
                if chunk is not None:
                    chunks.append(chunk)
        self._say(chunks)

    def fail(self, msg: RequestFailed) -> None:
        """The request ends with an error."""
        self._say([self._terminal(self.watched[msg.request_id], msg.reason, msg.status, msg.message)])

    def abort(self, msg: Abort) -> None:
        """The client is gone; whoever still listens gets a terminal event."""
        self._say([self._terminal(self.watched[msg.request_id], ABORTED, 499, "the request was cancelled")])

    def take_credit(self, msg: Credit) -> None:
        """The client took chunks; what was merged meanwhile goes out."""
        watched = self.watched[msg.request_id]
        watched.outstanding -= msg.chunks
        waiting = watched.waiting
        if waiting is not None and watched.outstanding < self.buffer:
            watched.waiting, watched.merged = None, 0
            watched.outstanding += 1
            self._say([waiting])

    # ---- parts of actions ---------------------------------------------------------------------

    def _gain(self, watched: Watched, row: Row) -> Delta | None:
        """What the client gets now for the row's tokens; None where nothing, or where it has to wait."""
        if row.verified:
            watched.note_drafts(row.verified, row.accepted)
        text, used, matched = watched.advance(self.table, row.token_ids, row.finish)
        finish: int = row.finish
        cause: str | int | None = matched
        if matched is not None:
            finish = STOP_STRING
            self.emit(Send(rank_name(watched.rank), Abort(watched.request_id, STOP_STRING)))
        elif finish in (STOP_EOS, STOP_TOKEN):
            cause = row.token_ids[-1]
        chunk = Delta(
            request_id=watched.request_id,
            sink=watched.sink,
            text=text,
            token_ids=row.token_ids[:used],
            logprobs=row.logprobs[:used],
            prompt_logprobs=row.prompt_logprobs,
            finish=finish,
            matched=cause,
            drafts=watched.drafts if finish != GOES_ON else (0, 0, 0),
        )
        if finish != GOES_ON:
            return self._last(watched, chunk)
        return self._next(watched, chunk) if used or row.prompt_logprobs else None

    def _next(self, watched: Watched, chunk: Delta) -> Delta | None:
        """The chunk, if the client has room; else it waits, and a client that lags too far is cut off."""
        if watched.waiting is None and watched.outstanding < self.buffer:
            watched.outstanding += 1
            return chunk
        watched.hold(chunk)
        if watched.merged <= self.buffer:
            return None
        self.emit(Send(rank_name(watched.rank), Abort(watched.request_id, ABORTED)))
        return self._terminal(watched, ABORTED, 408, SLOW_CLIENT)

    def _terminal(self, watched: Watched, reason: int, status: int, message: str) -> Delta:
        """A last chunk that says why."""
        return self._last(
            watched,
            Delta(
                watched.request_id,
                watched.sink,
                finish=reason,
                status=status,
                message=message,
                drafts=watched.drafts,
            ),
        )

    def _last(self, watched: Watched, chunk: Delta) -> Delta:
        """The chunk as the terminal event: the request is forgotten, so that nothing can follow."""
        self.watched.pop(watched.request_id, None)
        self.emit(Send("ingress", Ended(watched.request_id, chunk.finish)))
        return watched.fold(chunk)

    def _say(self, chunks: list[Delta]) -> None:
        if chunks:
            self.emit(Send("api", Deltas(tuple(chunks))))

    # ---- invariants ---------------------------------------------------------------------------

    def nobody_is_left(self) -> bool:
        """A detokenizer that has stopped watches no request."""
        return self.state != "stopped" or not self.watched

    def buffers_are_bounded(self) -> bool:
        """No client holds more than its bound; what merges for it is bounded, too."""
        return all(
            0 <= one.outstanding <= self.buffer and one.merged <= self.buffer for one in self.watched.values()
        )
