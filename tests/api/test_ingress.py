"""Ingress's core: whole groups, limits, routes, rank death and draining."""

from __future__ import annotations

import pytest

from engine.actors.core import Reply, Send
from engine.actors.ingress import Ingress
from engine.errors import BadRequest, EngineError, NotServing, QueueFull, Unexpected
from engine.messages import (
    FAILED,
    LENGTH,
    Abort,
    Accepted,
    Drain,
    Drained,
    Ended,
    Enqueue,
    Entry,
    RankDown,
    RankUp,
    RequestFailed,
    Sampling,
    Stop,
    SubmitBatch,
    Watch,
)


def group(size: int, route: int = -1, rid: str = "") -> Enqueue:
    """A group of `size` entries of one HTTP request."""
    entry = Entry(sink=0, prompt=b"\0\0\0\0", sampling=Sampling(max_new_tokens=1), rid=rid)
    return Enqueue(tuple(entry for _ in range(size)), route, slot="slot")


def mixed(*routes: int) -> Enqueue:
    """Prompts that demand a rank each, -1 for none."""
    entries = (Entry(sink=0, prompt=b"\0\0\0\0", sampling=Sampling(1), route=route) for route in routes)
    return Enqueue(tuple(entries), slot="slot")


def completions(count: int) -> Enqueue:
    """Completions of one prompt."""
    entries = (Entry(sink=0, prompt=b"\0\0\0\0", sampling=Sampling(1), child=child) for child in range(count))
    return Enqueue(tuple(entries), slot="slot")


def serving(ranks: int = 1, limit: int = 4) -> Ingress:
    """An ingress whose ranks are all live."""
    core = Ingress(ranks, limit)
    for rank in range(ranks):
        core.receive(RankUp(rank))
    return core


def accepted(core: Ingress, msg: Enqueue) -> tuple[int, ...]:
    """The ids that the group got."""
    (reply,) = [effect for effect in core.receive(msg) if isinstance(effect, Reply)]
    assert isinstance(reply.value, Accepted), reply.value
    return reply.value.ids


def refused(core: Ingress, msg: Enqueue) -> EngineError:
    """The error of a refusal that left no trace."""
    before = core.snapshot()
    (reply,) = core.receive(msg)
    assert isinstance(reply, Reply)
    assert isinstance(reply.value, EngineError)
    assert core.snapshot() == before
    return reply.value


def test_a_routed_group_reaches_its_rank_whole_in_one_message_after_its_watches() -> None:
    """I3."""
    core = serving(ranks=2)
    effects = core.receive(group(3, route=1))
    sends = [effect for effect in effects if isinstance(effect, Send)]
    assert [type(send.msg) for send in sends] == [Watch, Watch, Watch, SubmitBatch]
    assert [item.request_id for item in sends[-1].msg.items] == [1, 2, 3]
    assert core.groups_are_whole()


def test_a_group_that_does_not_fit_whole_is_refused_whole() -> None:
    core = serving(limit=4)
    accepted(core, group(2))
    assert isinstance(refused(core, group(3)), QueueFull)
    accepted(core, group(2))
    assert core.loads_are_within_limits()


def test_unrouted_prompts_go_to_the_least_loaded_rank_each_and_their_completions_stay_together() -> None:
    core = serving(ranks=2, limit=8)
    accepted(core, group(3))
    accepted(core, group(1))
    assert core.loads == {0: 2, 1: 2}
    accepted(core, completions(3))
    assert core.loads == {0: 5, 1: 2}
    assert core.groups_are_whole()


def test_a_mixed_group_reaches_each_demanded_rank_in_one_message() -> None:
    core = serving(ranks=2, limit=8)
    effects = core.receive(mixed(1, 0, 1, -1))
    sent = {
        effect.to: [item.request_id for item in effect.msg.items]
        for effect in effects
        if isinstance(effect, Send) and isinstance(effect.msg, SubmitBatch)
    }
    assert sent == {"rank1": [1, 3], "rank0": [2, 4]}
    reply = effects[-1]
    assert isinstance(reply, Reply)
    assert reply.value == Accepted((1, 2, 3, 4), (1, 0, 1, 0))


def test_a_mixed_group_of_which_one_part_does_not_fit_is_refused_whole() -> None:
    core = serving(ranks=2, limit=2)
    accepted(core, mixed(1, 1))
    assert isinstance(refused(core, mixed(0, 1)), QueueFull)
    assert isinstance(refused(core, mixed(0, 5)), BadRequest)
    accepted(core, mixed(0, 0))


def test_a_demanded_rank_is_used_or_refused() -> None:
    core = serving(ranks=2)
    accepted(core, group(1, route=1))
    assert core.loads == {0: 0, 1: 1}
    assert isinstance(refused(core, group(1, route=2)), BadRequest)
    assert isinstance(refused(core, group(1, route=-2)), BadRequest)
    core.receive(RankDown(1))
    assert isinstance(refused(core, group(1, route=1)), NotServing)
    assert isinstance(refused(core, group(1, route=0)), NotServing)


def test_a_live_rid_is_refused_and_free_again_afterwards() -> None:
    core = serving()
    (first,) = accepted(core, group(1, rid="mine"))
    assert isinstance(refused(core, group(1, rid="mine")), BadRequest)
    core.receive(Ended(first, LENGTH))
    accepted(core, group(1, rid="mine"))


def test_the_death_of_a_rank_fails_every_request_at_once_since_no_step_can_be_agreed() -> None:
    core = serving(ranks=2)
    ids = (*accepted(core, group(2, route=0)), *accepted(core, group(2, route=1)))
    sends = [effect for effect in core.receive(RankDown(0, "killed")) if isinstance(effect, Send)]
    failed = [send.msg for send in sends if send.to == "detok"]
    assert [(msg.request_id, msg.reason) for msg in failed] == [(request, FAILED) for request in ids]
    assert all(isinstance(msg, RequestFailed) and "killed" in msg.message for msg in failed)
    assert [(send.to, send.msg) for send in sends if send.to != "detok"] == [
        ("rank1", Abort(request)) for request in ids[2:]
    ]


def test_requests_are_refused_until_every_rank_is_live() -> None:
    core = Ingress(2, 4)
    core.receive(RankUp(1))
    assert "rank 0 is not live" in str(refused(core, group(1, route=1)))
    core.receive(RankUp(0))
    accepted(core, group(1, route=1))


def test_without_a_live_rank_requests_are_refused_with_503() -> None:
    core = Ingress(1, 4)
    assert refused(core, group(1)).http_status == 503
    core.receive(RankUp(0))
    core.receive(RankDown(0))
    assert refused(core, group(1)).http_status == 503


def test_an_abort_reaches_rank_and_detokenizer_while_the_request_lives() -> None:
    core = serving()
    (request,) = accepted(core, group(1))
    assert core.receive(Abort(request)) == [Send("rank0", Abort(request)), Send("detok", Abort(request))]
    core.receive(Ended(request, LENGTH))
    assert core.receive(Abort(request)) == []


def test_draining_refuses_new_requests_and_reports_the_last_end() -> None:
    core = serving()
    first, second = accepted(core, group(2))
    assert core.receive(Drain()) == []
    assert refused(core, group(1)).http_status == 503
    assert core.receive(Ended(first, LENGTH)) == []
    assert core.receive(Ended(second, LENGTH)) == [Send("shutdown", Drained())]


def test_draining_an_idle_server_is_reported_at_once() -> None:
    assert serving().receive(Drain()) == [Send("shutdown", Drained())]


def test_stop_ends_every_request() -> None:
    core = serving()
    request, _ = accepted(core, group(2))
    told = [effect.msg for effect in core.receive(Stop()) if isinstance(effect, Send)]
    assert [type(msg) for msg in told] == [Abort, RequestFailed, Abort, RequestFailed]
    assert core.receive(Ended(request, FAILED)) == []
    assert core.receive(Ended(request + 1, FAILED)) == [Send("detok", Stop("every request has ended"))]


def test_stop_of_an_idle_server_stops_the_detokenizer_at_once() -> None:
    assert serving().receive(Stop()) == [Send("detok", Stop("every request has ended"))]


def test_an_end_of_a_request_that_is_not_live_is_a_fault() -> None:
    with pytest.raises(Unexpected):
        serving().receive(Ended(7, LENGTH))
