"""Every message of the engine, grouped by receiver. One message a step, columns not objects.

Columns are little-endian bytes, viewed with `numpy.frombuffer`; their type and length stand beside the field.
Times are seconds. Request ids are int64, unique for a server's life, given by ingress.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all messages; array-like on the wire, tagged with the class name."""


# Finish codes, uint8, in StepOut.finish and Finished.reason.
GOES_ON, STOP_EOS, STOP_TOKEN, STOP_STRING, LENGTH, ABORTED, FAILED = range(7)


# ---- any receiver -------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """First frame of every link, in both directions."""

    version: int
    spec_hash: str
    name: str


class Stop(Message, frozen=True):
    """Supervisor or shutdown coordinator -> any core: finish and stop."""

    reason: str = ""


class Failed(Message, frozen=True):
    """Supervisor -> whoever decides what next: an actor of this process ended with an error.

    state, message  in which it was, and what it was about to handle, as text
    """

    name: str
    state: str
    message: str
    error: str


# ---- rank ---------------------------------------------------------------------------------------


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


class StepDone(Message, frozen=True):
    """Device thread -> rank: the step's results are on the host.

    epoch      of the RunStep that this answers
    counts     uint8[B] sampled tokens of each row group, 0 for a prefill chunk that isn't the last; with
               speculation a decode group has 1 for each accepted draft and 1 more, or 0 where it had ended
    token_ids  int32[sum counts]
    failed     (row, message) of rows whose sampling failed; their counts are 0 (I15)
    logprobs   None where no row asked
    ended      uint8[B] 1 where the group's last token ended its grammar; empty: none did

    Of a step that has `verify`, else empty:
    verified   uint8[B] rows verified of each group
    survival   float32[B, block] estimated chance of each draft to be accepted; empty where none was drafted
    lengths    int32[B] committed length of each group's slot after the step
    phases     seconds of: drafting, target forward, acceptance and commit
    """

    epoch: int
    counts: bytes
    token_ids: bytes
    failed: tuple[tuple[int, str], ...] = ()
    logprobs: LogprobColumns | None = None
    seconds: float = 0.0
    verified: bytes = b""
    survival: bytes = b""
    lengths: bytes = b""
    phases: tuple[float, float, float] = (0.0, 0.0, 0.0)
    ended: bytes = b""


class Tick(Message, frozen=True):
    """Timer -> rank: publish a snapshot, check deadlines.

    now_s   the loop's monotonic clock
    wall_s  the wall clock, which goes into the snapshot
    """

    now_s: float
    wall_s: float = 0.0


# ---- device thread ------------------------------------------------------------------------------


class SlotBind(Message, frozen=True):
    """Rank -> device, inside RunStep: a request slot is (re)bound; its committed length becomes 0.

    prompt_tokens  length of the request's own prompt; later positions are its output, also after a retraction
    prompt         int32[n], n >= prompt_tokens: the prompt and what was generated before a retraction;
                   empty where neither penalties nor prompt logprobs are asked for
    ends_at        tokens of the request at its longest, prompt and output; 0: not told (no speculation)
    constrained    the request has a matcher, known by its request_id
    """

    slot: int
    generation: int
    request_id: int
    child: int
    sampling: Sampling
    prompt_tokens: int
    prompt: bytes = b""
    ends_at: int = 0
    constrained: bool = False


class RunStep(Message, frozen=True):
    """Rank -> device: one step. B row groups (one a request), T tokens in all.

    slots, generations  int32[B]; slot 0 is the padding sink and never appears
    starts              int32[B] position of the first new token (without speculation exact)
    counts              int32[B] new tokens of each request, >= 1
    tokens              int32[T]; -1 takes the slot's relay token, the last one sampled on the device
    samples             uint8[B] 1 where the group's last row is sampled
    pages               int32[P,4] rows (slot, logical page, full page id, window page id): new table entries
    binds               slots that are (re)bound before this step

    bucket              captured size in tokens that the ranks agreed on; 0: the step runs eagerly
    verify              uint8[B] most rows of a decode group that may be verified, its anchor included; 0 for
                        a chunk of a prompt; empty: the step doesn't speculate. Where it is given, `starts` of
                        decode groups are upper bounds: the slot's committed length on the device counts
    budget              drafted rows that the step verifies over all groups; -1: as many as `verify` allows;
                        0: nothing is drafted
    ranks               (requests, tokens, most rows whose logits are wanted) of each rank, in order, equal
                        on all; requests -1 where the rank reads prompts; empty where there is one rank
    """

    epoch: int
    mode: str  # "extend", "decode", "mixed", "idle"
    slots: bytes
    generations: bytes
    starts: bytes
    counts: bytes
    tokens: bytes
    samples: bytes
    pages: bytes = b""
    binds: tuple[SlotBind, ...] = ()
    bucket: int = 0
    ranks: tuple[tuple[int, int, int], ...] = ()
    verify: bytes = b""
    budget: int = 0


# ---- detokenizer --------------------------------------------------------------------------------


class LogprobColumns(Message, frozen=True):
    """Logprobs of a step's emitted tokens (n = sum of counts), natural log, of the target's raw distribution.

    chosen       float32[n]
    top_counts   uint8[n]
    top_ids      int32[sum top_counts]
    top_values   float32[sum top_counts]
    prompt_rows  int32[m,2] (row group, position) of this step's prompt logprobs; the same four columns follow
    """

    chosen: bytes
    top_counts: bytes
    top_ids: bytes
    top_values: bytes
    prompt_rows: bytes = b""
    prompt_chosen: bytes = b""
    prompt_top_counts: bytes = b""
    prompt_top_ids: bytes = b""
    prompt_top_values: bytes = b""


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


class Snapshot(Message, frozen=True):
    """Rank -> api, when idle too: load and life of one rank. `wall_s` is the wall clock at publication."""

    rank: int
    wall_s: float
    state: str
    running: int
    waiting: int
    full_pages_free: int
    full_pages_total: int
    window_pages_free: int
    window_pages_total: int
    counters: dict[str, float] = {}


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


# ---- HTTP side (sinks of the detokenizer) -------------------------------------------------------


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


# ---- ingress ------------------------------------------------------------------------------------


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


# ---- health -------------------------------------------------------------------------------------


class Beat(Message, frozen=True):
    """A rank's sign of life, as it stands in shared memory.

    slot     of the memory              rank, pid   of the process that wrote it
    wall_s   wall clock when it did     torn        it couldn't be read
    step_age_s, step_budget_s    of the step that runs (0: none does), and what a step may take
    done     steps so far               phase       of the rank's end, 0: it serves
    """

    slot: int
    rank: int = -1
    pid: int = 0
    wall_s: float = 0.0
    step_age_s: float = 0.0
    step_budget_s: float = 0.0
    done: int = 0
    phase: int = 0
    torn: bool = False


class Probe(Message, frozen=True):
    """HTTP side -> health: how is the server? `slot` is answered with Vitals.

    wall_s  the wall clock
    beats   signs of life that the asker read, each with the process that should have written it
    pids    process of each rank, as far as it is known
    """

    wall_s: float
    slot: Any = None
    beats: tuple[Beat, ...] = ()
    pids: tuple[tuple[int, int], ...] = ()


class Vitals(Message, frozen=True):
    """Health -> HTTP side, the answer to Probe.

    refused  why requests are refused; empty where they are taken
    ages     (rank, seconds since its newest snapshot) of the ranks that sent one
    stale    one line for each rank without a fresh snapshot
    code     of `refused`: starting, rank_lost, shutting_down; empty where requests are taken
    faults   (rank, missing, duplicate, stale, future or unreadable) of the ranks in `stale`, in its order
    """

    refused: str
    ages: tuple[tuple[int, float], ...] = ()
    stale: tuple[str, ...] = ()
    code: str = ""
    faults: tuple[tuple[int, str], ...] = ()


# ---- grammars -----------------------------------------------------------------------------------


class GrammarWanted(Message, frozen=True):
    """HTTP side -> grammar: a request needs this grammar.

    key     what `GrammarKey.wire` wrote
    ticket  of the request, unique; `GrammarLeft` names it
    now_s   the loop's clock
    slot    opaque reply slot: answered once, with GrammarReady or an EngineError
    """

    key: str
    ticket: int
    now_s: float
    slot: Any = None


class GrammarLeft(Message, frozen=True):
    """HTTP side -> grammar: the request no longer waits, or no longer uses what it got."""

    ticket: int


class GrammarReady(Message, frozen=True):
    """Grammar -> HTTP side, the answer to GrammarWanted.

    value   what the workers made: a GrammarArtifact
    source  memory, inflight, disk, local_compile_marker or compile
    """

    value: Any
    source: str


class GrammarArtifact(Message, frozen=True):
    """A compiled grammar on its way to the ranks, or the certainty that it compiles within the limits.

    key          what `GrammarKey.wire` wrote; its text is compiled where there is no payload
    payload      zlib of the library's serial form; empty: each rank compiles the key itself, which is faster
    raw_bytes    of the serial form; no more is ever inflated
    probe        SHA-256 of the first masks (`engine.grammar.compiler.probe_of`): what is loaded must match
    memory_bytes, compile_s, load_s    measured by the worker that compiled it; load_s 0 without a payload
    """

    key: str
    payload: bytes
    raw_bytes: int
    probe: bytes
    memory_bytes: int
    compile_s: float
    load_s: float


class GrammarCompile(Message, frozen=True):
    """Grammar -> compilers: a job, answered once with GrammarBuilt, GrammarUnfit or GrammarBroken."""

    job: int
    key: str


class GrammarKill(Message, frozen=True):
    """Grammar -> compilers: the job's time is over. Its one answer may already be under way."""

    job: int


class GrammarBuilt(Message, frozen=True):
    """Compilers -> grammar: the job's grammar.

    size    bytes that it takes in memory
    source  as in GrammarReady
    """

    job: int
    value: Any
    size: int
    source: str


class GrammarUnfit(Message, frozen=True):
    """Compilers -> grammar: the library can't compile the key; `text` says why. `now_s`: the loop's clock."""

    job: int
    text: str
    now_s: float


class GrammarBroken(Message, frozen=True):
    """Compilers -> grammar: the job ended without a result. `kind`: crashed, killed, corrupt or failed."""

    job: int
    kind: str
    text: str


# ---- shutdown coordinator, launcher -------------------------------------------------------------


class Signalled(Message, frozen=True):
    """Launcher -> shutdown coordinator: the operator wants an end; a second hastens, a third kills."""


class RankEnded(Message, frozen=True):
    """Launcher -> shutdown coordinator: a rank's process has ended; all that it sent has arrived before.

    code  exit code; negative: the signal that killed it. 0 alone is a clean end
    """

    rank: int
    code: int


class CoreEnded(Message, frozen=True):
    """Loader -> release: the rank's scheduler has ended; `clean`: all ranks agreed, or nothing was left."""

    clean: bool


class ReleasePart(Message, frozen=True):
    """Release -> parts: let go of it (graphs, caches, groups), or wait for the other ranks (barrier)."""

    part: str


class Released(Message, frozen=True):
    """Parts -> release: it is gone; with a text: it failed."""

    fault: str = ""


class PeersMet(Message, frozen=True):
    """Parts -> release: every other rank is at the barrier, or beyond it, or gone."""


class PhaseBegan(Message, frozen=True):
    """Shutdown coordinator -> launcher: drain, stop, kill or close begins; for log and metrics."""

    phase: str


class KillRanks(Message, frozen=True):
    """Shutdown coordinator -> launcher: end every rank's process that is left, now."""


class CloseServer(Message, frozen=True):
    """Shutdown coordinator -> launcher: let the last answers leave, stop listening, end with `code`."""

    code: int
