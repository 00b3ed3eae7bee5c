"""Confidences follow what became of the drafts before, of free and of guided ones apart."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.runner.correction import LEAST, MOST, Correction

NOBODY = np.zeros(0, np.int64)


def products(*chances: float) -> np.ndarray:
    return np.array([chances], np.float32).cumprod(1, dtype=np.float32)


def rounds(correction: Correction, chance: float, truth: float, count: int, guided: bool = False) -> None:
    """Rounds of one group whose drafts claim `chance` each and are accepted with `truth`."""
    coins = np.random.default_rng(1)
    for _ in range(count):
        correction.survival(products(*[chance] * 5), None, np.arange(int(guided)))
        passed = coins.random(5) < truth
        accepted = int(passed.cumprod().sum())
        correction.note(np.array([5]), np.array([accepted]))


def test_nothing_is_corrected_before_anything_is_known() -> None:
    told = products(0.9, 0.5, 0.25)
    assert torch.allclose(Correction().survival(told, None, NOBODY), torch.from_numpy(told))


@pytest.mark.parametrize(("chance", "truth"), [(0.8, 0.4), (0.6, 0.75), (0.7, 0.7)])
def test_chances_become_what_they_turn_out_to_be(chance: float, truth: float) -> None:
    correction = Correction()
    rounds(correction, chance, truth, 1500)
    corrected = correction.survival(products(*[chance] * 5), None, NOBODY).numpy()[0]
    # The last 512 trials alone count: three times their spread.
    assert corrected == pytest.approx([truth**k for k in range(1, 6)], abs=3 * (0.25 / 512) ** 0.5)


def test_free_and_guided_drafts_are_judged_apart() -> None:
    correction = Correction()
    rounds(correction, 0.8, 0.2, 1000, guided=True)
    free, guided = correction.factors
    assert free == 1.0
    assert guided == pytest.approx(0.25, abs=0.06)


def test_a_correction_has_bounds() -> None:
    low, high = Correction(), Correction()
    rounds(low, 0.9, 0.0, 3000)
    rounds(high, 0.1, 0.99, 3000)
    assert (low.factors[0], high.factors[0]) == (LEAST, MOST)
    assert high.survival(products(0.9, 0.9), None, NOBODY).max() == 1.0


def test_certain_drafts_count_as_accepted_and_teach_nothing() -> None:
    correction = Correction()
    for _ in range(200):
        found = correction.survival(products(0.5, 0.5, 0.4), np.array([[False, True, False]]), np.arange(1))
        correction.note(np.array([2]), np.array([2]))
    # Of the first draft alone: it claimed 0.5 and is always right.
    assert correction.factors[1] == MOST
    assert found.tolist()[0] == pytest.approx([0.75, 0.75, 0.45], abs=0.02)


def test_only_judged_drafts_count() -> None:
    """What was cut, what stands behind a rejected draft, groups that failed or drafted nothing of worth."""
    correction = Correction()
    told = np.array([[0.5, 0.25], [0.5, 0.25], [np.nan, np.nan], [0.0, 0.0]], np.float32)
    for _ in range(300):
        correction.survival(told, None, NOBODY)
        correction.note(np.array([0, 2, 0, 0]), np.array([0, -1, 0, 0]))
    assert correction.factors == (1.0, 1.0)
    correction.survival(told, None, NOBODY)
    correction.note(np.array([2, 0, 0, 0]), np.array([0, 0, 0, 0]))
    assert correction.factors[0] == pytest.approx(
        (64 * (1 - 1 / 512) + 0) / (64 * (1 - 1 / 512) + 0.5), abs=1e-3
    )
