"""The exchange over a process group gives what the native one gives, with any number of ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from engine.exchange.native import new_session
from tests.native.pairs import Process, steps

pytestmark = pytest.mark.slow
FAULTS = {
    "kill": ("PeerDead", None),
    "stop": ("ExchangeTimeout", "ExchangeTimeout"),
    "skip": ("SequenceDiverged", "SequenceDiverged"),
    "leave": ("ExchangeClosed", "ExchangeClosed"),
}


def run(processes: list[Process], all_steps: list[list[dict[str, Any]]], **more: Any) -> list[Any]:
    """Results by rank."""
    for rank, process in enumerate(processes):
        common = {"rank": rank, "ranks": len(processes), "attach_s": 30.0, "timeout_s": 60.0}
        process.begin({**common, "steps": all_steps[rank], **more})
    return [process.result() for process in processes]


@pytest.mark.skipif(sys.platform != "linux", reason="the native exchange is Linux's")
def test_both_ways_give_equal_results_on_equal_inputs(tmp_path: Path) -> None:
    processes = [Process(), Process()]

    @seed(7)
    @settings(max_examples=15, deadline=None, phases=[Phase.generate], database=None)
    @given(both=steps())
    def compare(both: list[list[dict[str, Any]]]) -> None:
        ways = [
            {"way": "native", "session": new_session()},
            {"way": "group", "file": str(tmp_path / new_session())},
        ]
        native, group = (run(processes, both, **way) for way in ways)
        for one, other in zip(native, group, strict=True):
            assert one["error"] is other["error"] is None, other["text"]
            assert one["heard"] == other["heard"]
            assert len(one["heard"]) == len(both[0])

    compare()
    for process in processes:
        process.kill()


def test_three_ranks_hear_each_other_in_every_epoch(tmp_path: Path) -> None:
    processes = [Process() for _ in range(3)]

    @seed(7)
    @settings(max_examples=15, deadline=None, phases=[Phase.generate], database=None)
    @given(three=steps(ranks=3))
    def compare(three: list[list[dict[str, Any]]]) -> None:
        results = run(processes, three, way="group", file=str(tmp_path / new_session()))
        for own, result in enumerate(results):
            peers = [src for src in range(3) if src != own]
            said = [(three[src][at], src) for at in range(len(three[0])) for src in peers]
            assert result["error"] is None, result["text"]
            assert result["heard"] == [[step["epoch"], src, step["values"]] for step, src in said]

    compare()
    for process in processes:
        process.kill()


@pytest.mark.parametrize("fault", FAULTS)
@settings(
    max_examples=1,
    phases=[Phase.generate],
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(three=steps(ranks=3), data=st.data())
def test_three_ranks_agree_and_a_fault_of_one_is_one_error_on_all(
    tmp_path_factory: pytest.TempPathFactory, fault: str, three: Any, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, 2))
    # The fault is in the last step but one. Who is slow may learn of it before it has taken what came before.
    good, last = len(three[0]), three[0][-1]["epoch"]
    more = {"channel": 0, "values": [1] * 7, "how": "sleep", "pause_us": 0, "fault": None}
    for side in three:
        side += [{**more, "epoch": last + 1}, {**more, "epoch": last + 2}]
    three[rank][good].update(fault=fault, how="spin")
    processes = [Process() for _ in three]
    common = {"way": "group", "ranks": 3, "timeout_s": 4.0 if fault == "stop" else 60.0}
    common["file"] = str(tmp_path_factory.mktemp("store") / "store")
    for own, process in enumerate(processes):
        process.begin({**common, "rank": own, "steps": three[own]})
    others = [processes[own] for own in range(3) if own != rank]
    results = [process.result() for process in others]
    processes[rank].resume()
    faulty = processes[rank].result()
    for process in processes:
        process.kill()
    assert [result["error"] for result in results] == [FAULTS[fault][0]] * 2, [r["text"] for r in results]
    assert (faulty["error"] if faulty else None) == FAULTS[fault][1], faulty["text"]
    for own, result in zip((own for own in range(3) if own != rank), results, strict=True):
        peers = [src for src in range(3) if src != own]
        said = [(three[src][at], src) for at in range(good) for src in peers]
        heard = result["heard"]
        assert (
            heard[: len(said)] == [[step["epoch"], src, step["values"]] for step, src in said][: len(heard)]
        )
