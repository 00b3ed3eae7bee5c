"""A rank's channels on its event loop: answered in line where peers keep pace, else by way of a thread."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Mapping
from functools import partial

import anyio

from engine.actors.device import loop_poster, name_thread
from engine.actors.timers import Timers
from engine.errors import ExchangeClosed, ExchangeError
from engine.exchange import Exchange, Heard

INLINE_NS = 50_000
"""How long the loop itself looks for an answer, with the interpreter lock held where the exchange is native.

An answer by way of a thread takes longer than that anyway.
"""

LISTEN_AFTER_S = 0.001
"""A rank that published nothing for so long is woken by what a peer begins.

Sooner would cost a pair that keeps pace a system call a round, and a peer's step takes longer in any case. It
is also the least that uvloop's timers know.
"""


class _Line:
    """A channel with what the loop knows of it.

    owed   answers to the last offer that aren't here
    early  arrivals that the next offer will answer
    """

    def __init__(self, exchange: Exchange, number: int, deliver: Callable[[Heard], None]) -> None:
        channel = exchange.channel(number)
        self.exchange, self.publish = channel.exchange, channel.publish
        self.poll, self.arm = channel.poll, channel.arm
        self.deliver = deliver
        self.peers = len(exchange.peers)
        self.offered = -1
        self.owed = 0
        self.early = 0
        self.timed = False

    def take(self, heard: Heard) -> None:
        """Delivers an arrival."""
        if heard[0] > self.offered:
            self.early += 1
        else:
            self.owed -= 1
        self.deliver(heard)

    def take_all(self) -> None:
        """Delivers what has arrived.

        raises  ExchangeError; a peer that left owing nothing is none: its last words end this rank, too
        """
        try:
            while (heard := self.poll(0)) is not None:
                self.take(heard)
        except ExchangeClosed:
            if self.owed:
                raise

    def listen(self) -> None:
        """Delivers what has arrived; the next arrival wakes the waiter. raises ExchangeError."""
        while self.arm():
            self.take_all()


class PeerLines:
    """Offers and deliveries of a rank. `run` must be running for anything to be heard without an offer.

    deliver  by channel: called on the loop with each arrival; must not raise
    timers   of the process
    """

    def __init__(
        self, exchange: Exchange, deliver: Mapping[int, Callable[[Heard], None]], timers: Timers
    ) -> None:
        self._exchange = exchange
        self._timers = timers
        self._lines = {number: _Line(exchange, number, act) for number, act in deliver.items()}
        self._error: ExchangeError | None = None
        self._ended = anyio.Event()
        self._post: Callable[..., object] | None = None

    def offer(self, number: int, epoch: int, values: tuple[int, ...]) -> None:
        """Publishes on a channel, then delivers what peers answer within 50 us; later answers come by `run`.

        raises  ExchangeError
        """
        # Every frame of Python is a tenth of a round between ranks that keep pace: there is one here.
        line = self._lines[number]
        owed = line.peers - line.early
        if owed:
            heard = line.exchange(epoch, values, INLINE_NS)
        else:
            # Every answer is here already: what could come now belongs to the next round.
            line.publish(epoch, values)
            heard = None
        line.offered = epoch
        line.early = 0
        if heard is None:
            line.owed = owed
        elif heard[0] > epoch:
            line.owed, line.early = owed, 1
            line.deliver(heard)
        else:
            line.owed = owed - 1
            line.deliver(heard)
        if line.owed or not line.timed:
            self._await_more(line)

    async def run(self) -> None:
        """Hears peers until the task is cancelled or every peer has left in good order. raises ExchangeError.

        Closes the exchange: its end is the end of this rank's part in it.
        """
        post, context = loop_poster(), contextvars.copy_context()
        # Posted calls arm timers, which ask for the loop: only this task's context knows it.
        self._post = partial(post, context.run, self._guarded)
        thread = threading.Thread(target=self._work, name="peers", daemon=True)
        thread.start()
        try:
            for line in self._lines.values():
                line.listen()
            await self._ended.wait()
        finally:
            self._exchange.close()
            thread.join()
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        name_thread("peers")
        assert self._post is not None
        # Without a loop the process is ending, and nobody is left to tell.
        with contextlib.suppress(RuntimeError):
            try:
                while True:
                    self._post(self._arrived, self._exchange.wait())
            except ExchangeError as error:
                self._post(self._lost, error)

    def _arrived(self, channels: int) -> None:
        for number, line in self._lines.items():
            if channels >> number & 1:
                line.take_all()
                self._await_more(line)

    def _lost(self, error: ExchangeError) -> None:
        """What arrived before the end counts."""
        if not isinstance(error, ExchangeClosed):
            raise error
        for line in self._lines.values():
            line.take_all()
        self._ended.set()

    def _await_more(self, line: _Line) -> None:
        """Listens at once where a peer owes an answer, else when the ranks come to rest."""
        if line.owed:
            line.listen()
        elif not line.timed:
            line.timed = True
            seen = line.offered
            self._timers.after(LISTEN_AFTER_S, lambda: self._guarded(self._rested, line, seen))

    def _rested(self, line: _Line, seen: int) -> None:
        line.timed = False
        if line.offered == seen:
            line.listen()
        else:
            self._await_more(line)

    def _guarded(self, act: Callable[..., None], *args: object) -> None:
        """Calls from the loop have nobody above them: `run` raises what goes wrong in them."""
        if self._ended.is_set():
            return
        try:
            act(*args)
        except ExchangeError as error:
            self._error = error
            self._ended.set()
