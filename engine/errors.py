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


class DeviceMemory(EngineError):
    """The device hasn't the memory that the settings ask for; says what took it, and the largest lever."""


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


class DescriptorError(EngineError):
    """Memory of one process didn't reach another one; nothing of the attempt is left on either side.

    rank   who found the fault; another rank than the one that raises: that one told it
    """

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank


class DescriptorFrame(DescriptorError):
    """What arrived isn't a whole frame, or its checksum is wrong."""


class DescriptorVersion(DescriptorError):
    """The two ends speak different versions."""


class DescriptorSession(DescriptorError):
    """A frame is of another session, or for or of another rank."""


class DescriptorGeneration(DescriptorError):
    """A frame is of an earlier or later generation of the pool."""


class DescriptorKind(DescriptorError):
    """A descriptor or its frame isn't the kind of memory that was asked for."""


class DescriptorCount(DescriptorError):
    """A frame has not exactly one descriptor, or a batch not exactly the frames it was to have."""


class DescriptorTruncated(DescriptorError):
    """The system kept descriptors back: this process may open no more."""


class DescriptorDuplicate(DescriptorError):
    """A batch has the same index or the same memory twice."""


class DescriptorSize(DescriptorError):
    """Memory isn't as large as declared or expected."""


class DescriptorSpan(DescriptorError):
    """A span is misaligned, outside its pool, over another one, or not where it was expected."""


class DescriptorUnsealed(DescriptorError):
    """Host memory has other seals than those against resizing: its sender could pull it away."""


class DescriptorDevice(DescriptorError):
    """Memory is on another device than declared, or this process can't reach that device."""


class DescriptorForeign(DescriptorError):
    """The far end is another process, or another user's, than the one that was expected."""


class DescriptorPeerDead(DescriptorError):
    """The far end's process is gone."""


class DescriptorPeerReplaced(DescriptorError):
    """Another process speaks in the far end's place."""


class DescriptorForked(DescriptorError):
    """A child process used its parent's connection or memory."""


class DescriptorClosed(DescriptorError):
    """The far end has closed the connection, or this end has closed what is used."""


class DescriptorTimeout(DescriptorError):
    """The far end didn't answer in time."""


class DescriptorSyscall(DescriptorError):
    """The system refused; the message has its reason."""


class RegionInUse(DescriptorError):
    """Shared memory can't be given back while tensors or arrays of it live."""


class CudaCallFailed(DescriptorError):
    """A call of the CUDA driver failed; the message has its name, code and reason.

    call, code   as the driver has them
    """

    def __init__(self, message: str, call: str = "", code: int = 0) -> None:
        super().__init__(message)
        self.call = call
        self.code = code


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


class GrammarTooSlow(EngineError):
    """A grammar takes longer over a step's tokens than one request may hold up the others: it fails alone."""


class StoreCorrupt(EngineError):
    """An entry of the grammar store isn't what was written, or stands for something else. It is kept."""


class StoreUnusable(ConfigError):
    """The folder of the grammar store can't be used, or others may write to it; the server doesn't start."""


class CostTableUnreadable(ConfigError):
    """The file with the costs of steps isn't what `bench cost-table` writes; the server doesn't start."""
