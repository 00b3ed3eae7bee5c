"""What steps cost: the fit finds a known table, files are kept and refused, a start measures once."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from engine.actors.capacity import CostTable, Curve
from engine.config import NANO, Settings
from engine.cost_cells import LEAST_ROUNDS, Cell, Measured, cells_of, measure
from engine.cost_fit import errors, fit, nonnegative_least_squares
from engine.cost_table import default_path, key_of, load, save
from engine.errors import CostTableUnreadable

TRUE = CostTable(
    0.001,
    Curve([1, 8, 32], [0.0, 0.0004, 0.002]),
    Curve([1, 8, 16, 64, 192], [0.0, 0.002, 0.002, 0.009, 0.03]),
    Curve([1, 32], [0.001, 0.002]),
)


def cost(cell: Cell) -> float:
    return float(TRUE.seconds(cell.requests, cell.rows, cell.drafted))


def measured(noise: float, seed: int = 0) -> list[Measured]:
    draw = np.random.default_rng(seed)
    return [Measured(cell, cost(cell) * (1 + noise * draw.standard_normal())) for cell in cells_of(32, 5)]


def test_cells_cover_plain_steps_probes_and_whole_drafts() -> None:
    cells = cells_of(6, 2)
    assert {cell.requests for cell in cells} == {1, 2, 4, 6}
    assert [cell for cell in cells if cell.requests == 6] == [
        (6, 6, False), (6, 7, True), (6, 12, True), (6, 18, True),
    ]  # fmt: skip
    assert len(set(cells)) == len(cells)
    quick = cells_of(6, 5, quick=True)
    assert [cell for cell in quick if cell.requests == 6] == [
        (6, 6, False), (6, 7, True), (6, 18, True), (6, 36, True),
    ]  # fmt: skip
    assert set(quick) < set(cells_of(6, 5))


def test_a_fit_without_noise_is_exact_between_its_points() -> None:
    cells = [
        Measured(Cell(requests, rows, drafted), float(TRUE.seconds(requests, rows, drafted)))
        for requests in (1, 8, 32)
        for drafted in (False, True)
        for rows in (1, 8, 16, 64, 192)
    ]
    table = fit(cells)
    assert np.abs(errors(table, cells)).max() < 1e-9
    for requests, rows, drafted in itertools.product((1, 5, 20, 32), (3, 12, 40, 150, 192), (False, True)):
        told = float(table.seconds(requests, rows, drafted))
        assert told == pytest.approx(float(TRUE.seconds(requests, rows, drafted)), rel=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_a_fit_through_noise_is_near_and_never_falls(seed: int) -> None:
    table = fit(measured(0.03, seed))
    for curve in (table.requests, table.rows, table.drafting):
        values = [value for _, value in curve.points]
        assert values == sorted(values)
        assert values[0] >= 0
    for cell in cells_of(32, 5):
        told = float(table.seconds(cell.requests, cell.rows, cell.drafted))
        assert told == pytest.approx(cost(cell), rel=0.12)


def test_a_table_needs_both_kinds_of_steps() -> None:
    with pytest.raises(ValueError, match="with drafts and cells without"):
        fit([one for one in measured(0.0) if one.cell.drafted])


@pytest.mark.parametrize("seed", range(20))
def test_nonnegative_least_squares_meets_the_conditions_of_an_optimum(seed: int) -> None:
    draw = np.random.default_rng(seed)
    matrix, target = draw.standard_normal((30, 8)), draw.standard_normal(30)
    found = nonnegative_least_squares(matrix, target)
    slope = matrix.T @ (matrix @ found - target)
    assert (found >= 0).all()
    assert (slope > -1e-8).all()
    assert np.abs(slope[found > 0]).max(initial=0.0) < 1e-8


def test_rounds_visit_each_cell_and_the_first_isnt_counted() -> None:
    cells = cells_of(2, 1)
    visits: Counter[Cell] = Counter()
    order: list[Cell] = []

    def run(cell: Cell) -> float:
        visits[cell] += 1
        order.append(cell)
        return 100.0 if visits[cell] == 1 else float(visits[cell])

    said: list[str] = []
    found = measure(run, cells, said.append, None, rounds=4)
    assert order == cells * 4
    assert [one.seconds for one in found] == [3.0] * len(cells)
    assert [line for line in said if f"{len(cells)} of {len(cells)}" in line]
    visits.clear()
    measure(run, cells, said.append, budget_s=0.0)
    # No time at all: the least number of requests, the least number of rounds.
    assert {cell.requests for cell in visits} == {1}
    assert set(visits.values()) == {LEAST_ROUNDS}
    assert any("2 requests and more are left out" in line for line in said)
    visits.clear()
    measure(run, cells, said.append, budget_s=0.05)
    assert set(visits) == set(cells)
    assert min(visits.values()) > LEAST_ROUNDS


def test_a_saved_table_is_the_same_when_it_is_loaded(tmp_path: Path) -> None:
    key = key_of(Settings(), 5)
    path = tmp_path / "deep" / "table.json"
    save(path, key, TRUE, measured(0.0))
    found, table = load(path)
    assert found == key
    assert table.bias == TRUE.bias
    for name in ("requests", "rows", "drafting"):
        assert getattr(table, name).points == getattr(TRUE, name).points
    assert [file.name for file in path.parent.iterdir()] == ["table.json"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"version": 2}, "version 2"),
        ({"bias": -1.0}, "bias"),
        ({"rows": [[1, 2.0], [2, 1.0]]}, "rows"),
        ({"rows": [[2, 1.0], [1, 2.0]]}, "ascending"),
        ({"requests": []}, "unpack"),
        ({"drafting": [[1, "soon"]]}, "soon"),
    ],
)
def test_a_file_that_is_no_table_is_named(tmp_path: Path, change: dict[str, object], named: str) -> None:
    path = tmp_path / "table.json"
    save(path, {}, TRUE, [])
    document = json.loads(path.read_text()) | change
    path.write_text(json.dumps(document))
    with pytest.raises(CostTableUnreadable, match=named) as refused:
        load(path)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 1}'])
def test_a_file_that_is_cut_off_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(CostTableUnreadable, match=r"table\.json"):
        load(path)


def test_the_default_file_tells_machines_and_models_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    settings = [
        Settings(), Settings(dtype="bfloat16"), Settings(deterministic=True), Settings(dp_size=2),
        Settings(kernels="torch"), Settings(kernels="torch", kv_cache_dtype="fp8"),
    ]  # fmt: skip
    paths = {default_path(key_of(one, 5)) for one in settings} | {default_path(key_of(Settings(), 4))}
    assert len(paths) == len(settings) + 1
    assert all(path.is_relative_to(tmp_path) for path in paths)
    # Another name of the same caches.
    assert default_path(key_of(Settings(kv_cache_dtype="float32"), 5)) in paths
    other = tmp_path / "model"
    other.mkdir()
    (other / "config.json").write_bytes((NANO / "config.json").read_bytes() + b" ")
    assert key_of(Settings(model_path=str(other)), 5)["model"] != key_of(Settings(), 5)["model"]
