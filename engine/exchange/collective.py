"""The exchange of any number of ranks on any hosts, over a process group of torch.distributed.

Every rank keeps a receive open to every peer, so that a rank without work hears what another one begins; a
gather, which returns only when all have joined, could not tell it. One message goes straight to each peer:
one hop, however many ranks. A thread a peer does the receiving, since a group's receives can't be asked
whether they are done.

The group is one of CPU memory (gloo), also where the ranks compute on devices: the values come from the host
and go to the host, and a receive that a device keeps open would occupy it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from typing import Any

import torch

from engine import errors
from engine.errors import ConfigError, ExchangeError
from engine.exchange import WORDS
from engine.exchange.collective_channel import FAILED, LEFT, VALUES, CollectiveChannel

Group = Any
"""A process group; torch gives it no public type."""

SLICE_S = 0.01
"""Deadlines of ranks that are silent are looked at so often."""

LEAVE_S = 0.5
"""How long the last words of a rank may take to get out."""

HEAD = 4

FAULTS: tuple[type[ExchangeError], ...] = (
    errors.ExchangeTimeout,
    errors.PeerDead,
    errors.SequenceDiverged,
)
"""What a rank can tell the others, by number."""


class CollectiveExchange:
    """The exchange of a group's ranks; made by all of them.

    group      as of `gloo.open_group`: its own timeout must be longer than any rest between rounds
    timeout_s  after a publication the peers must answer within this time
    raises     ConfigError where the group isn't one of CPU memory
    """

    def __init__(self, group: Group, timeout_s: float) -> None:
        if group.name() not in ("gloo", "mpi"):
            raise ConfigError(f"the exchange needs a CPU group, not {group.name()}")
        self.rank = group.rank()
        self.timeout_s = timeout_s
        ranks = range(group.size())
        self.peers = tuple(rank for rank in ranks if rank != self.rank)
        self.changed = threading.Condition()
        self.failure: ExchangeError | None = None
        self._group = group
        self._left: set[int] = set()
        self._closed = False
        self._sent: deque[tuple[torch.Tensor, list[Any]]] = deque()
        self._channels = tuple(CollectiveChannel(self, number) for number in range(len(WORDS)))
        self._threads = [
            threading.Thread(target=self._receive, args=(peer,), name=f"from rank {peer}", daemon=True)
            for peer in self.peers
        ]
        for thread in self._threads:
            thread.start()

    def channel(self, number: int, /) -> CollectiveChannel:
        """As Exchange.channel."""
        return self._channels[number]

    def wait(self) -> int:
        """As Exchange.wait."""
        while True:
            with self.changed:
                self.changed.wait_for(self._ready, SLICE_S)
                bits = 0
                for channel in self._channels:
                    if channel.armed and channel.arrived:
                        channel.armed = False
                        bits |= 1 << channel.number
            if bits:
                return bits
            for channel in self._channels:
                if not channel.arrived:
                    self.check(channel)

    def close(self) -> None:
        """As Exchange.close. Threads that hear nothing from a peer stay behind, without effect."""
        with self.changed:
            if self._closed:
                return
            self._closed = True
            self.changed.notify_all()
        if self.failure is None:
            self.send([LEFT, 0, 0, self.rank])
        self._flush()

    def _ready(self) -> bool:
        return self._closed or self.failure is not None or any(c.armed and c.arrived for c in self._channels)

    # -- what goes wrong -----------------------------------------------------------------------

    def fail(self, kind: type[ExchangeError], text: str, epoch: int = -1) -> ExchangeError:
        """The error to raise: this one, which every peer is told, or the one that came before it."""
        with self.changed:
            if self.failure is None:
                self.failure = kind(f"rank {self.rank}: {text}", self.rank, epoch)
                told = [FAILED, 0, epoch, self.rank, FAULTS.index(kind)]
            else:
                told = []
            self.changed.notify_all()
        if told:
            self.send(told)
        return self.failure

    def raise_failure(self) -> None:
        """raises ExchangeError where this rank has closed or the exchange has failed."""
        self.raise_closed()
        if self.failure is not None:
            raise self.failure

    def raise_closed(self) -> None:
        """raises ExchangeClosed where this rank has closed."""
        if self._closed:
            raise errors.ExchangeClosed(f"rank {self.rank} has left", self.rank)

    def check(self, channel: CollectiveChannel) -> None:
        """raises ExchangeError where nothing can come on a channel any more, or came too late."""
        self.raise_failure()
        with self.changed:
            if channel.arrived:
                return
            owing, late = channel.owing(), time.monotonic() >= channel.deadline_s
        gone = self._left & (owing or set(self.peers))
        if gone:
            raise errors.ExchangeClosed(f"rank {self.rank}: rank {min(gone)} has left", min(gone))
        if late:
            text = f"ranks {sorted(owing)} didn't answer epoch {channel.published} in time"
            raise self.fail(errors.ExchangeTimeout, text, channel.published)

    # -- messages ------------------------------------------------------------------------------

    def send(self, message: list[int]) -> None:
        """To every peer. A send that isn't done keeps its buffer; all but the last two are done."""
        row = torch.zeros(HEAD + max(WORDS), dtype=torch.int64)
        row[: len(message)] = torch.tensor(message)
        works = []
        for peer in self.peers:
            # A peer that is gone is found, and named, where it is heard.
            with contextlib.suppress(RuntimeError):
                works.append(self._group.send([row], peer, 0))
        self._sent.append((row, works))
        if len(self._sent) > 2:
            self._sent.popleft()

    def _flush(self) -> None:
        """Waits until the last message is out, not for peers that take nothing.

        A group's own time-out would close its connections, and those peers would find this rank dead.
        """
        last = self._sent[-1][1] if self._sent else []
        waits = [threading.Thread(target=_wait, args=(work,), daemon=True) for work in last]
        until_s = time.monotonic() + LEAVE_S
        for thread in waits:
            thread.start()
        for thread in waits:
            thread.join(max(0.0, until_s - time.monotonic()))

    def _receive(self, peer: int) -> None:
        row = torch.zeros(HEAD + max(WORDS), dtype=torch.int64)
        kind = VALUES
        while kind == VALUES:
            try:
                self._group.recv([row], peer, 0).wait()
            except (RuntimeError, ValueError) as error:
                if not self._closed:
                    self.fail(errors.PeerDead, f"rank {peer} is gone ({error})")
                return
            kind, number, epoch, src, *values = row.tolist()
            with self.changed:
                if kind == VALUES:
                    self._channels[number].arrived.append((epoch, src, tuple(values[: WORDS[number]])))
                elif kind == LEFT:
                    self._left.add(src)
                elif self.failure is None:
                    fault = FAULTS[values[0]]
                    text = f"rank {self.rank}: {fault.__name__}, told by rank {src}"
                    self.failure = fault(text, src, epoch)
                self.changed.notify_all()


def _wait(work: Any) -> None:
    with contextlib.suppress(RuntimeError):
        work.wait()
