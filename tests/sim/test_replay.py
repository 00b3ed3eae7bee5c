"""The whole engine in virtual time: fixed, fresh and kept seeds, and runs that are the same twice."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from engine.commands.replay import explain
from engine.sim.faults import POINTS
from engine.sim.many import Seeds, Totals, run_many
from engine.sim.run import replay
from engine.sim.scenario import load_scenario, plan_of, scenario_files
from engine.sim.scenario_text import as_toml

pytestmark = pytest.mark.slow
SCENARIOS = [path.stem for path in scenario_files()]
KEPT = sorted((Path(__file__).parents[1] / "seeds").glob("*.toml"))
FIXED, FRESH = 32, 13
"""Seeds of each scenario: more than 500 fixed and 200 fresh ones over all of them."""

reached: Counter[str] = Counter()


def run_clean(runs: list[Seeds]) -> Totals:
    """Runs the seeds; fails with all that `replay` prints of a violation."""
    totals = run_many(runs)
    if totals.broken is not None:
        lines: list[str] = []
        explain(*totals.broken, keep=None, say=lines.append)
        pytest.fail("\n".join(lines))
    return totals


@pytest.mark.timeout(300)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_fixed_seeds_break_no_invariant(scenario: str) -> None:
    totals = run_clean([Seeds(scenario, seed, seed) for seed in range(FIXED)])
    reached.update(totals.hits)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_fresh_seeds_break_no_invariant(scenario: str) -> None:
    draw = random.SystemRandom()
    seeds = [Seeds(scenario, draw.getrandbits(32), draw.getrandbits(32)) for _ in range(FRESH)]
    print(*[one.command() for one in seeds], sep="\n")
    run_clean(seeds)


def test_the_fixed_seeds_reach_every_declared_fault_point() -> None:
    if not reached:
        pytest.skip("runs with the fixed seeds of all scenarios")
    assert set(POINTS) - set(reached) == set()
    assert set(reached) <= set(POINTS)


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_a_seed_that_once_failed_stays_clean(path: Path) -> None:
    scenario = load_scenario(str(path))
    assert scenario.found
    violation = replay(plan_of(scenario, scenario.data), scenario.order).violation
    assert violation is None, violation.report()


@pytest.mark.parametrize("scenario", ["steady", "leaving-clients", "links"])
def test_equal_seeds_give_an_equal_trace_in_every_process(scenario: str) -> None:
    command = [sys.executable, "-m", "engine", "replay", scenario, "--data", "7", "--order", "5"]
    traces = set()
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        traces.add(done.stdout.splitlines()[-1])
    traces.add(f"trace {replay(plan_of(load_scenario(scenario), 7), 5).digest}")
    assert len(traces) == 1
    assert f"trace {replay(plan_of(load_scenario(scenario), 7), 6).digest}" not in traces


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_plan_written_as_a_file_is_the_same_run(scenario: str, tmp_path: Path) -> None:
    plan = plan_of(load_scenario(scenario), 3)
    file = tmp_path / "plan.toml"
    file.write_text(as_toml(plan))
    assert replay(plan_of(load_scenario(str(file)), 99), 4).digest == replay(plan, 4).digest
