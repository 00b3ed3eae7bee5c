"""Shells: order, time-outs, effects, questions, failures."""

from __future__ import annotations

from types import ModuleType

import anyio
import pytest

from engine.actors.core import TimedOut
from engine.errors import ActorFailed, DeadlinePassed, MailboxFull, Unexpected
from engine.messages import Stop
from tests.actors.stage import failing_stage, stage_of

pytestmark = pytest.mark.anyio


async def test_messages_are_handled_in_the_order_of_arrival(echo: ModuleType) -> None:
    async with stage_of(echo) as stage:
        box = stage.start("a")
        for number in range(50):
            box.tell(echo.Note(number))
        await anyio.wait_all_tasks_blocked()
        assert [what for what, _ in stage.heard("a")] == list(range(50))


async def test_a_state_times_out_exactly_and_once(echo: ModuleType) -> None:
    async with stage_of(echo) as stage:
        box = stage.start("a")
        await anyio.sleep(1.0)
        began = anyio.current_time()
        box.tell(echo.Begin())
        await anyio.sleep(10)
        assert stage.heard("a") == [("late", pytest.approx(began + 0.2))]


async def test_entering_a_state_again_arms_its_timeout_anew(echo: ModuleType) -> None:
    async with stage_of(echo) as stage:
        box = stage.start("a")
        began = anyio.current_time()
        box.tell(echo.Begin())
        await anyio.sleep(0.15)
        box.tell(echo.Begin())
        await anyio.sleep(10)
        assert stage.heard("a") == [("late", pytest.approx(began + 0.35))]


async def test_leaving_a_state_drops_its_timeout(echo: ModuleType) -> None:
    async with stage_of(echo) as stage:
        box = stage.start("a")
        box.tell(echo.Begin())
        await anyio.sleep(0.1)
        box.tell(echo.Came())
        await anyio.sleep(10)
        assert stage.heard("a") == []
        assert len(stage.timers) == 0


async def test_a_timeout_that_was_overtaken_in_the_mailbox_is_ignored(echo: ModuleType) -> None:
    async with stage_of(echo) as stage:
        box = stage.start("a")
        box.tell(echo.Begin())
        await anyio.wait_all_tasks_blocked()
        entry = stage.cores["a"][0].entry
        box.tell(echo.Came())
        await anyio.wait_all_tasks_blocked()
        box.tell_first(TimedOut(entry))
        await anyio.wait_all_tasks_blocked()
        assert stage.heard("a") == []
        assert stage.failed == []


async def test_a_send_reaches_the_named_actor(echo: ModuleType) -> None:
    async with stage_of(echo) as stage:
        box = stage.start("a")
        stage.start("b")
        box.tell(echo.Pass("b", 7))
        await anyio.wait_all_tasks_blocked()
        assert [what for what, _ in stage.heard("b")] == [7]


async def test_a_slow_receiver_holds_up_its_sender_and_nobody_else(echo: ModuleType) -> None:
    async with stage_of(echo) as stage:
        sender = stage.start("sender")
        other = stage.start("other")
        slow = stage.start("slow", size=1, full="wait")
        slow.tell(echo.Note(0))
        for number in (1, 2, 3):
            sender.tell(echo.Pass("slow", number))
        answer = await stage.asks.ask(other, echo.Ping(5), within_s=0.5)
        await anyio.wait_all_tasks_blocked()
        assert answer == 5
        assert [what for what, _ in stage.heard("slow")] == [0, 1, 2, 3]
        assert slow.stats.waited > 0


async def test_a_send_that_the_system_description_doesnt_list_ends_the_actor(echo: ModuleType) -> None:
    async with failing_stage(echo) as stage:
        stage.start("a").tell(echo.Pass("secret", 1))
    assert "doesn't let a send Note to secret" in str(stage.causes[0])


async def test_an_ask_gets_its_own_reply(echo: ModuleType) -> None:
    async with stage_of(echo) as stage:
        box = stage.start("a")
        answers: dict[int, int] = {}

        async def asker(value: int) -> None:
            answers[value] = await stage.asks.ask(box, echo.Ping(value), within_s=1)

        async with anyio.create_task_group() as askers:
            for value in range(20):
                askers.start_soon(asker, value)
        assert answers == {value: value for value in range(20)}


async def test_an_ask_without_reply_ends_at_its_deadline(echo: ModuleType) -> None:
    async with stage_of(echo) as stage:
        box = stage.start("a")
        began = anyio.current_time()
        with pytest.raises(DeadlinePassed, match=r"a gave no answer to Ping within 0\.5 s"):
            await stage.asks.ask(box, echo.Ping(-1), within_s=0.5)
        assert anyio.current_time() == pytest.approx(began + 0.5)


async def test_a_late_reply_is_dropped_and_counted(echo: ModuleType) -> None:
    async with stage_of(echo) as stage:
        stage.asks.reply(99, "nobody asked")
        assert stage.asks.late == 1


async def test_a_failure_is_reported_with_state_message_error_and_record(echo: ModuleType) -> None:
    async with failing_stage(echo) as stage:
        box = stage.start("a")
        box.tell(echo.Note(1))
        box.tell(echo.Begin())
        box.tell(echo.Poison())
    assert isinstance(stage.causes[0], ActorFailed)
    (report,) = stage.reports
    assert report.startswith("actor a failed in state waiting on Poison(): ValueError('poisoned')")
    assert "idle Note" in report
    assert "idle Begin" in report
    (failed,) = stage.failed
    assert (failed.name, failed.state, failed.message) == ("a", "waiting", "Poison()")


async def test_an_asker_of_a_failed_actor_hears_of_it_at_once(echo: ModuleType) -> None:
    async with stage_of(echo) as stage:
        box = stage.start("a", restart="once", within_s=5)
        began = anyio.current_time()

        async def asker() -> None:
            with pytest.raises(ActorFailed, match="poisoned"):
                await stage.asks.ask(box, echo.Ping(-1), within_s=60)

        async with anyio.create_task_group() as askers:
            askers.start_soon(asker)
            await anyio.wait_all_tasks_blocked()
            box.tell(echo.Poison())
        assert anyio.current_time() == began


async def test_whoever_asks_an_actor_that_has_failed_for_good_doesnt_wait(echo: ModuleType) -> None:
    async with failing_stage(echo) as stage:
        box = stage.start("a")
        box.tell(echo.Poison())
    with pytest.raises(ActorFailed):
        await stage.asks.ask(box, echo.Ping(1), within_s=60)


async def test_a_poison_message_is_not_delivered_again_but_those_behind_it_are(echo: ModuleType) -> None:
    async with stage_of(echo) as stage:
        box = stage.start("a", restart="once", within_s=5)
        box.tell(echo.Poison())
        box.tell(echo.Note(1))
        box.tell(echo.Note(2))
        await anyio.wait_all_tasks_blocked()
        assert len(stage.cores["a"]) == 2
        assert [what for what, _ in stage.heard("a")] == [1, 2]


async def test_a_second_failure_within_the_time_is_final(echo: ModuleType) -> None:
    async with failing_stage(echo) as stage:
        box = stage.start("a", restart="once", within_s=5)
        box.tell(echo.Poison())
        await anyio.sleep(4)
        box.tell(echo.Poison())
    assert len(stage.failed) == 2


async def test_a_second_failure_after_the_time_is_forgiven(echo: ModuleType) -> None:
    async with stage_of(echo) as stage:
        box = stage.start("a", restart="once", within_s=5)
        box.tell(echo.Poison())
        await anyio.sleep(6)
        box.tell(echo.Poison())
        box.tell(echo.Note(3))
        await anyio.wait_all_tasks_blocked()
        assert [what for what, _ in stage.heard("a")] == [3]


async def test_an_unanswered_event_is_a_failure_and_leaves_the_state_as_it_was(echo: ModuleType) -> None:
    async with failing_stage(echo) as stage:
        stage.start("a").tell(echo.Came())
    assert isinstance(stage.causes[0].__cause__, Unexpected)
    assert stage.cores["a"][0].state == "idle"


async def test_an_actor_that_stopped_takes_nothing_and_holds_up_nobody(echo: ModuleType) -> None:
    async with stage_of(echo) as stage:
        box = stage.start("a", size=1, full="wait")
        box.tell(Stop("enough"))
        await anyio.wait_all_tasks_blocked()
        for number in range(3):
            await box.offer(echo.Note(number))
        assert box.stats.late == 3


async def test_an_edge_meets_a_full_mailbox_as_an_error(echo: ModuleType) -> None:
    async with stage_of(echo) as stage:
        box = stage.start("a", size=1)
        box.tell(echo.Note(1))
        with pytest.raises(MailboxFull):
            await stage.asks.ask(box, echo.Ping(1), within_s=1)
