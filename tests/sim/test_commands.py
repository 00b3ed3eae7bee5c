"""What `replay` prints and refuses, and how clean seeds are counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.__main__ import main
from engine.errors import ConfigError
from engine.sim.faults import POINTS
from engine.sim.many import accumulate, run_many, spread
from engine.sim.scenario import load_scenario


def test_every_fault_point_is_used_by_a_scenario(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "--list-faults"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in POINTS)
    assert "nobody" not in printed


def test_a_run_prints_its_trace_last_and_draws_one_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "steady", "--data", "3", "--order", "9", "--draw"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "sequenceDiagram"
    assert lines[-1].startswith("trace ")
    arrows = [line for line in lines if "->>" in line]
    assert "Enqueue" in arrows[0]
    assert any("RunStep" in line for line in arrows)
    assert "finish" in arrows[-1]


def test_an_unknown_key_or_fault_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text('say = "x"\n[bounds]\nslotz = 3\n')
    with pytest.raises(ConfigError, match="slotz"):
        load_scenario(str(file))
    file.write_text('say = "x"\n[[fault]]\nkind = "earthquake"\n')
    assert main(["replay", str(file)]) == 2
    assert main(["replay", "no-such-scenario"]) == 2


def test_clean_seeds_add_up_by_commit(tmp_path: Path) -> None:
    file = tmp_path / "clean.json"
    totals = run_many(spread(["three-ranks", "start"], 0, 0, 4))
    assert totals.broken is None
    for commit in ("a", "b", "a"):
        accumulate(file, totals, commit)
    body = json.loads(file.read_text())
    assert body["seeds"] == 12
    assert {run["commit"]: run["seeds"] for run in body["runs"]} == {"a": 8, "b": 4}
    assert body["runs"][0]["by_scenario"] == {"start": 4, "three-ranks": 4}


def test_the_committed_count_is_the_sum_of_its_runs() -> None:
    body = json.loads((Path(__file__).parents[1] / "seeds" / "clean.json").read_text())
    assert body["seeds"] == sum(run["seeds"] for run in body["runs"])
    assert body["seeds"] == sum(sum(run["by_scenario"].values()) for run in body["runs"])
