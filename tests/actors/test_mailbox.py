"""Order, bounds, policies and the priority lane of a mailbox."""

from __future__ import annotations

import anyio
import pytest

from engine.actors.mailbox import Mailbox
from engine.actors.merge import merge_of
from engine.errors import MailboxFull
from engine.messages import Abort, Snapshot, Stop

pytestmark = pytest.mark.anyio


def snapshot(rank: int, running: int) -> Snapshot:
    return Snapshot(rank, 0.0, "running", running, 0, 0, 0, 0, 0)


async def test_take_hands_over_all_in_order_of_arrival() -> None:
    box = Mailbox("a", 8, "reject")
    for number in range(5):
        box.tell(number)
    assert await box.take() == [0, 1, 2, 3, 4]
    assert len(box) == 0


async def test_a_stop_overtakes_a_full_mailbox() -> None:
    box = Mailbox("a", 2, "reject")
    box.tell(1)
    box.tell(2)
    box.tell(Stop("now"))
    assert await box.take() == [Stop("now"), 1, 2]


async def test_take_waits_for_the_first_message() -> None:
    box = Mailbox("a", 2, "reject")
    taken = []

    async def reader() -> None:
        taken.append(await box.take())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(reader)
        await anyio.wait_all_tasks_blocked()
        assert taken == []
        box.tell("x")
    assert taken == [["x"]]


async def test_reject_refuses_with_the_numbers_and_counts() -> None:
    box = Mailbox("ingress", 1, "reject")
    box.tell(1)
    with pytest.raises(MailboxFull, match="ingress holds 1 of 1 messages; a Abort was refused"):
        box.tell(Abort(7))
    assert await box.take() == [1]
    assert (box.stats.taken, box.stats.refused, box.stats.depth_max) == (1, 1, 1)


async def test_an_edges_flood_leaves_room_for_actors_and_theirs_is_bounded_too() -> None:
    box = Mailbox("ingress", 1, "reject")
    box.tell(1)
    await box.offer(2)
    with pytest.raises(MailboxFull, match="ingress holds 2 of 2 messages"):
        await box.offer(3)
    assert await box.take() == [1, 2]


async def test_wait_lets_a_sender_in_when_there_is_room_and_loses_nothing() -> None:
    box = Mailbox("a", 2, "wait")
    heard: list[int] = []

    async def sender() -> None:
        for number in range(100):
            await box.offer(number)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sender)
        while len(heard) < 100:
            heard += await box.take()
    assert heard == list(range(100))
    assert box.stats.depth_max == 2


async def test_merge_keeps_the_newest_of_each_key_in_the_place_of_the_older() -> None:
    box = Mailbox("health", 2, "merge", merge_of(["Snapshot"]))
    for running in (1, 2, 3):
        for rank in (0, 1):
            box.tell(snapshot(rank, running))
    assert await box.take() == [snapshot(0, 3), snapshot(1, 3)]
    assert box.stats.merged == 4


async def test_merge_refuses_what_joins_nothing() -> None:
    box = Mailbox("health", 1, "merge", merge_of(["Snapshot"]))
    box.tell(snapshot(0, 1))
    with pytest.raises(MailboxFull):
        box.tell(snapshot(1, 1))


async def test_an_ended_owner_holds_up_no_sender() -> None:
    box = Mailbox("a", 1, "wait")
    box.tell(1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(box.offer, 2)
        await anyio.wait_all_tasks_blocked()
        box.close()
    box.tell(3)
    assert box.stats.late == 3


async def test_messages_that_were_put_back_come_before_later_ones() -> None:
    box = Mailbox("a", 8, "reject")
    for number in range(4):
        box.tell(number)
    taken = await box.take()
    box.tell(4)
    box.put_back(taken[1:])
    assert await box.take() == [1, 2, 3, 4]


async def test_an_actor_that_feeds_itself_starves_nobody() -> None:
    box = Mailbox("a", 8, "reject")
    turns = 0

    async def feeds_itself() -> None:
        box.tell("again")
        while True:
            await box.take()
            box.tell("again")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(feeds_itself)
        for _ in range(10):
            await anyio.lowlevel.checkpoint()
            turns += 1
        tasks.cancel_scope.cancel()
    assert turns == 10
