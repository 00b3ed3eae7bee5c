"""Of the compile service: HTTP side, the table of grammars, its workers."""

from __future__ import annotations

from typing import Any

from engine.messages.base import Message


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
