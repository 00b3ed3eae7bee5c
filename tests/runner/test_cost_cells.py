"""Costs of steps are measured on a real runner: exact cells, one measurement, one file."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.actors.capacity import CostTable
from engine.config import Settings
from engine.cost_cells import Stage, Subject, cells_of
from engine.cost_table import cost_table_for, load, measured_table, subject_of
from engine.errors import ConfigError, CostTableUnreadable
from engine.memory.pools import KVState
from engine.messages import RunStep, StepDone
from engine.model.model import DeepseekV4
from engine.runner.speculative import Speculation
from engine.runner.step import StepRunner
from tests.runner.scripted_drafter import ScriptedDrafter

BLOCK, SLOTS, PAGES = 3, 5, 9


@pytest.fixture
def subject(model: DeepseekV4) -> Subject:
    state = KVState(model.config, SLOTS, PAGES, PAGES, torch.device("cpu"), torch.float32)
    drafter = ScriptedDrafter(BLOCK, (1, 3, 4))
    drafter.check_anchors = False
    drafter.texts = {slot: [slot] * 600 for slot in range(SLOTS)}
    drafter.samples = True
    return subject_of(StepRunner(model, state, (1,), Speculation(drafter, state, "compact")))


def test_each_cell_runs_its_rows_until_pages_are_full_and_anew(subject: Subject) -> None:
    steps: list[tuple[RunStep, StepDone]] = []

    def execute(job: RunStep) -> StepDone:
        steps.append((job, subject.execute(job)))
        return steps[-1][1]

    stage = Stage(dataclasses.replace(subject, execute=execute))
    assert subject.requests == SLOTS - 1
    cells = cells_of(subject.requests, BLOCK)
    for _ in range(6):
        for cell in cells:
            before = len(steps)
            assert stage.run_cell(cell) > 0
            assert len(steps) - before <= 2  # Its own step, and one with new prompts.
            done = steps[-1][1]
            assert (sum(done.verified), len(done.verified)) == (cell.rows, cell.requests)
            assert bool(np.frombuffer(done.survival, np.float32).any()) == cell.drafted
    bound = [len(job.binds) for job, _ in steps if job.binds]
    assert sum(bound) > subject.requests  # Some had filled their page.


def test_a_start_measures_once_and_keeps_the_table(
    subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.cost_table.START_UP_S", 0.2)
    path = tmp_path / "table.json"
    settings = Settings(speculative_cost_table=str(path))
    said: list[str] = []
    first = cost_table_for(settings, subject, said.append)
    assert any("rounds" in line for line in said)
    kept = path.read_bytes()
    assert load(path)[1].rows.points == first.rows.points
    said.clear()

    def refuse(job: RunStep) -> StepDone:
        raise AssertionError("a saved table isn't measured again")

    again = cost_table_for(settings, dataclasses.replace(subject, execute=refuse), said.append)
    assert again.rows.points == first.rows.points
    assert said == [f"costs of steps: {path}"]
    # Of another machine or model: measured, said, and the file left alone.
    said.clear()
    other = cost_table_for(dataclasses.replace(settings, dtype="bfloat16"), subject, said.append)
    assert isinstance(other, CostTable)
    assert "dtype 'float32', here 'bfloat16'" in said[0]
    assert path.read_bytes() == kept
    path.write_text("{")
    with pytest.raises(CostTableUnreadable, match=r"table\.json"):
        cost_table_for(settings, subject, said.append)


def test_a_table_that_cant_be_written_is_used_all_the_same(
    subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.cost_table.START_UP_S", 0.2)
    (tmp_path / "file").write_text("")
    said: list[str] = []
    settings = Settings(speculative_cost_table=str(tmp_path / "file" / "table.json"))
    assert isinstance(cost_table_for(settings, subject, said.append), CostTable)
    assert "can't be written" in said[-1]


def test_ranks_that_meet_run_the_same_steps_whatever_they_accept(model: DeepseekV4, subject: Subject) -> None:
    def steps_with(survivors: int) -> list[tuple[int, ...]]:
        state = KVState(model.config, SLOTS, PAGES, PAGES, torch.device("cpu"), torch.float32)
        drafter = ScriptedDrafter(BLOCK, (1, 3, 4))
        drafter.check_anchors = False
        drafter.texts = {slot: [slot + survivors] * 600 for slot in range(SLOTS)}
        runner = StepRunner(model, state, (1,), Speculation(drafter, state, "compact"))
        shapes: list[tuple[int, ...]] = []

        def execute(job: RunStep) -> StepDone:
            done = runner.execute(job)
            shapes.append((len(job.binds), len(done.verified), sum(done.verified)))
            return done

        measured_table(
            dataclasses.replace(subject_of(runner), execute=execute, meets=True), lambda line: None
        )
        return shapes

    assert steps_with(0) == steps_with(7)


def test_without_drafts_there_is_nothing_to_measure(model: DeepseekV4) -> None:
    state = KVState(model.config, SLOTS, PAGES, PAGES, torch.device("cpu"), torch.float32)
    with pytest.raises(ConfigError, match="nothing drafts"):
        subject_of(StepRunner(model, state, (1,)))
