"""Parts that fail, hang or die cost their own results alone, and the bench that has them ends with 1."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import kernels
from bench.kernel_cases import Case
from bench.kernels import Rates, measure, over_floor
from bench.parts import Part, Stage, failures, run_parts
from bench.run import run
from tests.kernels.triton.graph_parts import main
from tests.runner.faulty_parts import breaks, counts, dies, hangs


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_what_is_left_runs_behind_parts_that_fail_die_or_hang(tmp_path: Path) -> None:
    said: list[str] = []
    pid_file = tmp_path / "pid"
    found = run_parts(
        [
            Part("first", counts, (2,), 60),
            Part("same", counts, (1,), 60),
            Part("wrong", breaks, (3,), 60),
            Part("gone", dies, (), 60),
            Part("stuck", hangs, (str(pid_file),), 2.0),
            Part("last", counts, (1,), 60),
        ],
        said.append,
    )
    assert [number for number, _ in found["first"].results] == [0, 1]
    # A part that is over leaves its process to the next one, a failed one doesn't.
    pids = [found[name].results[0][1] for name in ("first", "same", "last")]
    assert pids[0] == pids[1] != pids[2]
    assert found["wrong"].results == [0, 1, 2]
    assert found["wrong"].failed.strip().endswith("ValueError: an illegal address")
    assert found["gone"].failed == "its process ended with -9"
    assert found["stuck"].results == [7]
    assert found["stuck"].failed == "nothing for 2 s, after 1 results"
    assert not is_there(int(pid_file.read_text()))
    assert set(failures(found)) == {"wrong", "gone", "stuck"}
    assert [line.split(" (")[0] for line in said if line.startswith("wrong")] == [
        "wrong ...",
        "wrong: failed: ValueError: an illegal address",
    ]
    assert len(said) == 12


def test_no_part_begins_or_goes_on_when_the_time_is_over(tmp_path: Path) -> None:
    stage = Stage(lambda line: None, within_s=2.0)
    outcome = stage.run(Part("long", hangs, (str(tmp_path / "pid"),), 60))
    assert outcome.failed == f"2 s are over, after {len(outcome.results)} results"
    stage.close()
    stage = Stage(lambda line: None, within_s=1e-9)
    outcome = stage.run(Part("late", counts, (1,), 60))
    assert (outcome.results, outcome.failed) == ([], "not begun: 1e-09 s are over")
    stage.close()


def test_checks_of_recorded_steps_tell_last_what_failed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([Part("first", breaks, (1,), 60), Part("ranks", counts, (1,), 60)]) == 1
    told = capsys.readouterr().out
    place = told.index("shown by first on")
    assert "ranks: 1 results" in told[:place]
    assert told.rstrip().endswith("ValueError: an illegal address")
    assert "not shown" not in told
    assert main([Part("first", counts, (1,), 60)]) == 0
    assert "not shown: two ranks, which need 2 devices" in capsys.readouterr().out


def case(name: str, error: float, library: Any = ()) -> Case:
    return Case(
        name, "8", 4, [lambda: torch.ones(8)] * 2, 1e6, 1e6, "bf16", "torch", list(library), error, 1e-3
    )


def fair(row_counts: tuple[int, ...]) -> Iterator[Case]:
    yield from (case("right", 1e-4), case("wrong", 0.5), case("nan", float("nan")))


def faulty(row_counts: tuple[int, ...]) -> Iterator[Case]:
    def fails() -> None:
        raise RuntimeError("no such library")

    yield case("compared", 0.0, [fails])
    raise RuntimeError("a kernel that doesn't compile")


def planted(name: str, row_counts: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """The bench's rows, timed without a device."""
    kernels.CASES.update(fair=fair, faulty=faulty)
    kernels.milliseconds = lambda calls: [call() for call in calls] and 2.0  # type: ignore[assignment, return-value]
    yield from kernels.rows_of(name, row_counts)


def rates() -> Iterator[Rates]:
    yield Rates(read=1e12, bf16=1e15, fp8=2e15)


def test_kernels_that_differ_or_fail_are_recorded_beside_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    # Pickled by name: what runs in the process is this file's.
    monkeypatch.setattr(kernels, "rows_of", planted)
    monkeypatch.setattr(kernels, "rates_of_device", rates)
    found = measure((4,), 0.0, ("fair", "faulty"))
    right, wrong, nan, compared = found["rows"]
    assert (right["ms"], right["floor_ms"], right["over_floor"], right["bound"]) == (2.0, 1e-3, 2000, "bytes")
    assert wrong["ms"] is nan["ms"] is None
    assert (compared["library_ms"], compared["library_failed"]) == (None, "no such library")
    assert set(found["failures"]) == {"faulty", "wrong 8, 4 rows", "nan 8, 4 rows"}
    assert over_floor(right, None) == {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(kernels, "measure", lambda *_: found)
    told = tmp_path / "kernels.json"
    code = run(argparse.Namespace(name="kernels", quick=True, within_s=0.0, json=told))
    assert code == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("failed: nan 8, 4 rows: nan from its oracle")
    assert told.exists()
