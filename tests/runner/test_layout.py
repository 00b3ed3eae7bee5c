"""Verify lengths: the global top of the candidates, prefix by prefix, ties by position, then by group."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import pytest
import torch

from engine.errors import ShapeMismatch
from engine.runner.layout import verify_lens, verify_lens_on_device

Ints = npt.NDArray[np.int64]


def plain(survival: npt.NDArray[np.float32], caps: Ints, budget: int) -> list[int]:
    """The rule, candidate by candidate."""
    candidates = []
    for group, row in enumerate(survival.tolist()):
        least = float("inf")
        for position, score in enumerate(row[: max(int(caps[group]) - 1, 0)]):
            least = min(least, score if score > 0 else 0.0)
            candidates.append((-least, position, group))
    lens = [min(int(cap), 1) for cap in caps]
    for _, _, group in sorted(candidates)[: len(candidates) if budget < 0 else budget]:
        lens[group] += 1
    return lens


def random_case(
    draw: np.random.Generator, groups: int, gamma: int
) -> tuple[npt.NDArray[np.float32], Ints, int]:
    survival = draw.random((groups, gamma), np.float32)
    if draw.random() < 0.5:
        survival = np.round(survival * 4) / np.float32(4)  # Many ties.
    odd = draw.random((groups, gamma))
    survival[odd < 0.05], survival[odd > 0.95] = np.nan, -1.0
    if draw.random() < 0.5:
        survival = np.cumprod(survival, axis=1, dtype=np.float32)
    caps = draw.integers(0, gamma + 2, groups)
    return survival, caps, int(draw.integers(-1, groups * gamma + 2))


@pytest.mark.parametrize("groups", [0, 1, 2, 3, 7, 33, 64])
@pytest.mark.parametrize("gamma", [1, 5, 7])
def test_both_forms_follow_the_rule(groups: int, gamma: int) -> None:
    draw = np.random.default_rng(groups * 10 + gamma)
    for _ in range(60):
        survival, caps, budget = random_case(draw, groups, gamma)
        expected = plain(survival, caps, budget)
        scores = torch.from_numpy(survival)
        lens = verify_lens(scores, caps, budget)
        assert lens.dtype == np.int64
        assert lens.tolist() == expected
        device = verify_lens_on_device(scores, torch.from_numpy(caps), torch.tensor(budget))
        assert device.dtype == torch.int64
        assert device.tolist() == expected
        room = int(np.clip(caps - 1, 0, gamma).sum())
        wanted = room if budget < 0 else min(budget, room)
        assert lens.sum() == (caps > 0).sum() + wanted
        assert (lens[caps > 0] >= 1).all()
        assert (lens <= caps).all()


def test_no_other_choice_of_equal_size_expects_more_tokens() -> None:
    draw = np.random.default_rng(5)
    for _ in range(40):
        groups, gamma = int(draw.integers(1, 4)), 3
        survival = np.cumprod(draw.random((groups, gamma), np.float32), axis=1, dtype=np.float32)
        caps = draw.integers(0, gamma + 2, groups)
        reach = np.concatenate([np.zeros((groups, 1)), np.cumsum(survival, axis=1)], axis=1)
        best: dict[int, float] = {}
        for extra in itertools.product(*(range(max(int(cap), 1)) for cap in caps)):
            value = sum(float(reach[group, count]) for group, count in enumerate(extra))
            best[sum(extra)] = max(best.get(sum(extra), 0.0), value)
        for budget, value in best.items():
            lens = verify_lens(torch.from_numpy(survival), caps, budget)
            got = sum(float(reach[group, max(count - 1, 0)]) for group, count in enumerate(lens))
            assert got == pytest.approx(value, abs=1e-6)


def test_later_scores_of_a_draft_decide_nothing_about_earlier_positions() -> None:
    draw = np.random.default_rng(6)
    for _ in range(200):
        survival, caps, budget = random_case(draw, 4, 5)
        before = verify_lens(torch.from_numpy(survival), caps, budget)
        group, position = int(draw.integers(4)), int(draw.integers(5))
        survival[group, position:] = draw.random(5 - position)
        after = verify_lens(torch.from_numpy(survival), caps, budget)
        # Whether positions before the changed one are verified is as before.
        assert min(before[group] - 1, position) == min(after[group] - 1, position)


def test_ties_go_to_the_earlier_position_then_to_the_earlier_group() -> None:
    survival = torch.full((3, 2), 0.5)
    caps = np.full(3, 3)
    assert [verify_lens(survival, caps, k).tolist() for k in range(7)] == [
        [1, 1, 1], [2, 1, 1], [2, 2, 1], [2, 2, 2], [3, 2, 2], [3, 3, 2], [3, 3, 3],
    ]  # fmt: skip


def test_columns_that_disagree_are_refused() -> None:
    with pytest.raises(ShapeMismatch, match="2 groups"):
        verify_lens(torch.ones(2, 5), np.ones(3, np.int64), 1)
