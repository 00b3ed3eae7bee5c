"""Survival of earlier drafts: two steps old, of the same request, else the running mean."""

from __future__ import annotations

import numpy as np
import pytest

from engine.actors.survival import KEEP, SurvivalHistory

ROWS = np.arange(3)
GENERATIONS = np.array([5, 5, 5])


def scores(*values: float) -> np.ndarray:
    return np.array([[value, value / 2] for value in values], np.float32)


def test_a_start_is_optimistic() -> None:
    history = SurvivalHistory(3, 2)
    assert (history.at(0, ROWS, GENERATIONS) == 1).all()
    history.note(0, ROWS, GENERATIONS, scores(0.2, 0.4, 0.6))
    # Not two steps old yet.
    assert (history.at(1, ROWS, GENERATIONS) == 1).all()
    assert np.array_equal(history.at(2, ROWS, GENERATIONS), scores(0.2, 0.4, 0.6))


def test_values_are_two_steps_old_whether_or_not_a_newer_one_is_there() -> None:
    overlapped, alone = SurvivalHistory(3, 2), SurvivalHistory(3, 2)
    for epoch in range(6):
        told = scores(*(np.array([0.1, 0.2, 0.3]) + epoch / 10))
        before = overlapped.at(epoch + 1, ROWS, GENERATIONS)  # Planned before the step's own results came.
        overlapped.note(epoch, ROWS, GENERATIONS, told)
        alone.note(epoch, ROWS, GENERATIONS, told)
        assert np.array_equal(before, alone.at(epoch + 1, ROWS, GENERATIONS))
        assert np.array_equal(overlapped.prior(epoch + 1), alone.prior(epoch + 1))


def test_a_row_given_to_another_request_tells_nothing_of_the_one_before() -> None:
    history = SurvivalHistory(3, 2)
    history.note(0, ROWS, GENERATIONS, scores(0.2, 0.4, 0.6))
    history.note(1, ROWS[1:], GENERATIONS[1:], scores(0.4, 0.6))
    reused = np.array([6, 5, 5])
    got = history.at(4, ROWS, reused)
    assert np.array_equal(got[1:], scores(0.4, 0.6))
    assert np.array_equal(got[0], history.prior(4))
    history.note(4, ROWS[:1], reused[:1], scores(0.9))
    # The new request's first value isn't old enough, and the old one's isn't its own.
    assert np.array_equal(history.at(5, ROWS, reused)[0], history.prior(5))
    assert np.array_equal(history.at(6, ROWS, reused)[0], scores(0.9)[0])
    # A slow reader that still has the older generation doesn't see the newer one's.
    assert np.array_equal(history.at(6, ROWS, GENERATIONS)[0], scores(0.2)[0])


def test_the_prior_is_an_exponential_mean_that_begins_with_the_first_step() -> None:
    history = SurvivalHistory(3, 2)
    history.note(0, ROWS, GENERATIONS, scores(0.2, 0.4, 0.6))
    history.note(1, ROWS[:1], GENERATIONS[:1], scores(0.9))
    assert history.prior(2) == pytest.approx([0.4, 0.2])
    mean = KEEP * 0.4 + (1 - KEEP) * 0.9
    assert history.prior(3) == pytest.approx([mean, mean / 2])


def test_steps_that_draft_nothing_change_nothing() -> None:
    history = SurvivalHistory(3, 2)
    history.note(0, ROWS, GENERATIONS, scores(0.2, 0.4, 0.6))
    taken = history.snapshot()
    history.note(1, ROWS[:0], GENERATIONS[:0], np.zeros((0, 2), np.float32))
    assert history.snapshot() == taken
    history.note(2, ROWS, GENERATIONS, scores(0.1, 0.1, 0.1))
    assert history.snapshot() != taken
    history.restore(taken)
    assert history.snapshot() == taken
    assert np.array_equal(history.at(9, ROWS, GENERATIONS), scores(0.2, 0.4, 0.6))
