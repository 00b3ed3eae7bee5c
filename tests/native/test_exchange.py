"""Two real processes over the real shared memory: equal rounds, or one named error on both sides, in time."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.exchange.native import new_session, remove, remove_stale
from tests.native.pairs import SHARED_MEMORY, Pool, Process, objects, steps

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the native exchange is Linux's")
TIMEOUT_S = 60.0
SHORT_S = 3.0
"""Of faults that only a time-out finds; long enough for a busy machine to keep pace before them."""

SLACK_S = 20.0
"""What a busy machine may add before a test calls an error late. Far less than TIMEOUT_S."""

FAULTS = {
    "kill": ("PeerDead", None),
    "kill after": ("PeerDead", None),
    "stop": ("ExchangeTimeout", "ExchangeTimeout"),
    "slow": ("ExchangeTimeout", "ExchangeTimeout"),
    "skip": ("SequenceDiverged", "SequenceDiverged"),
    "leave": ("ExchangeClosed", "ExchangeClosed"),
    "fork": (None, None),
}
"""By fault: the error of the rank without it, and of the rank with it (None: it was killed, or none)."""

WAITED_FOR = ("stop", "slow")


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    made = Pool()
    yield made
    made.close()


def plan(rank: int, session: str, steps: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    common = {"way": "native", "rank": rank, "session": session, "timeout_s": TIMEOUT_S, "attach_s": 30.0}
    return {**common, "steps": steps, **more}


def run_both(
    pool: Pool,
    session: str,
    both: list[list[dict[str, Any]]],
    stopped: int | None = None,
    timeout_s: float = TIMEOUT_S,
) -> list[Any]:
    """Results by rank; a stopped rank goes on when the other one has its result."""
    processes = pool.take(2)
    for rank, process in enumerate(processes):
        process.begin(plan(rank, session, both[rank], timeout_s=timeout_s))
    if stopped is None:
        results = [process.result() for process in processes]
    else:
        first = processes[1 - stopped].result()
        processes[stopped].resume()
        results = [first, processes[stopped].result()]
        results = results if stopped == 1 else results[::-1]
    assert not objects(session)
    return results


def heard_from(both: list[list[dict[str, Any]]], rank: int, count: int) -> list[list[Any]]:
    return [[step["epoch"], rank, step["values"]] for step in both[rank][:count]]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(both=steps())
def test_each_rank_hears_what_the_other_published(pool: Pool, both: list[list[dict[str, Any]]]) -> None:
    results = run_both(pool, new_session(), both)
    for rank, result in enumerate(results):
        assert result["error"] is None, result["text"]
        assert result["heard"] == heard_from(both, 1 - rank, len(both[0]))


def bounded(examples: int) -> settings:
    return settings(
        max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault not in WAITED_FOR])
@bounded(5)
@given(data=st.data())
def test_a_fault_at_any_step_is_one_named_error_on_both_sides_in_time(
    pool: Pool, fault: str, data: st.DataObject
) -> None:
    check_fault(pool, fault, data)


@pytest.mark.parametrize("fault", WAITED_FOR)
@bounded(2)
@given(data=st.data())
def test_a_peer_that_says_nothing_at_any_step_is_one_error_on_both_sides_in_time(
    pool: Pool, fault: str, data: st.DataObject
) -> None:
    check_fault(pool, fault, data)


def check_fault(pool: Pool, fault: str, data: st.DataObject) -> None:
    timeout_s = SHORT_S if fault in WAITED_FOR else TIMEOUT_S
    both = data.draw(steps())
    rank = data.draw(st.integers(0, 1))
    at = data.draw(st.integers(0, len(both[0]) - 1))
    both[rank][at].update(fault=fault, how="spin")
    # Who hasn't published doesn't wait for an answer: an idle rank has no deadline.
    both[1 - rank][at]["how"] = data.draw(st.sampled_from(["spin", "sleep"]))
    if fault == "kill after":
        last = {**both[0][-1], "channel": 0, "epoch": both[0][-1]["epoch"] + 1, "values": [0] * 7}
        for side in both:
            side.append({**last, "how": "sleep", "fault": None})
    stopped = rank if fault == "stop" else None
    results = run_both(pool, new_session(), both, stopped, timeout_s)
    other, own = results[1 - rank], results[rank]
    expected = FAULTS[fault]
    assert other["error"] == expected[0], other["text"]
    assert (own["error"] if own else None) == expected[1], own
    if fault == "fork":
        assert own["forked"] == "3 of 3 refused"
        return
    seen = at + (fault == "kill after")
    assert other["heard"][:seen] == heard_from(both, rank, seen)
    assert other["took_s"] < SLACK_S + (timeout_s if timeout_s == SHORT_S else 0)
    if own is not None and fault not in ("leave", "skip"):
        assert own["by"] == 1 - rank


def test_a_newcomer_with_a_used_session_is_refused_and_harms_nobody(pool: Pool) -> None:
    session = new_session()
    step = {"channel": 0, "epoch": 0, "values": [1] * 7, "how": "sleep", "pause_us": 0, "fault": None}
    one, two, late = pool.take(3)
    one.begin(plan(0, session, [step]))
    # It stands still before its part of the round, until the newcomer is refused.
    two.begin(plan(1, session, [{**step, "fault": "stop"}]))
    while objects(session) or not (one.has_joined(session) and two.has_joined(session)):
        os.sched_yield()
    late.begin(plan(1, session, [step], attach_s=0.2))
    refused = late.result()
    assert refused["error"] == "ExchangeTimeout"
    two.resume()
    assert one.result()["error"] is two.result()["error"] is None


def test_a_rank_whose_peer_never_comes_gives_up_in_time(pool: Pool) -> None:
    for rank in (0, 1):
        session = new_session()
        (alone,) = pool.take(1)
        alone.begin(plan(rank, session, [], attach_s=0.2))
        result = alone.result()
        assert result["error"] == "ExchangeTimeout"
        assert result["took_s"] < 0.2 + SLACK_S
        assert not objects(session)


def test_a_peer_that_left_at_once_is_named_as_such(pool: Pool) -> None:
    """Its whole life may fall between two looks of the one that waits for it."""
    step = {"channel": 0, "epoch": 0, "values": [1] * 7, "how": "spin", "pause_us": 0, "fault": None}
    for _ in range(20):
        waits, leaves = pool.take(2)
        session = new_session()
        waits.begin(plan(0, session, [step]))
        leaves.begin(plan(1, session, []))
        assert leaves.result()["error"] is None
        assert waits.result()["error"] == "ExchangeClosed"


@pytest.mark.parametrize("session", ["", "a/b", "a b", "x" * 49, "é"])
def test_a_malformed_session_is_refused(pool: Pool, session: str) -> None:
    (alone,) = pool.take(1)
    alone.begin(plan(0, session, []))
    assert alone.result()["error"] == "ExchangeSession"


FORGED = {
    "magic": (0, 8, "ExchangeAbi"),
    "abi": (8, 4, "ExchangeAbi"),
    "size": (16, 4, "ExchangeGeometry"),
    "ranks": (20, 4, "ExchangeGeometry"),
    "channels": (24, 4, "ExchangeGeometry"),
    "values": (28, 4, "ExchangeGeometry"),
    "namespace": (40, 8, "ExchangeSession"),
    "session": (48, 1, "ExchangeSession"),
    "start of the creator": (0x108, 8, "PeerReplaced"),
}
"""Where it stands on the page, its bytes, and the error when it isn't what it should be."""


def wait_for_object(session: str) -> Path:
    """The session's object, when its creator has filled it."""
    while True:
        for path in objects(session):
            page = path.read_bytes()
            if len(page) == 4096 and page[100]:
                return path


@pytest.mark.parametrize("what", FORGED)
def test_another_build_or_a_reused_process_id_is_one_error_on_both_sides(pool: Pool, what: str) -> None:
    at, size, error = FORGED[what]
    session = new_session()
    creator, other = pool.take(2)
    creator.begin(plan(0, session, []))
    path = wait_for_object(session)
    with path.open("r+b", buffering=0) as page:
        page.seek(at)
        was = page.read(size)
        page.seek(at)
        page.write(bytes([was[0] ^ 1]) + was[1:])
    other.begin(plan(1, session, []))
    assert [other.result()["error"], creator.result()["error"]] == [error, error]
    assert not objects(session)


def test_a_dead_session_is_recognised_and_never_reused(pool: Pool) -> None:
    dead, live, alone = new_session(), new_session(), Process()
    alone.begin(plan(0, dead, []))
    wait_for_object(dead)
    alone.kill()
    again, waiting = pool.take(2)
    again.begin(plan(0, dead, []))
    assert again.result()["error"] == "ExchangeOwned"
    again.begin(plan(1, dead, []))
    waiting.begin(plan(0, live, []))
    wait_for_object(live)
    assert again.result()["error"] == "PeerDead"
    assert not objects(dead)
    assert live not in remove_stale()
    again.begin(plan(1, live, []))
    assert waiting.result()["error"] is again.result()["error"] is None


def test_what_a_killed_creator_left_is_removed_by_the_launcher() -> None:
    for clean in (remove, lambda session: session in remove_stale()):
        session, alone = new_session(), Process()
        alone.begin(plan(0, session, []))
        wait_for_object(session)
        alone.kill()
        assert clean(session)
        assert not objects(session)
        assert not remove(session)


def test_a_full_shared_memory_is_one_error_on_both_sides(tmp_path: Path) -> None:
    """In mount namespaces of their own, so that nobody else finds it full."""
    fill = f"mount -t tmpfs -o size=4k full {SHARED_MEMORY} && echo x > {SHARED_MEMORY}/full"
    enter = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-rm"]
    if subprocess.run([*enter, "sh", "-c", fill], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespace can be made here, hence no full /dev/shm")
    session = new_session()
    both = [Process(*enter, "sh", "-c", f'{fill} && exec "$0" "$@"') for _ in range(2)]
    for rank, process in enumerate(both):
        process.begin(plan(rank, session, [], attach_s=0.5))
    creator, other = [process.result() for process in both]
    for process in both:
        process.kill()
    assert creator["error"] == "ExchangeSyscall"
    assert "No space left" in creator["text"]
    assert other["error"] == "ExchangeTimeout"
