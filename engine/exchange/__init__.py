"""How ranks tell each other what they want of a step, and nothing else.

Two ways, one interface (`Exchange`), equal results: `NativeExchange` for two ranks of one host, chosen by an
explicit flag and then without any other way out, and `CollectiveExchange` for any number of ranks and hosts.

How a rank process wires it. The launcher makes one `new_session()` for each pair of ranks and gives it to
both. In the process of rank r, on its loop:

    exchange = NativeExchange(session, r, TIMEOUT_S)      # or CollectiveExchange(group, TIMEOUT_S)
    lines = PeerLines(exchange, {STEP: lambda heard: mailbox.tell(Peer(*heard))}, process.timers)
    tasks.start_soon(lines.run)

The core emits `Send("rankK", Peer(epoch, r, values))` once for each peer. What stands in `process.refs` under
those names calls `lines.offer(STEP, msg.epoch, msg.values)` once an epoch: a publication reaches every peer.
An arrival is told to the core as `Peer(epoch, src, values)`, wherever it was heard; one of the next epoch may
come before this rank is done with its own, and before a third rank's (the core calls it early). An error of
`offer` or of `run` is an `ExchangeError`, and ends the rank.

The path of a round: `offer` publishes and looks for the answer for at most 50 us on the loop, which is all
that happens while ranks keep pace. Later answers come by a waiter thread, which posts to the loop.
"""

from __future__ import annotations

from typing import Protocol

STEP, TIER = 0, 1
"""Channels: the wants of a step (7 values), the tier of its verification (1 value)."""

WORDS = (7, 1)
"""Values of one publication, by channel."""

Heard = tuple[int, int, tuple[int, ...]]
"""What a peer published: epoch, rank, values; the fields of `Peer`."""


class Channel(Protocol):
    """One kind of values, with epochs of its own; used by the loop's thread alone.

    Epochs grow. A rank publishes an epoch after it has taken every peer's values of the one before, so that a
    peer is at most one epoch ahead. An epoch that isn't the peer's is SequenceDiverged.
    """

    def publish(self, epoch: int, values: tuple[int, ...], /) -> None:
        """Tells every peer; never waits. The peers' time begins. raises ExchangeError."""

    def poll(self, spin_ns: int = 0, /) -> Heard | None:
        """What a peer has published and this rank hasn't taken yet, looked for at most `spin_ns`.

        raises  ExchangeError; values that arrived before a peer died or left are taken first
        """

    def exchange(self, epoch: int, values: tuple[int, ...], spin_ns: int, /) -> Heard | None:
        """`publish`, then `poll`, in one call."""

    def arm(self) -> bool:
        """The next arrival ends `Exchange.wait`. True: one is here already, nothing was armed. Idempotent."""


class Exchange(Protocol):
    """All channels of a rank."""

    @property
    def peers(self) -> tuple[int, ...]:
        """The other ranks."""

    def channel(self, number: int, /) -> Channel:
        """STEP or TIER."""

    def wait(self) -> int:
        """Sleeps until an armed channel has an arrival, for one thread of its own; bits of those channels.

        They aren't armed any more. raises ExchangeError: a peer's death and a passed deadline are found here,
        too, also while nothing is armed.
        """

    def close(self) -> None:
        """Leaves in good order, ends `wait` on both sides with ExchangeClosed. Idempotent."""
