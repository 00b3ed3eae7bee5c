"""One request on its way out: tokens to text, and chunks that merge while the client lags."""

from __future__ import annotations

from codecs import utf_8_decode
from typing import NamedTuple, Protocol

from engine.actors.stops import StopScan
from engine.messages import GOES_ON, STOP_EOS, STOP_TOKEN, Delta, Watch


class TokenTable(Protocol):
    """What a tokenizer knows of single tokens."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Tokens that are no text."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for, perhaps only a part of a character."""


class Advance(NamedTuple):
    """Text that may go out, how many of the tokens count, and the stop string that was completed."""

    text: str
    used: int
    matched: str | None


class Watched:
    """A request without a terminal event.

    held         bytes of an unfinished character
    outstanding  chunks that the client has not taken
    waiting      what the client gets once it has taken a chunk
    merged       chunks that were folded into `waiting`
    drafts       rounds that verified drafts, drafted tokens verified, and accepted
    """

    __slots__ = (
        "drafts",
        "held",
        "merged",
        "outstanding",
        "rank",
        "request_id",
        "scan",
        "sink",
        "skip_special",
        "waiting",
    )

    def __init__(self, msg: Watch) -> None:
        self.request_id = msg.request_id
        self.sink = msg.sink
        self.rank = msg.rank
        self.skip_special = msg.skip_special_tokens
        self.scan = StopScan(msg.stop, msg.keep_stop)
        self.held = b""
        self.outstanding = 0
        self.merged = 0
        self.waiting: Delta | None = None
        self.drafts = (0, 0, 0)

    def note_drafts(self, verified: int, accepted: int) -> None:
        """One more round."""
        rounds, all_verified, all_accepted = self.drafts
        self.drafts = (rounds + 1, all_verified + verified, all_accepted + accepted)

    def advance(self, table: TokenTable, token_ids: tuple[int, ...], finish: int) -> Advance:
        """The new tokens as text; a stop string ends it before later tokens and before `finish`."""
        shown = token_ids[:-1] if finish in (STOP_EOS, STOP_TOKEN) else token_ids
        pieces: list[str] = []
        for count, token_id in enumerate(shown, 1):
            piece, matched = self.scan.feed(self._decode(table, token_id))
            pieces.append(piece)
            if matched is not None:
                return Advance("".join(pieces), count, matched)
        if finish != GOES_ON:
            piece, matched = self.scan.feed(self.held.decode("utf-8", errors="replace"))
            self.held = b""
            pieces.append(piece)
            if matched is not None:
                return Advance("".join(pieces), len(token_ids), matched)
            pieces.append(self.scan.flush())
        return Advance("".join(pieces), len(token_ids), None)

    def _decode(self, table: TokenTable, token_id: int) -> str:
        """Whole characters that this token completes; their first bytes wait in `held`."""
        if self.skip_special and token_id in table.special_ids:
            return ""
        data = self.held + table.token_bytes(token_id)
        text, consumed = utf_8_decode(data, "replace", False)
        self.held = data[consumed:]
        return text

    def fold(self, chunk: Delta) -> Delta:
        """`chunk` with what was waiting before it; nothing waits any more."""
        first, self.waiting, self.merged = self.waiting, None, 0
        return chunk if first is None else joined(first, chunk)

    def hold(self, chunk: Delta) -> None:
        """The chunk joins what waits for the client."""
        self.waiting = chunk if self.waiting is None else joined(self.waiting, chunk)
        self.merged += 1


def joined(first: Delta, second: Delta) -> Delta:
    """One chunk that says what the two say in their order; `first` is not a terminal one."""
    return Delta(
        request_id=second.request_id,
        sink=second.sink,
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        logprobs=first.logprobs + second.logprobs,
        prompt_logprobs=first.prompt_logprobs + second.prompt_logprobs,
        finish=second.finish,
        matched=second.matched,
        status=second.status,
        message=second.message,
        drafts=second.drafts,
    )
