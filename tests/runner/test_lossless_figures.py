"""Figures of the drafting benchmark from steps and passes that are written down here."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bench.drafting_figures import NothingDrafted, Pass, Side, calibration, errors, figures, full_rounds
from engine.config import Settings
from engine.messages import StepDone

GAMMA = 5


def step(verified: list[int], counts: list[int], survival: list[list[float]]) -> StepDone:
    return StepDone(
        epoch=1,
        counts=bytes(counts),
        token_ids=b"",
        verified=bytes(verified),
        survival=np.array(survival, np.float32).tobytes(),
        seconds=0.004,
        phases=(0.001, 0.002, 0.0005),
    )


def side(steps: list[StepDone], mode: str = "static") -> Side:
    return Side(Settings(speculative_verify_mode=mode), None, steps)  # type: ignore[arg-type]


def passed(seconds: float, drafts: tuple[int, int, int] = (0, 0, 0)) -> Pass:
    return Pass([[1] * 10], seconds, {}, np.array(drafts))


def test_rounds_that_were_cut_and_chunks_are_left_out_of_the_calibration() -> None:
    even = [0.9, 0.8, 0.7, 0.6, 0.5]
    steps = [step([6, 3, 0, 6], [4, 3, 1, 1], [even, even, [0.0] * GAMMA, even]), step([6], [6], [even])]
    survival, labels = full_rounds(steps)
    assert survival.shape == (3, GAMMA)
    assert labels.tolist() == [[1, 1, 1, 0, 0], [0] * 5, [1] * 5]


def test_the_calibration_error_is_the_distance_of_promise_and_share_in_each_bin() -> None:
    promised = np.array([[0.9], [0.9], [0.2], [0.2]])
    kept = np.array([[1.0], [0.0], [0.0], [0.0]])
    # |0.9 - 0.5| for one half, |0.2 - 0| for the other.
    assert errors(promised, kept) == pytest.approx([(0.4 + 0.2) / 2])


def test_promises_that_are_kept_have_no_error_and_the_raw_head_is_told_apart() -> None:
    draw = np.random.default_rng(1)
    promised = np.full((4000, GAMMA), 0.9).cumprod(axis=1)
    accepted = (draw.random((4000, GAMMA)) < 0.9).cumprod(axis=1).sum(axis=1)
    steps = [step([6], [int(n) + 1], [row]) for n, row in zip(accepted, promised.tolist(), strict=True)]
    told: dict[str, Any] = calibration(side(steps))
    assert told["rounds"] == 4000
    assert told["all_rounds"]
    assert max(told["ece"]) < 0.03
    # The shipped temperatures are below 1: the head itself promises less than what is served.
    assert told["ece_raw"][0] > told["ece"][0]
    assert not calibration(side(steps, "compact"))["all_rounds"]


def test_ratios_are_medians_of_pairs_and_name_what_they_compare() -> None:
    steps = [step([6], [4], [[0.9, 0.8, 0.7, 0.6, 0.5]])]
    plain = side([step([1], [1], [])])
    drafted = side(steps, "compact")
    told = [[passed(s), passed(s / 2, (2, 10, 6)), passed(s / 1.6)] for s in (1.0, 2.0, 4.0)]
    found = figures(told, [plain, drafted, side(steps)], 8)
    assert (found["ratio"], found["static_ratio"], found["compact_over_static"]) == (2.0, 1.6, 1.25)
    assert found["accept_length"] == 4.0
    assert found["calibration"]["rounds"] == 1
    two = figures([passes[:2] for passes in told], [plain, drafted], 1)
    assert "static_ratio" not in two
    with pytest.raises(NothingDrafted, match="no step of 1 drafted anything"):
        figures(told, [plain, side([step([1], [1], [])])], 1)
