"""From ranks to the detokenizer, and from it to the HTTP side."""

from __future__ import annotations

from engine.messages.base import GOES_ON, Message
from engine.messages.device import LogprobColumns


class StepOut(Message, frozen=True):
    """Rank -> detokenizer, once a step. Ragged columns over B requests.

    request_ids int64[B]   counts uint8[B]   token_ids int32[sum counts]   finish uint8[B] (finish codes)

    verified, accepted     uint8[B] drafted tokens of each request that the step verified, and of those the
                           ones that were accepted; empty where the rank doesn't speculate
    """

    epoch: int
    rank: int
    request_ids: bytes
    counts: bytes
    token_ids: bytes
    finish: bytes
    logprobs: LogprobColumns | None = None
    verified: bytes = b""
    accepted: bytes = b""


class RequestFailed(Message, frozen=True):
    """Rank -> detokenizer: the terminal event of a request that ended outside a step or by an error (I11).

    reason  finish code, ABORTED or FAILED; status  HTTP status
    """

    request_id: int
    reason: int
    status: int
    message: str


class Watch(Message, frozen=True):
    """Ingress -> detokenizer, before Submit: a request whose text will be wanted.

    sink           the HTTP side's number of the client's buffer
    rank           the rank that the request was sent to
    stop           stop strings, none empty
    keep_stop      the matched stop string stays in the text
    """

    request_id: int
    sink: int
    rank: int = 0
    stop: tuple[str, ...] = ()
    keep_stop: bool = False
    skip_special_tokens: bool = True


class Credit(Message, frozen=True):
    """HTTP side -> detokenizer: the client has taken this many chunks of the request from its buffer."""

    request_id: int
    chunks: int


class TokenLogprob(Message, frozen=True):
    """Natural-log probability of one token, and of the best tokens in its place as (id, value) pairs."""

    token_id: int
    value: float
    top: tuple[tuple[int, float], ...] = ()


class PromptLogprob(Message, frozen=True):
    """Natural-log probability of the prompt token at `position`, and the best (id, value) pairs there."""

    position: int
    value: float
    top: tuple[tuple[int, float], ...] = ()


class Delta(Message, frozen=True):
    """Detokenizer -> client's sink: what one request gained; the last one has a finish code (I11).

    text             new text, whole characters, without EOS, stop tokens and (by default) stop strings
    token_ids        new tokens, the one that ended the request included
    finish           finish code; GOES_ON in all but the last
    matched          stop string or stop token that ended the request
    status, message  HTTP status and cause where finish is ABORTED or FAILED
    drafts           in the last one: rounds that verified drafts, drafted tokens verified, and accepted
    """

    request_id: int
    sink: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[PromptLogprob, ...] = ()
    finish: int = GOES_ON
    matched: str | int | None = None
    status: int = 200
    message: str = ""
    drafts: tuple[int, int, int] = (0, 0, 0)


class Deltas(Message, frozen=True):
    """Detokenizer -> HTTP side: at most one Delta a request, one message a step."""

    items: tuple[Delta, ...]
