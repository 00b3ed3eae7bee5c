"""A rank whose peer has left in good order learns of it when it wants something of it, and not before."""

from __future__ import annotations

import sys
from typing import Any

import anyio
import pytest

from engine.actors.timers import Timers
from engine.exchange import STEP
from engine.exchange.meter import ExchangeMeter
from engine.messages import Message, Peer, PeerDown
from engine.peers import ExchangeRef
from tests.native.test_lines import WANTS, Side, pair

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the native exchange is Linux's"),
    pytest.mark.anyio,
]


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return ("asyncio", {"use_uvloop": True})


class Core:
    """Keeps what a rank's core is told."""

    def __init__(self) -> None:
        self.told: list[Message] = []

    def tell(self, msg: Message) -> None:
        self.told.append(msg)

    async def offer(self, msg: Message) -> None:
        self.tell(msg)


async def test_a_want_that_nobody_is_left_to_answer_comes_back_as_the_loss_of_the_peer() -> None:
    """Both have answered round 0, so that the peer owes nothing when it goes."""
    core: Any = Core()
    timers, (own, other) = Timers(), pair(60.0)
    ref = ExchangeRef(core, ExchangeMeter())
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(timers.run)
            peer, ended = Side(other, timers), anyio.Event()

            async def run() -> None:
                await ref.run(lambda: own, timers)
                ended.set()

            tasks.start_soon(run)
            async with anyio.create_task_group() as peers:
                peers.start_soon(peer.run)
                await ref.ready.wait()
                ref.tell(Peer(0, 0, WANTS))
                peer.lines.offer(STEP, 0, WANTS)
                while core.told != [Peer(0, 1, WANTS)]:
                    await anyio.sleep(0.001)
                peers.cancel_scope.cancel()
            await ended.wait()
            assert core.told == [Peer(0, 1, WANTS)]
            ref.tell(Peer(1, 0, WANTS))
            (lost,) = core.told[1:]
            assert isinstance(lost, PeerDown)
            assert (lost.src, lost.kind) == (-1, "ExchangeClosed")
            assert "none answers in epoch 1" in lost.reason
            tasks.cancel_scope.cancel()
