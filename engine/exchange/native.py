"""The exchange of two ranks on one host, in C; the page and the protocol are in engine/native/exchange.h.

Why an extension: a publication and the taking of an answer, from Python to Python, cost 2.4 us of calls with
ctypes and 0.96 us with cffi around C functions that do nothing; the extension takes 0.22 us with the protocol
in it (same machine, best of fifteen).
"""

from __future__ import annotations

import importlib
import os
import secrets
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

from engine import errors
from engine.errors import ConfigError, ExchangeError
from engine.exchange import WORDS, Channel

SHARED_MEMORY = Path("/dev/shm")
ATTACH_S = 60.0
"""The other rank's process must have begun within this time."""

KINDS: tuple[tuple[type[ExchangeError], str], ...] = (
    (ExchangeError, "no fault"),
    (errors.ExchangeAbi, "the other rank was built with another layout"),
    (errors.ExchangeGeometry, "ranks, channels or values don't fit"),
    (errors.ExchangeSession, "the session id is malformed, or the object belongs to another session or user"),
    (errors.ExchangeOwned, "the session, or the rank's place in it, is taken"),
    (errors.ExchangeForked, "a child process used its parent's exchange"),
    (errors.ExchangeTimeout, "the other rank didn't answer in time"),
    (errors.PeerDead, "the other rank's process is gone"),
    (errors.PeerReplaced, "another process has the other rank's place"),
    (errors.SequenceDiverged, "the ranks are in different rounds, or one published out of turn"),
    (errors.ExchangeClosed, "a rank has left"),
    (errors.ExchangeSyscall, "the system refused"),
)
"""By failure code of the C side."""


class _Pair(Protocol):
    def channel(self, number: int, /) -> Channel: ...
    def wait(self) -> int: ...
    def close(self) -> None: ...


class _Library(Protocol):
    PREFIX: str
    BOUNDS_NS: tuple[int, ...]

    def open(
        self,
        session: str,
        rank: int,
        attach_ns: int,
        timeout_ns: int,
        words: tuple[int, int],
        failed: Callable[[int, int, int, int, int], ExchangeError],
        /,
    ) -> _Pair: ...
    def is_stale(self, session: str, /) -> bool: ...


def new_session() -> str:
    """An id that no session had before; one for each pair of ranks, made by their launcher."""
    return secrets.token_hex(16)


def library() -> _Library:
    """The C part. raises ConfigError where it isn't built; there is no other way to do its work."""
    try:
        return cast(_Library, importlib.import_module("engine.native._exchange"))
    except ImportError as error:
        raise ConfigError(
            f"the native exchange isn't built ({error}); it needs Linux and `make setup`"
        ) from error


def remove(session: str) -> bool:
    """Unlinks what a session left behind; for its launcher, when both ranks have ended. True: there was some.

    Only a rank that was killed before its peer had begun leaves anything.
    """
    try:
        (SHARED_MEMORY / (library().PREFIX.lstrip("/") + session)).unlink()
    except FileNotFoundError:
        return False
    return True


def remove_stale() -> list[str]:
    """Unlinks the objects of dead sessions, which nobody would ever use again; returns their sessions."""
    lib = library()
    prefix = lib.PREFIX.lstrip("/")
    found = [path.name.removeprefix(prefix) for path in SHARED_MEMORY.glob(f"{prefix}*")]
    return [session for session in found if lib.is_stale(session) and remove(session)]


class NativeExchange:
    """The exchange of rank 0 and rank 1; made by both, it is ready when both have made it.

    session    of `new_session`, the same on both sides
    timeout_s  after a publication the peer must answer within this time; positive
    attach_s   the peer must appear within this time
    raises     ExchangeError, ConfigError
    """

    def __init__(self, session: str, rank: int, timeout_s: float, attach_s: float = ATTACH_S) -> None:
        self.rank = rank
        self.peers = (1 - rank,)
        self._pair = library().open(
            session, rank, round(attach_s * 1e9), round(timeout_s * 1e9), WORDS, partial(_failure, rank)
        )
        self._channels = tuple(self._pair.channel(number) for number in range(len(WORDS)))

    def channel(self, number: int) -> Any:
        """As Exchange.channel: the C object itself, also with `timings()`."""
        return self._channels[number]

    def wait(self) -> int:
        """As Exchange.wait; gives up the interpreter lock."""
        return self._pair.wait()

    def close(self) -> None:
        """As Exchange.close; waits for `wait` to end."""
        self._pair.close()


def _failure(own: int, code: int, rank: int, channel: int, error_number: int, seq: int) -> ExchangeError:
    kind, text = KINDS[code]
    reason = f": {os.strerror(error_number)}" if error_number else ""
    told = f", told by rank {rank}" if rank != own else ""
    where = f" in epoch {seq - 1} of channel {channel}" if seq else ""
    return kind(f"rank {own}{where}: {text}{reason}{told}", rank, seq - 1)
