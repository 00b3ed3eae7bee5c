"""To a rank, and to who loads its grammars."""

from __future__ import annotations

from engine.messages.base import ABORTED, Message

MAX_BIASES, MAX_STOP_TOKENS = 1024, 64
"""Most entries of a request's `logit_bias` and `stop_token_ids`."""


class Sampling(Message, frozen=True):
    """How to sample one request, validated by ingress.

    top_k       0 means off
    seed        int64; ingress draws one for requests that gave none
    seeded      the client gave it: drafts and other requests must not change what is drawn
    logit_bias  (token id, bias) pairs
    logprobs    -1 none, 0 the chosen token's, k > 0 also the k best
    """

    max_new_tokens: int
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int = -1
    prompt_logprobs: int = -1
    seeded: bool = False


class Submit(Message, frozen=True):
    """Ingress -> rank, in a SubmitBatch: one request.

    prompt         int32[n] token ids, n >= 1
    child          0..n-1, which of the `n` completions of one HTTP request this is; part of the sampling key
    grammar_key    what `GrammarKey.wire` wrote; empty: the output is free
    grammar        msgpack of the key's GrammarArtifact, once a request; empty where there is no key
    grammar_root   "start": the grammar begins with the output; "after_think": behind the token that ends the
                   reasoning
    deadline_s     seconds from receipt after which the request is aborted; 0: none
    timing         seconds since the epoch: API receive, tokenise start, tokenise end, dispatch
    """

    request_id: int
    prompt: bytes
    sampling: Sampling
    route: int = -1
    child: int = 0
    grammar_key: str = ""
    cache_salt: str = ""
    priority: int = 0
    bootstrap_room: int = -1
    deadline_s: float = 0.0
    timing: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    grammar: bytes = b""
    grammar_root: str = "start"


class SubmitBatch(Message, frozen=True):
    """Ingress -> rank: requests that are enqueued whole before the next batch is formed (I3)."""

    items: tuple[Submit, ...]


class Abort(Message, frozen=True):
    """Ingress or detokenizer -> rank: end a request now. `reason` is a finish code."""

    request_id: int
    reason: int = ABORTED


class Peer(Message, frozen=True):
    """Rank -> every other rank, once an epoch: what this rank wants of the step."""

    epoch: int
    src: int
    values: tuple[int, ...]


class PeerDown(Message, frozen=True):
    """Exchange -> rank, behind all that the peer sent: rank `src` is gone, or out of reach; -1: some rank.

    kind, reason  class in engine/errors.py and text of the error that this rank ends with
    """

    src: int
    kind: str
    reason: str


class MatcherWanted(Message, frozen=True):
    """Rank -> matchers: load the request's grammar; answered once with MatcherReady, unless it leaves before.

    grammar, root  as in Submit
    prompt_tokens  of the request's own prompt
    """

    request_id: int
    grammar: bytes
    root: str
    prompt_tokens: int


class MatcherReady(Message, frozen=True):
    """Matchers -> rank: the request has its matcher; with a text: why it gets none, and its HTTP status."""

    request_id: int
    status: int = 200
    text: str = ""


class MatcherLeft(Message, frozen=True):
    """Rank -> matchers: the request has ended, and no step in flight names it."""

    request_id: int


class Tick(Message, frozen=True):
    """Timer -> rank: publish a snapshot, check deadlines.

    now_s   the loop's monotonic clock
    wall_s  the wall clock, which goes into the snapshot
    """

    now_s: float
    wall_s: float = 0.0
