"""Every error of the engine: one class a cause, with the numbers in the message.

`http_status` and `kind` say how an error looks over HTTP; a class without them is never a client's fault.
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of all errors. `http_status` is sent to clients; 500 unless a subclass says otherwise."""

    http_status: int = 500
    kind: str = "internal_error"


class BadRequest(EngineError):
    """The request is wrong; the message names the field. `param` is that field."""

    http_status = 400
    kind = "invalid_request_error"

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class UnsupportedFeature(BadRequest):
    """A request feature that this server's modes don't support; named at ingress, never dropped."""


class UnknownModel(EngineError):
    """The request names a model that this server doesn't serve."""

    http_status = 404
    kind = "not_found_error"


class BodyTooLarge(EngineError):
    """The HTTP body is longer than the server accepts."""

    http_status = 413
    kind = "invalid_request_error"


class QueueFull(EngineError):
    """The waiting queue is at its limit; retry later."""

    http_status = 429
    kind = "rate_limit_error"


class NotServing(EngineError):
    """Starting, draining, or no live rank; retry later."""

    http_status = 503
    kind = "service_unavailable_error"


class RequestTooLong(EngineError):
    """A request that alone can't fit the cache; ended with a clear message."""

    http_status = 400
    kind = "invalid_request_error"


class ConfigError(EngineError):
    """A start-up setting or a model configuration is wrong; the server doesn't start."""


class CheckpointError(EngineError):
    """A checkpoint's tensor or file is missing, extra, misshapen or of a wrong type."""


class SpecError(EngineError):
    """A state-machine spec is wrong; the message names file and row."""


class Unexpected(EngineError):
    """An event arrived in a state whose spec says that it never does."""


class Undeclared(EngineError):
    """An actor sent a message that specs/system.toml doesn't list, or a job that nobody runs."""


class MailboxFull(EngineError):
    """A bounded mailbox with the policy `reject` has no room."""

    http_status = 503
    kind = "service_unavailable_error"


class ActorFailed(EngineError):
    """The actor that was asked has ended with an error."""


class DeadlinePassed(EngineError):
    """An answer didn't come within its deadline."""


class BadMessage(EngineError):
    """Bytes on a link that aren't a message of the receiver's union."""


class LinkRefused(EngineError):
    """The two ends of a link were built from different versions or specs."""


class PagesExhausted(EngineError):
    """The pool can't give the wanted pages now; retry when a request ends."""


class PageAccounting(EngineError):
    """A page was freed twice, freed by a stranger, or lost: a fault of the engine (I10)."""


class ShapeMismatch(EngineError):
    """A tensor's shape or type differs from what its consumer declared; names slot and both shapes."""


class CollectiveFailed(EngineError):
    """Ranks couldn't do together what all of them must do; the rank that gets it ends."""


class DeviceFailed(EngineError):
    """The device thread ended with an error; the rank can't go on."""


class ExchangeError(EngineError):
    """Ranks can't agree any more; the rank that gets it ends.

    rank   who found the fault; another rank than the one that raises: that one told it
    epoch  of the fault where it has one; -1: not known
    """

    def __init__(self, message: str, rank: int = -1, epoch: int = -1) -> None:
        super().__init__(message)
        self.rank = rank
        self.epoch = epoch


class ExchangeAbi(ExchangeError):
    """The two ends were built with different layouts."""


class ExchangeGeometry(ExchangeError):
    """The two ends disagree about ranks, channels or values."""


class ExchangeSession(ExchangeError):
    """The session id is malformed, or the object of that name is somebody else's."""


class ExchangeOwned(ExchangeError):
    """The session or the place in it is taken, by a live process or by the remains of a dead one."""


class ExchangeForked(ExchangeError):
    """A child process used its parent's exchange."""


class ExchangeTimeout(ExchangeError):
    """A peer didn't answer in time."""


class PeerDead(ExchangeError):
    """A peer's process is gone."""


class PeerReplaced(ExchangeError):
    """Another process has a peer's place or process id."""


class SequenceDiverged(ExchangeError):
    """Two ranks are in different rounds, or one published out of turn."""


class ExchangeClosed(ExchangeError):
    """A peer, or this rank, has left in good order."""


class ExchangeSyscall(ExchangeError):
    """The system refused memory or a file; the message has its reason."""


class GrammarRefused(EngineError):
    """The grammar library can't compile the client's grammar; remembered for a while."""

    http_status = 400
    kind = "invalid_request_error"


class GrammarTimedOut(EngineError):
    """A grammar was not compiled within its time; retry later, or ask for less. Never remembered."""

    http_status = 408
    kind = "timeout_error"


class GrammarFailed(EngineError):
    """A grammar's compile worker crashed, or its stored form can't be trusted: this request's failure."""


class GrammarDiverged(EngineError):
    """Mask and matcher disagree about a token: a fault of the engine; the request fails."""


class StoreCorrupt(EngineError):
    """An entry of the grammar store isn't what was written, or stands for something else. It is kept."""


class StoreUnusable(ConfigError):
    """The folder of the grammar store can't be used, or others may write to it; the server doesn't start."""


class CostTableUnreadable(ConfigError):
    """The file with the costs of steps isn't what `bench cost-table` writes; the server doesn't start."""
